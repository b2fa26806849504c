"""Every diagnosis on a planted fault: its kind, its numbers, its residual."""
from __future__ import annotations

import pytest
import torch

from alignment import diagnose
from alignment.diagnose.rotary import rotate

G = torch.Generator().manual_seed(3)
A = torch.randn(12, 8, generator=G)
SQUARE = torch.randn(8, 8, generator=G)


def kind(a, b, name="tensor", **kwargs):
    causes = diagnose.tensor(a, b, name, **kwargs)
    return causes[0].kind if causes else None


@pytest.mark.parametrize(("a", "b", "expected"), [
    (A, -A, "sign"),
    (A, A.abs(), "abs"),
    (A, A * 0.125, "scaled"),
    (A, A * (8 ** -0.5), "scaled"),
    (A, A + 3, "constant_offset"),
    (A, A.bfloat16().float(), "rounded"),
    (A, A.half().float(), "rounded"),
    (A.bfloat16().float(), A, "rounded"),
    (A.double(), A.double().float().double(), None),
    (A, A.bfloat16(), "dtype_cast"),
    (SQUARE, SQUARE.T.contiguous(), "transposed"),
    (A, A.T.contiguous(), "transposed"),
    (A, torch.cat([A[6:], A[:6]]), "swapped_halves"),
    (A, torch.cat([A[:, 4:], A[:, :4]], 1), "swapped_halves"),
    (A, torch.stack([A[:6], A[6:]], 1).flatten(0, 1), "interleaved"),
    (A, A[torch.randperm(12, generator=G)], "permutation"),
    (A, torch.cat([A[2:], A[:2] * 3]), "lag"),
    (A, torch.cat([A[:1] * 3, A[:-1]]), "lag"),
    (A, torch.cat([A, torch.zeros(4, 8)]), "padded_vocabulary"),
    (A, A * (1 + torch.arange(12.0)[:, None] / 1000), "row_scale"),
    (A, A * (1 + 6e-8), "rounding"),
    (A, A.clone(), None),
    (torch.ones(8, 8), torch.ones(8, 8) * 2, None),
    (torch.zeros(8, 8), torch.ones(8, 8), None),
])  # fmt: skip
def test_tensor(a, b, expected):
    assert kind(a, b) == expected


def test_rounded_double():
    x = torch.randn(40, dtype=torch.float64)
    c = diagnose.tensor(x, x.float().double())
    assert c[0].evidence["format"] == "float32"


@pytest.mark.parametrize(("mode", "name"), [("nearest-even", "TF32"), ("nearest-away", "TF32 (ties away from zero)"), ("truncate", "TF32 (truncated)")])
def test_tf32_modes(mode, name):
    from alignment.diagnose.numbers import _mantissa

    x = torch.cat([torch.randn(200, generator=G), torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11])])
    c = diagnose.tensor(x, _mantissa(x, 10, mode))[0]
    assert c.kind == "rounded" and name in c.evidence["formats"]


def test_stale():
    new, old = A + torch.randn(12, 8, generator=G), A
    assert kind(new, old.clone(), previous=old) == "stale"
    assert kind(new, new + torch.randn(12, 8, generator=G), previous=old) is None


