"""Causes in bit patterns, scales, versions, blocks, ranges, rotary embeddings, activations: planted, and clean twins."""
from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import InputError, diagnose, layers, weights
from alignment.compare import compare_runs
from alignment.diagnose.rotary import rotate
from alignment.records import RecordWriter
from alignment.verdict import Status

G = torch.Generator().manual_seed(11)
A = torch.randn(12, 8, generator=G)
BYTES = torch.randint(0, 256, (16, 24), generator=G, dtype=torch.uint8)
WORDS = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, (8, 8), dtype=np.int32))
IDS = torch.tensor([[3, 1, 4], [1, 5, 2], [6, 0, 3]])
SCALE = torch.tensor([0.0123, 0.0456, 0.0271, 0.0811])
CUBE = torch.randn(3, 4, 5, generator=G)
WIDE = torch.randn(32, 8, generator=G)


def kind(a, b, name="tensor", **kwargs):
    for clean in (a, b):
        if not clean.is_floating_point() or clean.isfinite().all():
            assert diagnose.tensor(clean, clean.clone(), name, **kwargs) == []
    causes = diagnose.tensor(a, b, name, **kwargs)
    return causes[0].kind if causes else None


def swapped_bytes(t):
    array = t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]).numpy()
    return torch.from_numpy(array.byteswap()).view(t.dtype)


def nibbles(words, order):
    w = words.numpy().view(np.uint32)
    return torch.from_numpy(sum(((w >> np.uint32(4 * j)) & np.uint32(15)) << np.uint32(4 * i) for i, j in enumerate(order)).view(np.int32))


def blocks(t, order):
    return torch.cat([t.chunk(len(order))[i] for i in order])


@pytest.mark.parametrize(("a", "b", "expected"), [
    (BYTES, (BYTES >> 4) | (BYTES << 4), "nibble_order"),
    (BYTES.view(torch.int8), ((BYTES >> 4) | (BYTES << 4)).view(torch.int8), "nibble_order"),
    (WORDS, nibbles(WORDS, [0, 2, 4, 6, 1, 3, 5, 7]), "nibble_order"),
    (WORDS, nibbles(WORDS, [7, 6, 5, 4, 3, 2, 1, 0]), "nibble_order"),
    *[(A.to(d), swapped_bytes(A.to(d)), "byte_order") for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)],
    (WORDS, swapped_bytes(WORDS), "byte_order"),
    (BYTES, BYTES ^ 0x88, "zero_point"), (BYTES, BYTES ^ 0x80, "zero_point"),
    (IDS, IDS + 8, "constant_offset"), (IDS, IDS - 1, "constant_offset"), (BYTES.int(), BYTES.int() + 1, "constant_offset"),
    (WIDE, blocks(WIDE, [2, 3, 0, 1]), "swapped_halves"), (WIDE, blocks(WIDE, [0, 2, 1, 3]), "parts_moved"),
    (WIDE, blocks(WIDE, [3, 2, 1, 0]), "parts_moved"), (WIDE, blocks(WIDE, [1, 3, 0, 2]), "parts_moved"),
    (WIDE, blocks(WIDE, [0, 0]), "parts_repeated"), (WIDE, blocks(WIDE, [0, 1, 1, 3]), "parts_repeated"),
    (WIDE.T.contiguous(), torch.cat([WIDE.T[:, 16:24], WIDE.T[:, :8], WIDE.T[:, 24:], WIDE.T[:, 8:16]], 1), "parts_moved"),
    (CUBE, CUBE.permute(1, 0, 2).contiguous(), "axes"), (CUBE, CUBE.permute(2, 0, 1).contiguous(), "axes"),
    (CUBE, CUBE.reshape(4, 3, 5), "reshaped"),
    (A, A.flip(1), "reversed"), (A, A[:, [1, 0, 4, 3, 2, 7, 6, 5]], "permutation"),
    (A.flatten(), A.flatten()[torch.randperm(96, generator=G)], "permutation"),
    (A.repeat_interleave(3, 0), A.repeat(3, 1), "interleaved"),
    (A, A.clamp(-1, 1), "clamped"), (A, A.clamp(max=0.5), "clamped"),
    (torch.cat([A, torch.full((1, 8), 1e-39)]), torch.cat([A, torch.zeros(1, 8)]), "flushed"),
    (A * 1e5, (A * 1e5).half().float(), "overflow"),
    (-A.abs(), (-A.abs()).cumsum(-1), "cumulative"),
    (A.softmax(-1), A.sigmoid(), "scoring"), (A.sigmoid(), A.softmax(-1), "scoring"),
])  # fmt: skip
def test_tensor(a, b, expected):
    assert kind(a, b) == expected


