"""No false alarm: 200 random clean pairs through every comparison, and no diagnosis without a difference."""
from __future__ import annotations

import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignment import bits, diagnose, layers, logprobs, match, rerun, weights
from alignment.records import RecordWriter
from alignment.verdict import Status
from tests.alignment.test_bits import DTYPES, finite

dtypes = st.sampled_from([d for d in DTYPES if not d.is_complex])
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
seeds = st.integers(0, 2**31)
CLEAN = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@CLEAN
@given(seeds, dtypes, shapes, st.integers(1, 4), st.integers(1, 12))
def test_200_clean_pairs(tmp_path_factory, seed, dtype, shape, layers_count, length):
    rng = random.Random(seed)
    a, b = finite(dtype, shape, seed), finite(dtype, shape, seed)
    assert bits.judge(a, b).status is Status.PASS
    assert bits.judge(a, b, tier="1e-6").status is Status.PASS
    assert diagnose.tensor(a, b) == []

    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(layers_count) for e in range(3)]
    held = {n: finite(dtype, shape, seed + i) for i, n in enumerate(names)}
    other = {n: held[n].clone() for n in rng.sample(names, len(names))}  # the order of a mapping is no difference
    assert weights.judge(held, other, previous={n: t * 0 if t.is_floating_point() and t.dtype.itemsize > 1 else t for n, t in held.items()}
                         ).status is Status.PASS  # fmt: skip
    assert weights.judge_stages({"load": held, "gather": other, "export": dict(held)}, ep=3).status is Status.PASS
    assert weights.judge_paths({"ipc": other, "disk": dict(held)}, held).status is Status.PASS
    assert weights.judge_received(list(held), list(held)[::-1], state=other).status is Status.PASS

    ids = [rng.randrange(50) for _ in range(length)]
    out = {f"layers.{i}.output": torch.randn(length, 4) for i in range(layers_count)}
    copy = {n: t.clone() for n, t in out.items()}
    v = layers.judge(out, copy, tokens_a=ids, tokens_b=list(ids), positions=range(1, length + 1))
    assert v.status is Status.PASS and not v.causes

    requests = {f"r{i}": [rng.randrange(50) for _ in range(rng.randint(1, 9))] for i in range(3)}
    left = {r: {"token_ids": t, "logprobs": torch.randn(len(t), generator=torch.Generator().manual_seed(i))}
            for i, (r, t) in enumerate(requests.items())}  # fmt: skip
    right = {r: {"token_ids": list(x["token_ids"]), "logprobs": x["logprobs"].clone()} for r, x in reversed(left.items())}
    v = logprobs.judge(left, right)
    assert v.status is Status.PASS and not v.causes
    assert match.judge(requests, dict(reversed(requests.items()))).status is Status.PASS

    v = rerun.judge([out, copy, {n: t.clone() for n, t in out.items()}])
    assert v.status is Status.PASS and not v.causes

    if seed % 10 == 0:
        from alignment.compare import compare_runs

        root = tmp_path_factory.mktemp("clean")
        for side in "ab":
            with RecordWriter(root / side) as w:
                for n, t in out.items():
                    w.add("layer", n, t, request="r", tokens=ids)
                for n, t in held.items():
                    w.add("weight", n, t)
        assert compare_runs(root / "a", root / "b").status in (Status.PASS, Status.NOT_RUN if length == 1 else Status.PASS)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(4, 40), st.integers(2, 8))
def test_unrelated_tensors_get_no_diagnosis(seed, rows, width):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g)
    assert diagnose.tensor(a, b) == []
    assert diagnose.tensor(a, b, previous=torch.randn(rows, width, generator=g)) == []
    z = torch.log_softmax(torch.randn(rows, width + 1, generator=g), -1)
    y = torch.log_softmax(torch.randn(rows, width + 1, generator=g), -1)
    assert diagnose.logprobs(z, y) == []
    ids = torch.randint(0, width + 1, (rows,), generator=g)
    assert diagnose.logprobs(a[:, 0], b[:, 0], logits=z, tokens=ids) == []
    assert diagnose.norm(a, a * 1.7, b) is None
    assert diagnose.experts(dict(enumerate(a)), dict(enumerate(b))) is None
    assert diagnose.topk(torch.tensor([[0]]), torch.tensor([[1]]), torch.tensor([[0.0, 5.0, 1.0]])) is None


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(8, 40), st.integers(0, 10**6))
def test_one_changed_element_is_not_explained_away(seed, n, at):
    a = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    b = a.clone()
    b.view(-1)[at % b.numel()] += 0.5
    assert diagnose.tensor(a, b) == []