@pytest.mark.parametrize(("ea", "eb"), [(1e-5, 1e-6), (1e-6, 1e-5), (1e-5, 1e-8), (1e-6, 1e-3)])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_epsilon(ea, eb, layer_norm):
    x = torch.randn(20, 64, generator=G, dtype=torch.float64) * torch.logspace(-3, 0, 20, dtype=torch.float64)[:, None]
    w = torch.randn(64, generator=G, dtype=torch.float64)
    c = x - x.mean(-1, keepdim=True) if layer_norm else x

    def norm(eps: float) -> torch.Tensor:
        return (c * torch.rsqrt((c * c).mean(-1, keepdim=True) + eps) * w).float()

    found = diagnose.norm(x.float(), norm(ea), norm(eb))
    assert found is not None and found.evidence["a"] == ea and found.evidence["b"] == eb
    assert diagnose.norm(x.float(), norm(ea), norm(ea)) is None


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1000000.0])
def test_rotary(base):
    p = torch.arange(50)
    f = base ** (-torch.arange(8, dtype=torch.float64) / 8)
    x = torch.randn(50, 2, 16, generator=G)
    half, inter = rotate(x, p, f, "half", 8).float(), rotate(x, p, f, "interleaved", 0).float()
    c = diagnose.rotary(x, half, inter, p)
    assert c.kind == "rotary_layout" and "(i, i+8)" in c.evidence["a"] and "(2i, 2i+1)" in c.evidence["b"]
    laundered = rotate(x, p, f.bfloat16().double(), "half", 8).float()
    c = diagnose.rotary(x, half, laundered, p, base=base)
    assert c.kind == "rotary_frequency" and "bfloat16" in c.evidence["b"]
    other = rotate(x, p, 77.0 ** (-torch.arange(8, dtype=torch.float64) / 8), "half", 8).float()
    assert diagnose.rotary(x, half, other, p) is None


def test_rotary_tables():
    p = torch.arange(300.0)

    def table(base, both=False, half=None):
        f = base ** (-torch.arange(8, dtype=torch.float64) / 8)
        f = f if half is None else f.to(half).double()
        c = (p[:, None].double() * f).cos().float()
        return torch.cat([c, c], -1) if both else c

    assert diagnose.tables(table(1e4), table(5e5)).kind == "rotary_base"
    for both in (False, True):
        c = diagnose.tables(table(1e4, both), table(1e4, both, torch.bfloat16))
        assert c.kind == "rotary_frequency" and c.evidence["format"] == "bfloat16" and c.evidence["side"] == "b"
    assert diagnose.tables(table(1e4), torch.randn(300, 8)) is None


def test_topk():
    z = torch.tensor([[1.0, 1.0, 0.5], [0.1, 0.2, 0.3]])
    c = diagnose.topk(torch.tensor([[0], [2]]), torch.tensor([[1], [2]]), z)
    assert c.kind == "tie" and c.evidence["margin"] == 0
    assert diagnose.topk(torch.tensor([[0, 1]]), torch.tensor([[1, 0]])).kind == "slot_order"
    assert diagnose.topk(torch.tensor([[0, 1]]), torch.tensor([[0, 2]]), torch.tensor([[3.0, 2.0, 1.0]])) is None


def test_nonfinite_origin():
    good, bad = torch.ones(4, 2), torch.ones(4, 2)
    bad[2] = float("nan")
    c = diagnose.nonfinite({"embed": good, "layers.0.attn": bad, "layers.0.mlp": bad * 2})
    assert c.evidence["tensor"] == "layers.0.attn" and c.evidence["rows"] == [2] and "embed" in c.text
    assert diagnose.nonfinite({"embed": good}) is None


@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (8, 2), (9, 3), (14, 2), (8, 8)])
def test_qkv(heads, kv):
    d = 2
    w = torch.randn((heads + 2 * kv) * d, 3, generator=G)
    slots = dict(zip([*(f"q{i}" for i in range(heads)), *(f"k{i}" for i in range(kv)), *(f"v{i}" for i in range(kv))],
                     w.chunk(heads + 2 * kv), strict=True))  # fmt: skip
    grouped = torch.cat([slots[s] for s in diagnose.qkv_order(heads, kv)])
    c = diagnose.qkv(w, grouped)
    assert c.kind == "qkv_layout" and c.evidence == {"heads": heads, "kv_heads": kv, "rows": d}
    assert diagnose.qkv(grouped, w).kind == "qkv_layout"


def test_experts():
    a = {e: torch.full((2, 2), float(e)) for e in range(4)}
    assert diagnose.experts(a, dict(a)) is None
    assert diagnose.experts(a, {**a, 0: a[1], 1: a[0]}).kind == "expert_permutation"
    c = diagnose.experts(a, {**a, 3: a[0]})
    assert c.kind == "expert_duplicates" and c.evidence["duplicates"] == [[0, 3]] and c.evidence["lost"] == [3]
    assert diagnose.experts(a, {**a, 3: torch.ones(2, 2) * 9}) is None  # new content: no copy