def test_packed_weights_larger_than_what_is_loaded():
    a = torch.randint(0, 256, (diagnose.LARGEST + 4096,), generator=G, dtype=torch.uint8)
    b = (a >> 4) | (a << 4)
    assert diagnose.tensor(a, b)[0].kind == "nibble_order"
    b[-1] ^= 1  # one word that the order does not explain
    assert diagnose.tensor(a, b) == []


@pytest.mark.parametrize(("a", "b", "expected"), [
    (SCALE, torch.ones(4), "scale_default"), (SCALE[0], torch.tensor(1.0), "scale_default"), (torch.ones(4), SCALE, "scale_default"),
    (SCALE, 1 / SCALE, "reciprocal"), (SCALE[0], 1 / SCALE[0], "reciprocal"), (SCALE.double(), 1 / SCALE.double(), "reciprocal"),
    (SCALE, SCALE.log2().ceil().exp2(), "scale_power"), (SCALE, SCALE.log2().round().exp2(), "scale_power"),
    (SCALE, torch.full((4,), float(SCALE.max())), "scale_merged"), (SCALE, SCALE * 1.25, "scaled"),
    (SCALE, torch.tensor([0.5, 0.1, 0.7, 0.2]), None),
])  # fmt: skip
@pytest.mark.parametrize("name", ["layers.0.mlp.down_proj.weight_scale", "k_scale", "layers.1.q_proj.weight_scale_inv"])
def test_scales(a, b, expected, name):
    assert kind(a, b, name) == expected
    v = weights.judge({name: a}, {name: b})
    assert v.status is Status.FAIL and [c.kind for c in v.causes] == ([expected] if expected else [])


@pytest.mark.parametrize("scale", [torch.tensor(0.031), SCALE[:, None], SCALE, torch.rand(2, 3, generator=G) * 0.1 + 0.01])
def test_a_scale_that_was_not_applied(scale):
    true = torch.randn(4, 384, generator=G) if scale.ndim < 2 or scale.shape[1] == 1 else torch.randn(256, 384, generator=G)
    full = diagnose.scales._expanded(scale.double(), true.shape).float()
    quantised = (true / full).round()
    right = quantised * full
    for wrong, expected in ((quantised, "scale_default"), (quantised / full, "scale_inverted")):
        v = weights.judge({"w.weight_scale": scale, "w.weight": right}, {"w.weight_scale": scale.clone(), "w.weight": wrong})
        assert v.status is Status.FAIL and v.causes[0].kind == expected, v.causes
    assert diagnose.applied(right, right + torch.randn(right.shape, generator=G), scale) is None


