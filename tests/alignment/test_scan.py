"""scan: pieces, threads, buffers and shortcuts count what a loop over single words counts."""
from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import scan
from alignment.formats import FORMATS
from alignment.sources import TensorSource

FLOATS = [f for f in FORMATS.values() if f.is_float and f.words == 1]


def tensor(words: np.ndarray, name: str) -> torch.Tensor:
    return torch.from_numpy(words.copy()).view(getattr(torch, name))


def patterns(format, n: int, how: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of ``n`` words. No word is special unless ``how`` says so."""
    width = format.word_bits
    random = np.frombuffer(rng.bytes(n * width // 8), format.word).copy()
    other = np.frombuffer(rng.bytes(n * width // 8), format.word).copy()
    if how != "special":
        for x in (random, other):
            x[format.nonfinite(x)] = 1
    if how == "near":
        other = np.where(rng.random(n) < 0.3, random ^ format.word(1), random)
        other[format.nonfinite(other)] = random[format.nonfinite(other)]
    if how == "one sign in a hundred":
        other = np.where(rng.random(n) < 0.01, random ^ format.word(1 << (width - 1)), random)
        other[format.nonfinite(other)] = random[format.nonfinite(other)]
    if how == "zeros":
        random, other = (np.where(rng.random(n) < 0.5, format.word(1 << (width - 1)), format.word(0)) for _ in range(2))
        for x in (random, other):
            x[format.nonfinite(x)] = 0
    return random.astype(format.word), other.astype(format.word)


def key(pattern: int, format) -> int:
    """Patterns as integers in the order of their numbers; -0 is one below +0."""
    half = 1 << (format.word_bits - 1)
    return pattern if format.name == "float8_e8m0fnu" or pattern < half else -(pattern - half) - 1


def naive(format, a: np.ndarray, b: np.ndarray, bound: float | None) -> scan.Part:
    """One word after another."""
    out = scan.Part()
    va, vb = (tensor(x, format.name).double().tolist() for x in (a, b))
    sums: list[float] = []
    for i, (p, q, x, y) in enumerate(zip(a.tolist(), b.tolist(), va, vb, strict=True)):
        finite = math.isfinite(x), math.isfinite(y)
        out.nonfinite = out.nonfinite[0] + (not finite[0]), out.nonfinite[1] + (not finite[1])
        out.nan = out.nan[0] + math.isnan(x), out.nan[1] + math.isnan(y)
        if not all(finite) and out.first_nonfinite is None:
            out.first_nonfinite = i
        if p == q or not any(finite):
            continue
        out.differing += 1
        over = True
        if all(finite):
            sums.append(y - x)
            out.ulp_max = max(out.ulp_max, abs(key(p, format) - key(q, format)))
            out.signed_zero += x == y == 0
            if abs(y - x) > max(out.max_abs, 0):
                out.max_abs, out.max_at = abs(y - x), i
            over = bound is None or abs(y - x) >= bound
        out.over += over
        if over and out.first is None:
            out.first = i
    out.sum_abs, out.sum_signed = math.fsum(map(abs, sums)), math.fsum(sums)
    return out


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FLOATS), st.integers(1, 700), st.sampled_from(["any", "near", "one sign in a hundred", "zeros", "special"]),
       st.sampled_from([None, 1e-3]), st.sampled_from([64, 512, scan.CHUNK_BYTES]), st.integers(1, 3), st.integers(0, 10**6))
def test_as_a_loop_counts(format, n, how, bound, chunk, threads, seed):
    a, b = patterns(format, n, how, np.random.default_rng(seed))
    want = naive(format, a, b, bound)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CHUNK_BYTES", chunk)
        patch.setattr(scan, "THREADS", threads)
        got = scan.scan(TensorSource(tensor(a, format.name)), TensorSource(tensor(b, format.name)), bound)
    for field in ("differing", "over", "first", "ulp_max", "signed_zero", "nonfinite", "nan", "first_nonfinite"):
        assert getattr(got, field) == getattr(want, field), field
    tops = [abs(y - x) for x, y in zip(tensor(a, format.name).double().tolist(), tensor(b, format.name).double().tolist(), strict=True)
            if math.isfinite(y - x)]
    scale = max(tops, default=0.0)
    if want.max_abs <= 0:
        assert max(got.max_abs, 0.0) == 0 and got.max_at is None
    elif scale < 1e300:  # a difference of two doubles may overflow
        assert got.max_abs == pytest.approx(want.max_abs, rel=1e-6)
        assert abs(float(tensor(b, format.name)[got.max_at].double() - tensor(a, format.name)[got.max_at].double())) == pytest.approx(want.max_abs, rel=1e-6)
        assert got.sum_abs == pytest.approx(want.sum_abs, rel=1e-5)
        assert got.sum_signed == pytest.approx(want.sum_signed, rel=1e-5, abs=1e-5 * want.sum_abs)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_the_largest_difference_is_where_it_is(name, tmp_path):
    """From files, whose words lie in the buffers that distances are counted in."""
    from safetensors.torch import save_file

    from alignment import bits
    from alignment.dumps import open_dump

    a = torch.randn(3 * scan.CHUNK_BYTES // 2, generator=torch.Generator().manual_seed(1)).to(getattr(torch, name))
    b = a * 1.01
    b[-7] += 9
    for side, x in (("a", a), ("b", b)):
        save_file({"x": x}, tmp_path / f"{side}.safetensors")
    with open_dump(tmp_path / "a.safetensors") as left, open_dump(tmp_path / "b.safetensors") as right:
        found = bits.compare(left["x"], right["x"])
    assert found.max_index == (a.numel() - 7,) and found.differing == int((a != b).sum())
    assert found.ulp_max == bits.compare(a, b).ulp_max


def test_a_double_of_every_sign():
    def bits_of(x: float) -> int:
        return struct.unpack("<q", struct.pack("<d", x))[0]

    pairs = [(0.0, -0.0), (1.0, -1.0), (1e-300, 2e-300), (-2.0, -3.0)]
    a, b = (torch.tensor([p[i] for p in pairs], dtype=torch.float64) for i in (0, 1))
    found = scan.scan(TensorSource(a), TensorSource(b), None)
    assert found.ulp_max == 2 * bits_of(1.0) + 1 and found.signed_zero == 1 and found.differing == 4
