"""The third party of models that choose: what it lets through is rounding, what it tells is a fault, at its place."""
from __future__ import annotations

import types

import pytest
import torch

from alignment.verdict import Status
from gates import choosing
from gates.synthetic import write
from gates.synthetic_experts import SPARSE
from tests.vllm.plain import Plain
from vime import ops

PROMPT, RESPONSE = 30, 8


@pytest.fixture(scope="module", params=["glm5.2-6layer-tiny", "qwen3-moe-tiny"])
def case(request, tmp_path_factory):
    """(third party, samples, records) of a pass in our ops in bf16, as an engine records it."""
    folder = write(SPARSE[request.param], tmp_path_factory.mktemp("made") / "model")
    plain, g = Plain(folder, torch.bfloat16), torch.Generator().manual_seed(2)
    samples, rows, parts = [], [], {}
    for i in range(3):
        ids = torch.randint(512, (PROMPT + RESPONSE,), generator=g).tolist()
        logprobs = ops.token_logprob(plain.logits(ids[:-1])[PROMPT - 1:], torch.tensor(ids[PROMPT:])).tolist()
        samples.append(types.SimpleNamespace(request_id=f"r{i}.0", prompt_token_ids=ids[:PROMPT], token_ids=ids[PROMPT:], logprobs=logprobs))
        rows += [(f"r{i}.0", p, t) for p, t in enumerate(ids[:-1])]
        for layer, chosen in plain.routing.items():
            parts.setdefault(f"layers.{layer}.routing", []).append(chosen)
        for layer, chosen in plain.index.items():
            parts.setdefault(f"layers.{layer}.index", []).append(chosen)
    records = types.SimpleNamespace(rows=rows, tensors={name: torch.cat(part) for name, part in parts.items()})
    return choosing.Held(folder, torch.bfloat16), samples, records


def changed(records, name, row, value):
    """The records with one choice exchanged; ``value`` of the row as it was."""
    tensor = records.tensors[name].clone()
    tensor[row] = value(tensor[row])
    return types.SimpleNamespace(rows=records.rows, tensors={**records.tensors, name: tensor})


def test_rounding_is_let_through(case):
    held, samples, records = case
    found = list(choosing.judge(held, samples, records))
    assert all(v.green for v in found[:2]), [v.reason for v in found]
    assert 0.005 < float(found[1].tier) < 0.3  # one rounding of bf16 over these layers
    assert found[0].info["turned over"] < 0.2 * found[0].coverage["third-party choices"].expected


def test_what_transformers_chooses_itself_is_never_short(case):
    """Held to what it finds best itself, it gives what it gives when nobody holds it."""
    held, samples, records = case
    sample = samples[1]
    given = choosing.choices(records, sample, held.full)
    for at in sorted(given, key=lambda at: (at[1], at[0])):  # layer by layer, keys before experts, since each choice changes the scores behind it
        now = held.run(torch.float32, sample, given)
        scores, k = now.scores[at], now.taken[at]
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        given[at] = torch.where(scores.gather(1, best) > choosing._HIDDEN, best, torch.arange(len(best))[:, None])
    done = held.run(torch.float32, sample, given)
    assert all(not choosing.shortfall(done.scores[at], given[at], done.taken[at]).any() for at in given)
    with torch.no_grad():
        free = held.models[torch.float32](torch.tensor([[*sample.prompt_token_ids, *sample.token_ids[:-1]]])).logits[0]
    assert torch.allclose(free, done.logits_TV, rtol=0, atol=1e-5)


def test_a_wrong_expert_is_told_at_its_place(case):
    held, samples, records = case
    layer = 4 if held.full else 2

    def worst(ids):
        scores = held.run(torch.float32, samples[1], choosing.choices(records, samples[1], held.full)).scores["routing", layer]
        return torch.cat([ids[:-1], scores[20].argmin()[None]])

    row = next(i for i, key in enumerate(records.rows) if key[:2] == ("r1.0", 20))
    verdict = next(iter(choosing.judge(held, samples, changed(records, f"layers.{layer}.routing", row, worst))))
    assert verdict.status is Status.FAIL
    assert (verdict.first_bad.layer, verdict.first_bad.module, verdict.first_bad.request, verdict.first_bad.position) == (
        layer, "routing", "r1.0", 20)


def test_a_wrong_key_is_told_at_its_place(case):
    held, samples, records = case
    if not held.full:
        return
    layer = held.full[-1]

    def worst(keys):
        scores = held.run(torch.float32, samples[2], choosing.choices(records, samples[2], held.full)).scores["index", layer][35]
        hidden = scores <= choosing._HIDDEN
        return torch.cat([keys[1:], scores.masked_fill(hidden, float("inf")).argmin()[None]])

    row = next(i for i, key in enumerate(records.rows) if key[:2] == ("r2.0", 35))
    verdict = next(iter(choosing.judge(held, samples, changed(records, f"layers.{layer}.index", row, worst))))
    assert verdict.status is Status.FAIL
    assert (verdict.first_bad.layer, verdict.first_bad.module, verdict.first_bad.position) == (layer, "index", 35)


def test_a_key_too_few_is_told(case):
    held, samples, records = case
    if not held.full:
        assert not any(name.endswith("index") for name in records.tensors)
        return
    row = next(i for i, key in enumerate(records.rows) if key[:2] == ("r2.0", 33))
    verdict = next(iter(choosing.judge(held, samples, changed(records, "layers.1.index", row, lambda keys: torch.cat(
        [keys[1:], keys.new_full((1,), -1)])))))
    assert verdict.status is Status.FAIL and (verdict.first_bad.layer, verdict.first_bad.position) == (1, 33)


def test_a_wrong_logprob_is_told(case):
    held, samples, records = case
    wrong = [types.SimpleNamespace(**vars(s)) for s in samples]
    wrong[2].logprobs = [*wrong[2].logprobs[:3], wrong[2].logprobs[3] + 0.3, *wrong[2].logprobs[4:]]
    verdict = list(choosing.judge(held, wrong, records))[1]
    assert verdict.status is Status.FAIL and (verdict.first_bad.request, verdict.first_bad.position) == ("r2.0", PROMPT + 3)


def test_choices_that_were_not_recorded_are_an_error(case):
    held, samples, records = case
    fewer = types.SimpleNamespace(rows=records.rows, tensors={n: t for n, t in records.tensors.items() if n != "layers.3.routing"})
    with pytest.raises((RuntimeError, KeyError)):
        list(choosing.judge(held, samples, fewer))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_let_nothing_through(bad):
    """Nor does a rounding that is none: NaN is neither above a bound nor below it."""
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.8, 0.4]])
    ids, at, sample = torch.tensor([[0, 1], [1, 2]]), ("routing", 3), types.SimpleNamespace(request_id="r0")

    def verdict(scores, allowed):
        one = choosing.Pass(sample, torch.zeros(2, 4), {at: scores}, {at: 2})
        return choosing._choices("choices", [{at: ids}], [one], {at: allowed})

    assert verdict(scores, 0.0).green
    assert verdict(scores, bad).status is Status.FAIL
    scores[1, 0] = float("nan")
    said = verdict(scores, 0.1)
    assert said.status is Status.FAIL and (said.first_bad.position, said.first_bad.layer) == (1, 3)


def test_fp8_is_that_of_the_contract():
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0, 1.0, 1.0])[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.cat([x, torch.ones(7, 16)], 1).to(dtype)
        assert torch.equal(choosing.through_fp8(rows[:, :256]), ops.through_fp8_cache(rows, 256)[:, :256])