@pytest.mark.parametrize("back", [1, 2, 3])
def test_stale_by_several_updates(tmp_path, back):
    versions = [{"a.weight": torch.randn(6, 4, generator=G), "b.weight": torch.randn(6, 4, generator=G)} for _ in range(6)]
    wrong = {"a.weight": versions[5]["a.weight"], "b.weight": versions[5 - back]["b.weight"]}
    v = weights.judge(versions[5], wrong, previous=versions[4::-1])
    assert v.status is Status.FAIL and v.first_bad.tensor == "b.weight" and v.info["stale"] == ["b.weight"]
    assert v.causes[0].kind == "stale" and v.causes[0].evidence == {"updates": back}
    v = weights.judge(versions[0], versions[back], previous={-k: versions[k] for k in range(1, 5)})
    assert v.causes[0].kind == "ahead" and v.causes[0].evidence == {"updates": back}
    for side in "ab":  # the same from records of every step
        with RecordWriter(tmp_path / side) as w:
            for step, held in enumerate(versions):
                for name, value in (wrong if side == "b" and step == 5 else held).items():
                    w.add("weight", name, value, step=step)
    v = compare_runs(tmp_path / "a", tmp_path / "b")
    assert v.status is Status.FAIL and (v.first_bad.step, v.first_bad.tensor) == (5, "b.weight")
    assert v.causes[0].kind == "stale" and v.causes[0].evidence == {"updates": back}


def test_half_an_update():
    old, new = torch.randn(8, 4, generator=G), torch.randn(8, 4, generator=G)
    torn = torch.cat([new[:5], old[5:]])
    assert kind(new, torn, previous=old) == "torn"
    assert "3 of 8 rows" in diagnose.tensor(new, torn, previous=old)[0].text
    assert kind(new, torn + 1, previous=old) is None


def test_two_tensors_with_each_others_content():
    held = {f"layers.{i}.{n}": torch.randn(4, 4, generator=G) for i in range(3) for n in ("mlp.gate_proj.weight", "mlp.up_proj.weight")}
    wrong = dict(held)
    wrong["layers.1.mlp.gate_proj.weight"], wrong["layers.1.mlp.up_proj.weight"] = held["layers.1.mlp.up_proj.weight"], held["layers.1.mlp.gate_proj.weight"]
    v = weights.judge(held, wrong)
    assert v.status is Status.FAIL and v.first_bad.tensor == "layers.1.mlp.gate_proj.weight" and v.causes[0].kind == "swapped"
    late = {**held, "layers.1.mlp.up_proj.weight": held["layers.0.mlp.up_proj.weight"]}
    assert weights.judge(held, late).causes[0].kind == "moved"
    assert weights.judge(held, {**held, "layers.2.mlp.up_proj.weight": torch.randn(4, 4, generator=G)}).causes == []


def angles(base=10000.0, lanes=8, rows=300):
    return torch.arange(rows, dtype=torch.float64)[:, None] * base ** (-torch.arange(lanes, dtype=torch.float64) / lanes)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("base", [10000.0, 1000000.0])
def test_tables(base, both):
    def table(f):
        return (torch.cat([f, f], -1) if both else f).float()

    x = angles(base)
    cos, sin = table(x.cos()), table(x.sin())
    for a, b, what, expected in ((cos, sin, "cos", "cos_sin_swapped"), (sin, cos, "sin", "cos_sin_swapped"), (sin, -sin, "sin", "rotary_direction"),
                                 (cos, table((x / 4).cos()), "cos", "rotary_scaling"), (sin, table((x / 8).sin()), "sin", "rotary_scaling")):  # fmt: skip
        for name in (f"layers.0.rope.{what}", f"{what}_cached"):
            assert kind(a, b, name) == expected, (what, name)
    v = layers.judge({"rope.cos": cos, "rope.sin": sin}, {"rope.cos": sin, "rope.sin": cos})
    assert v.status is Status.FAIL and v.first_bad.tensor == "rope.cos" and v.causes[0].kind == "cos_sin_swapped"


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("known", [True, False])
def test_rotations(layout, known):
    p, f = torch.arange(40), 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    x = torch.randn(40, 3, 16, generator=G)

    def turned(pp=p, ff=f, **kw):
        return rotate(x, pp, ff, layout, 8, **kw).float()

    for wrong, expected, told in ((turned(-p), "rotary_direction", True), (turned(p + 1), "rotary_position", True), (x, "rotary_missing", True),
                                  (turned(p - 2), "rotary_position", True), (turned(swapped=True), "cos_sin_swapped", False),
                                  (turned(p / 4), "rotary_scaling", False), (turned(2 * p), None, False)):  # fmt: skip
        name = "layers.0.attn.q_after_rope"
        v = layers.judge({name: turned()}, {name: wrong}, positions=p, inputs={name: x} if known else None)
        assert v.status is Status.FAIL
        if known or told:
            assert v.causes[0].kind == (expected or "rotary_twice"), v.causes
    assert layers.judge({"q_after_rope": turned()}, {"q_after_rope": turned()}, positions=p).status is Status.PASS
    noise = {"q_after_rope": turned() + torch.randn(40, 3, 16, generator=G)}
    assert layers.judge({"q_after_rope": turned()}, noise, positions=p, inputs={"q_after_rope": x} if known else None).causes == []


