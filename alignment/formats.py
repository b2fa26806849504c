"""Number formats as bit patterns: how wide, which patterns are not finite, how patterns are ordered.

Equality is judged on the bits, so everything here works on unsigned integers of the format's width. A format that
is missing here is refused, never guessed.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from alignment.errors import InputError


@dataclasses.dataclass(frozen=True)
class Format:
    """One number format.

    ``word`` is the unsigned integer that holds one real number (a complex number is two words). A pattern is not
    finite if ``pattern & mask == pattern_value``. ``ordered`` says that the patterns are sign and magnitude, so that
    a distance in units in the last place exists.
    """

    name: str
    word: type
    kind: str  # "float", "int", "bool" or "packed" (opaque bytes: sub-byte formats)
    mask: int | None = None
    special: int | None = None
    words: int = 1

    @property
    def word_bits(self) -> int:
        return np.dtype(self.word).itemsize * 8

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.word).itemsize * self.words

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    def hex(self, pattern: int) -> str:
        return f"0x{int(pattern):0{self.word_bits // 4}x}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that gives one word its value."""
        return _WORD_VALUE.get(self.name) or getattr(torch, self.name)

    def values(self, patterns: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The numbers behind the patterns, as float64 or in the dtype of ``out`` (which may be used as the buffer);
        exact for all but 64-bit integers."""
        out = np.empty(patterns.shape, np.float64) if out is None else out
        if out.dtype.name == self.name:
            return patterns.view(out.dtype)
        if self.kind == "packed" or self.name.startswith("uint"):
            out[...] = patterns
        else:
            torch.from_numpy(out).copy_(torch.from_numpy(patterns).view(self.torch_dtype))
        return out

    def nonfinite(self, patterns: np.ndarray) -> np.ndarray:
        """Boolean per word."""
        if self.mask is None:
            return np.zeros(patterns.shape, bool)
        return (patterns & self.word(self.mask)) == self.word(self.special)

    def all_finite(self, patterns: np.ndarray) -> bool:
        """Quick form of ``not nonfinite(...).any()``: two maxima, of the numbers with a sign and of those without."""
        if self.mask is None:
            return True
        if self.mask != self.special:
            return not self.nonfinite(patterns).any()
        sign = 1 << (self.word_bits - 1)
        if self.mask & sign:  # no sign bit: the mask is the one pattern that is no number
            return int(patterns.max(initial=0)) != self.mask
        signed = patterns.view(f"i{patterns.dtype.itemsize}")
        return int(patterns.max(initial=0)) < sign | self.mask and int(signed.max(initial=0)) < self.mask

    def distances(self, a: np.ndarray, b: np.ndarray, scratch: Sequence[np.ndarray]) -> Distances:
        """How far the patterns ``a`` and ``b`` (one word or more) lie apart in representable numbers; +0 and -0 are one apart.

        ``scratch`` are three buffers of their size; the first is left holding ``a ^ b``. Two dumps that have nothing in common
        cost little more than two that nearly agree.
        """
        xor, out, mask = scratch
        np.bitwise_xor(a, b, out=xor)
        if self.name == "float8_e8m0fnu":  # has no sign
            np.subtract(np.maximum(a, b), np.minimum(a, b), out=out)
            return Distances(int(out.max()), 0, int(np.count_nonzero(xor)))
        signed = np.dtype(f"i{a.dtype.itemsize}")
        least = int(xor.view(signed).min())  # below zero: somewhere the signs differ; above: every word does
        differing = a.size if least > 0 else int(np.count_nonzero(xor))
        # Of one sign, the distance is that of the magnitudes: a signed difference that cannot overflow.
        same = np.subtract(a.view(signed), b.view(signed), out=out.view(signed))
        if least >= 0:
            return Distances(max(int(same.max()), -int(same.min())), 0, differing)
        # Of two signs, it is the sum of the magnitudes and one.
        half, flipped = 1 << (self.word_bits - 1), xor.view(signed) < 0
        if 32 * int(np.count_nonzero(flipped)) < a.size:  # few, as in dumps that nearly agree: picked out
            at = np.flatnonzero(flipped)
            sums = (a[at] & self.word(half - 1)) + (b[at] & self.word(half - 1))
            same[at] = 0
            largest, zeros = int(sums.max()) + 1, sums.size - int(np.count_nonzero(sums))
            return Distances(max(largest, int(same.max()), -int(same.min())), zeros, differing)
        # Many: a + b has the sum and one sign bit, modulo the width; pass by pass, for all words.
        other = np.right_shift(xor.view(signed), self.word_bits - 1, out=mask.view(signed))  # all ones where the signs differ
        np.bitwise_or(same, other, out=same)  # -1 there: one apart, as they are at least
        largest = max(int(same.max()), -int(same.min()))
        np.add(a, b, out=out)
        np.add(out, self.word((half + 1) % (2 * half)), out=out)
        np.bitwise_and(out, mask, out=out)
        return Distances(max(largest, int(out.max())), int(np.count_nonzero(out == self.word(1))), differing)


@dataclasses.dataclass(frozen=True)
class Distances:
    """Of two arrays of patterns: the largest distance, words that differ only in the sign of a zero, words that differ."""

    largest: int
    signed_zero: int
    differing: int


_WORD_VALUE = {"complex64": torch.float32, "complex128": torch.float64, "complex32": torch.float16}


def _floats() -> list[Format]:
    def ieee(name: str, word: type, exponent: int, words: int = 1) -> Format:
        return Format(name, word, "float", exponent, exponent, words)

    return [
        ieee("float64", np.uint64, 0x7FF0000000000000),
        ieee("float32", np.uint32, 0x7F800000),
        ieee("float16", np.uint16, 0x7C00),
        ieee("bfloat16", np.uint16, 0x7F80),
        ieee("float8_e5m2", np.uint8, 0x7C),
        Format("float8_e4m3fn", np.uint8, "float", 0x7F, 0x7F),
        Format("float8_e4m3fnuz", np.uint8, "float", 0xFF, 0x80),
        Format("float8_e5m2fnuz", np.uint8, "float", 0xFF, 0x80),
        Format("float8_e8m0fnu", np.uint8, "float", 0xFF, 0xFF),
        Format("float4_e2m1fn_x2", np.uint8, "packed"),
        ieee("complex64", np.uint32, 0x7F800000, 2),
        ieee("complex128", np.uint64, 0x7FF0000000000000, 2),
        ieee("complex32", np.uint16, 0x7C00, 2),
    ]


_INTS = [
    Format(f"{sign}int{bits}", getattr(np, f"uint{bits}"), "int") for sign in ("", "u") for bits in (8, 16, 32, 64)
]

FORMATS: dict[str, Format] = {f.name: f for f in [*_floats(), *_INTS, Format("bool", np.uint8, "bool")]}

#: Short names as safetensors files spell them.
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


def format_of(dtype: torch.dtype | np.dtype | str, name: str = "tensor") -> Format:
    """The format of a torch dtype, a numpy dtype, or a name. Raises InputError for one that is not covered."""
    if isinstance(dtype, str):
        text = SAFETENSORS.get(dtype, dtype)
    elif isinstance(dtype, torch.dtype):
        text = str(dtype).removeprefix("torch.")
    else:
        text = np.dtype(dtype).name
    text = {"half": "float16", "float": "float32", "double": "float64", "fp32": "float32", "bf16": "bfloat16",
            "fp16": "float16", "fp64": "float64"}.get(text, text)  # fmt: skip
    try:
        return FORMATS[text]
    except KeyError:
        raise InputError(
            f"{name} has dtype {text}",
            "one of " + ", ".join(FORMATS),
            "convert it without changing a value, or dump its bytes as uint8",
        ) from None
