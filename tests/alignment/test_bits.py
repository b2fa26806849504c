"""bits: every format, every way to be fooled, against a plain reference; and the digests agree with it."""
from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import bits, digest, scan
from alignment.errors import InputError
from alignment.formats import FORMATS
from alignment.verdict import Status

DTYPES = [getattr(torch, n) for n, f in FORMATS.items() if f.kind != "packed" and n != "complex32"]
FLOATS = [d for d in DTYPES if d.is_floating_point]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, NaN and infinity included."""
    rng = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    raw = rng.bytes(int(np.prod(shape, dtype=int)) * dtype.itemsize)
    return torch.frombuffer(bytearray(raw or b"\0" * 16), dtype=dtype)[: math.prod(shape)].reshape(shape).clone()


def finite(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100, shape, generator=g).to(dtype)
    x = torch.randn(shape, generator=g)
    return x.abs().to(dtype) if dtype is torch.float8_e8m0fnu else x.to(dtype)


def raw(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), shapes, shapes, st.integers(0, 3), st.integers(0, 3))
def test_equal_means_same_dtype_shape_bits_and_finite(da, db, sa, sb, xa, xb):
    a, b = random_bits(da, sa, xa), random_bits(db, sb, xb)
    r = bits.compare(a, b)
    same = da == db and sa == sb and raw(a) == raw(b)
    wide = a.float() if a.dtype.itemsize == 1 and a.is_floating_point() else a
    all_finite = not (a.is_floating_point() or a.is_complex()) or bool(wide.isfinite().all())
    assert r.equal == (same and all_finite and a.numel() > 0)
    assert (r.status is Status.PASS) == r.equal
    assert (digest.digest(a) == digest.digest(b)) == same
    assert (digest.device_digest(a) == digest.device_digest(b)) == same


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 10**6), st.integers(0, 10**6))
def test_one_flipped_bit_is_found_where_it_is(dtype, n, seed, which):
    a = finite(dtype, (n, 3), seed)
    if dtype is torch.bool:
        b = a.clone()
        at = which % b.numel()
        b.view(-1)[at] = ~b.view(-1)[at]
    else:
        b = a.clone()
        words = b.view(-1).view(torch.uint8)
        byte = which % words.numel()
        words[byte] ^= 1 << (which % 8)
        at = byte // dtype.itemsize
    v = bits.judge(a, b)
    assert v.status is Status.FAIL
    assert v.first_bad.index == (at // 3, at % 3)
    assert v.stats["differing"] == 1
    assert digest.digest(a) != digest.digest(b)
    assert digest.device_digest(a) != digest.device_digest(b)


def ulp_reference(dtype: torch.dtype, x: float, y: float) -> int:
    width = {4: "f", 8: "d"}[dtype.itemsize]

    def key(v: float) -> int:
        p = struct.unpack("<i" if width == "f" else "<q", struct.pack("<" + width, v))[0]
        return p if p >= 0 else -(p & (2 ** (8 * dtype.itemsize - 1) - 1)) - 1

    return abs(key(x) - key(y))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([torch.float32, torch.float64]), st.lists(st.tuples(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False)), min_size=1, max_size=20))
def test_statistics_against_plain_python(dtype, pairs):
    a, b = (torch.tensor([p[i] for p in pairs], dtype=dtype) for i in (0, 1))
    r = bits.compare(a, b)
    d = [abs(y - x) for x, y in pairs]
    assert r.max_abs == pytest.approx(max(d), rel=1e-6)
    assert r.mean_abs == pytest.approx(sum(d) / len(d), rel=1e-5)
    if r.differing:
        assert r.ulp_max == max(ulp_reference(dtype, x, y) for x, y in pairs)
        first = next(i for i, (x, y) in enumerate(pairs) if struct.pack("d", x) != struct.pack("d", y))
        assert r.first == (first,)
        assert r.ulp_first == ulp_reference(dtype, *pairs[first])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_is_never_equal(dtype):
    special = {torch.float8_e8m0fnu: 255, torch.float8_e4m3fn: 0x7F, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
    if dtype in special:
        a = torch.tensor([special[dtype]] * 3, dtype=torch.uint8).view(dtype)
    else:
        a = torch.tensor([math.nan] * 3).to(dtype)
    v = bits.judge(a, a.clone())
    assert v.status is Status.INVALID
    assert "non-finite 3/3" in v.reason
    b = finite(dtype, (3,), 1)
    assert bits.judge(a, b).status is Status.FAIL  # a number against no number is a difference


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_signed_zero_differs(dtype):
    a, b = torch.zeros(2).to(dtype), torch.tensor([0.0, -0.0]).to(dtype)
    v = bits.judge(a, b)
    assert v.status is Status.FAIL
    assert v.first_bad.index == (1,)
    assert v.stats["signed_zero"] == 1


def test_dtype_difference_is_a_difference_even_at_equal_values():
    v = bits.judge(torch.tensor([1.5, -2.25]), torch.tensor([1.5, -2.25], dtype=torch.bfloat16))
    assert v.status is Status.FAIL
    assert "dtype float32 vs bfloat16" in v.reason
    assert v.stats["differing"] == 0  # the values, for information


@pytest.mark.parametrize(("a", "b"), [((3,), (1,)), ((3,), (3, 1)), ((0,), (1,)), ((2, 3), (3, 2)), ((), (1,))])
def test_shapes_are_never_trimmed_or_broadcast(a, b):
    v = bits.judge(torch.ones(a), torch.ones(b))
    assert v.status is Status.INVALID
    assert "shape" in v.reason


def test_nothing_is_not_equal():
    assert bits.judge([], []).status is Status.NOT_RUN


def test_partial_is_not_green():
    a = torch.randn(1024)
    assert bits.judge(a[:5], a[:5].clone(), expected=1024).status is Status.INVALID


def test_tier():
    a = torch.tensor([1.0, 2.0])
    assert bits.judge(a, a + torch.tensor([2e-7, 0]), tier="1e-6").status is Status.PASS
    v = bits.judge(a, a + torch.tensor([0, 3e-6]), tier="1e-6")
    assert v.status is Status.FAIL and v.first_bad.index == (1,)
    assert bits.judge(a, a.double(), tier="1e-6").status is Status.FAIL
    assert bits.judge(a * math.nan, a * math.nan, tier="1e-6").status is Status.INVALID
    for tier in ("0", "nan", "-1", "loose", None):
        with pytest.raises(InputError):
            bits.judge(a, a, tier=tier)


def test_chunks_and_views():
    a = torch.randn(1000, 1001)
    b = a.clone()
    b[776, 333] += 1
    b[998, 1000] += 2
    for x, y in ((a, b), (a.T, b.T), (a[::2], b[::2]), (a.expand(1, 1000, 1001), b.expand(1, 1000, 1001))):
        v = bits.judge(x, y)
        assert v.status is Status.FAIL
        assert v.stats["differing"] == int((x != y).sum())
        assert v.first_bad.index == tuple((x != y).nonzero()[0].tolist())
    assert bits.judge(a.T, a.clone().T).status is Status.PASS
    assert digest.digest(a.T) == digest.digest(a.T.contiguous())
    assert digest.device_digest(a.T, chunk=77) == digest.device_digest(a.T.contiguous())


def test_device_digest_knows_places():
    a = torch.randn(64)
    assert digest.device_digest(a) != digest.device_digest(a.flip(0))
    assert digest.device_digest(a) != digest.device_digest(a.reshape(8, 8))
    assert digest.device_digest(torch.zeros(4)) != digest.device_digest(torch.zeros(8))


def test_digest_verdicts():
    d = digest.digest_all({"a": [1.0], "b": [2.0]})
    assert digest.judge(d, dict(d)).status is Status.PASS
    assert digest.judge(d, {"a": d["a"]}).status is Status.INVALID
    v = digest.judge(d, {**d, "b": d["a"]})
    assert v.status is Status.FAIL and v.first_bad.tensor == "b"
    assert digest.judge({}, {}).status is Status.NOT_RUN
    assert digest.combined(d) == digest.combined(dict(reversed(d.items())))
    with pytest.raises(InputError):
        digest.judge("xxh3:00", "lanes:00")


@pytest.mark.parametrize("value", ["text", None, object(), [[1], [1, 2]], np.array(["a"]), np.array([None]),
                                   torch.empty(2, device="meta"), torch.eye(2).to_sparse(), ["x"], [10**30]])  # fmt: skip
def test_what_is_not_numbers_is_refused_clearly(value):
    with pytest.raises(InputError):
        bits.compare(value, [1.0])


def test_numpy_and_lists():
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    assert bits.compare(x, torch.arange(6.0).reshape(2, 3)).equal
    assert bits.compare(np.float32(1.5), torch.tensor(1.5)).equal
    assert bits.compare([1.5, 2], torch.tensor([1.5, 2])).equal  # a list has no dtype of its own
    assert not bits.compare([0.1], torch.tensor([0.1])).equal  # unless that loses a bit


class Failing(bits.Source):
    """Zeros that end early, as a file does that is cut while it is read."""

    def __init__(self, words: int, until: int) -> None:
        self.format, self.shape, self.until = FORMATS["float32"], (words,), until

    def read(self, start, stop, out=None):
        if stop > self.until:
            raise InputError("the file ended", "all of it")
        return np.zeros(stop - start, np.uint32)


def test_a_file_that_ends_while_it_is_read_ends_the_comparison_in_every_thread():
    threads, words = torch.get_num_threads(), 20 * scan.CHUNK_BYTES // 4
    assert bits.compare(Failing(words, words), torch.zeros(words)).equal
    for until in (0, words // 2, words - 1):
        with pytest.raises(InputError, match="ended"):
            bits.compare(Failing(words, until), torch.zeros(words))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_pattern_is_finite_or_not_whoever_asks(dtype):
    form = FORMATS[str(dtype).removeprefix("torch.")]
    if form.word_bits <= 16:
        patterns = np.arange(1 << form.word_bits, dtype=form.word)
    else:
        patterns = np.random.default_rng(0).integers(0, 1 << form.word_bits, 4000, dtype=form.word)
        patterns = np.concatenate([patterns, patterns | form.word(form.mask), [0, form.mask, form.mask - 1]]).astype(form.word)
    one_by_one = [form.all_finite(patterns[i : i + 1]) for i in range(patterns.size)]
    assert [not x for x in one_by_one] == form.nonfinite(patterns).tolist()