def test_activations():
    x = torch.randn(20, 16, generator=G)
    gate, up = x.chunk(2, -1)
    for a, b in ((F.gelu(x), F.gelu(x, approximate="tanh")), (F.silu(x), F.gelu(x)), (F.silu(x), F.relu(x)), (F.silu(gate) * up, gate * F.silu(up)),
                 (F.silu(gate) * up, F.silu(x[:, ::2]) * x[:, 1::2]), (F.silu(gate) * up, F.gelu(gate, approximate="tanh") * up)):  # fmt: skip
        v = layers.judge({"mlp.act.input": x, "mlp.act.output": a}, {"mlp.act.input": x, "mlp.act.output": b})
        assert v.status is Status.FAIL and v.first_bad.tensor == "mlp.act.output" and v.causes[0].kind == "activation", v.causes
    assert diagnose.activation(x, F.silu(x), F.silu(x) + 0.1) is None


def test_residuals():
    x, d, s = (torch.randn(9, 16, generator=G) for _ in range(3))
    for right, wrong in ((x + d, d), (x + d, x + d + x), (x + d + s, x + d)):
        a = {"layers.0.output": x, "layers.1.shared.output": s, "layers.1.output": right}
        v = layers.judge(a, {**a, "layers.1.output": wrong})
        assert v.status is Status.FAIL and v.causes[0].kind == "residual", v.causes
    assert layers.judge(a, {**a, "layers.1.output": right + torch.randn(9, 16, generator=G)}).causes == []


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["w", "w.weight_scale", "rope.cos", "q_after_rope", "act.output", "layers.0.norm.weight"]),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int32]), st.integers(4, 12), st.integers(2, 12))
def test_200_clean_and_200_unrelated_pairs(seed, name, dtype, rows, width):
    g = torch.Generator().manual_seed(seed)

    def draw():
        if dtype.is_floating_point:
            return torch.randn(rows, width, generator=g).to(dtype)
        return torch.randint(0, 200, (rows, width), generator=g).to(dtype)

    a, b, old, x = draw(), draw(), draw(), draw()
    assert diagnose.tensor(a, a.clone(), name, previous=[old, x], scale=torch.tensor(0.5)) == []
    assert diagnose.tensor(a, b, name, previous=[old, x], scale=torch.tensor(0.5)) == []
    held = {"x.input": x, name: a, "other": old}
    assert layers.judge(held, {n: t.clone() for n, t in held.items()}).status is Status.PASS
    assert layers.judge(held, {**held, name: b}).causes == []
    changed = a.clone()
    changed.view(-1)[seed % a.numel()] += 3
    assert diagnose.tensor(a, changed, name, previous=[old, x], weights=True) == []
    assert math.prod(a.shape) == a.numel()


