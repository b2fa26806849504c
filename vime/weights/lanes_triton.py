"""The kernel of :mod:`vime.weights.lanes`."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(h):
    """The 32-bit finaliser of MurmurHash3 (public domain); ``h`` is uint32, products wrap."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _total(h, mask):
    return tl.sum(tl.where(mask, h.to(tl.int64), 0), axis=0)


@triton.jit(do_not_specialize=["words", "first"])
def lanes(data_ptr, out_ptr, words, first, BLOCK: tl.constexpr):
    """Adds the mixes of ``words`` 32-bit words, of which the first has number ``first``, to ``out`` (int64 ``[4]``)."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < words
    word = tl.load(data_ptr + offset, mask=mask, other=0).to(tl.uint32, bitcast=True)
    at = offset + first
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    high = (at >> 32).to(tl.uint32)
    place = _mix(low + 0x9E3779B1) ^ _mix(high + (0x9E3779B1 >> 1))
    once = _mix(word ^ place)
    tl.atomic_add(out_ptr, _total(once, mask))
    tl.atomic_add(out_ptr + 1, _total(_mix((once + place + 0x9E3779B1) ^ word), mask))
    place = _mix(low + 0x85EBCA77) ^ _mix(high + (0x85EBCA77 >> 1))
    once = _mix(word ^ place)
    tl.atomic_add(out_ptr + 2, _total(once, mask))
    tl.atomic_add(out_ptr + 3, _total(_mix((once + place + 0x85EBCA77) ^ word), mask))