@pytest.mark.parametrize("t", [0.7, 1.3])
def test_whole_distributions_of_any_name(t):
    z = torch.randn(5, 9, generator=G)
    for name in ("logprobs", "out", "layers.0.attn.probs"):
        for a, b in ((z.log_softmax(-1), (z / t).log_softmax(-1)), (z.softmax(-1), (z / t).softmax(-1))):
            assert kind(a, b, name) == "temperature"
    assert kind(z.log_softmax(-1), torch.randn(5, 9, generator=G).log_softmax(-1)) is None


def test_frequencies_with_zeros_behind_them():
    f = torch.tensor([1.0, 0.1])
    for a, b in ((torch.cat([f, torch.zeros(6)]), f), (f, torch.cat([f, torch.zeros(6)]))):
        v = layers.judge({"rope.inv_freq": a}, {"rope.inv_freq": b})
        assert v.status is Status.INVALID and v.causes[0].kind == "rotary_lanes"
    other = layers.judge({"rope.inv_freq": f}, {"rope.inv_freq": torch.tensor([1.0, 0.1, 0.01])})
    assert other.status is Status.INVALID and all(c.kind != "rotary_lanes" for c in other.causes)


@pytest.mark.parametrize(("change", "expected"), [
    (lambda x: x / math.log(2), "scaled"), (lambda x: x.exp(), "exponential"), (lambda x: x.cumsum(0), "cumulative"), (lambda x: x.flip(0), "reversed"),
    (lambda x: x - 0.03, "constant_offset"), (lambda x: x.clamp(min=-0.5), "clamped"), (lambda x: -x, "sign"), (lambda x: x.bfloat16().float(), "rounded"),
    (lambda x: x * torch.rand(30, generator=G), None),
])
def test_log_probs_that_went_through_json(tmp_path, change, expected):
    x = -torch.rand(30, generator=G)
    for side, values in (("a", x), ("b", change(x)), ("c", x)):
        row = {"request_id": "r", "prompt_token_ids": [1], "token_ids": list(range(30)), "logprobs": [float(v) for v in values]}
        (tmp_path / f"{side}.json").write_text(json.dumps([row]))
    v = compare_runs(tmp_path / "a.json", tmp_path / "b.json")
    assert v.status is Status.FAIL and [c.kind for c in v.causes] == ([expected] if expected else [])
    assert compare_runs(tmp_path / "a.json", tmp_path / "c.json").status is Status.PASS


ODD = [torch.bool, torch.uint16, torch.uint64, torch.complex64, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.int8]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ODD, ids=str)
@pytest.mark.parametrize("name", ["l.w_scale", "rope.cos", "q_after_rope", "act.output", "inv_freq"])
def test_no_diagnosis_breaks_on_a_format_or_a_shape(dtype, name):
    for shape in ((), (1,), (5,), (4, 6), (6, 4), (2, 3, 4), (0, 3)):
        a, b = (torch.rand(shape, generator=G) * 9 for _ in range(2))
        a, b = a.to(dtype), b.to(dtype)
        for judged in (layers.judge({name: a, "x.input": a}, {name: b, "x.input": a}), weights.judge({name: a}, {name: b}, previous=[{name: b}])):
            assert judged.status is not Status.PASS or torch.equal(a, b)


@pytest.mark.parametrize("previous", [5, [None], "x", [5]])
def test_previous_versions_that_are_none(previous):
    with pytest.raises(InputError):
        weights.judge({"a": torch.ones(2)}, {"a": torch.zeros(2)}, previous=previous)


@pytest.mark.parametrize("name", ["w", "w.linear_qkv.weight", "rope.inv_freq"])
def test_no_diagnosis_breaks_on_two_shapes(name):
    """A scalar beside a row among them."""
    shapes = ((), (1,), (5,), (4, 6), (6, 4), (1, 6), (2, 3, 4), (0, 3))
    for shape, other in itertools.permutations(shapes, 2):
        a, b = (torch.rand(s, generator=G) for s in (shape, other))
        assert all(judge({name: a}, {name: b}).status in (Status.FAIL, Status.INVALID) for judge in (layers.judge, weights.judge))
