"""Published files hold more than the policy: prediction layers, indexers of layers that share indices. A conversion keeps
them to the bit; trainer and engine leave them out by one rule, and a config that hides them is refused."""
from __future__ import annotations

import json

import pytest
import torch

from alignment.verdict import Status
from tests.weights.tiny import load, with_mtp, with_spare_indexers, write
from vime.latent import UnsupportedLatent
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.diff import diff
from vime.weights.errors import ConfigMismatch, WeightError
from vime.weights.families import family_for
from vime.weights.policy import describe, left_out
from vime.weights.roundtrip import RoundTrip, roundtrip
from vime.weights.topology import Sizes
from vime.weights.torch_dist.read import TorchDist, to_hf
from vime.weights.torch_dist.write import write as to_torch_dist

CASES = ("deepseek_v3", "glm4_moe", "glm_moe_dsa")


@pytest.fixture(scope="module")
def published(checkpoint, tmp_path_factory):
    """``published(case)`` -> a folder as it is published, and the names that are no part of the policy."""
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(3)
            bare, cfg = load(checkpoint(name))
            state = with_spare_indexers(bare, cfg) if name == "glm_moe_dsa" else bare
            if name == "glm_moe_dsa":  # a prediction layer has an indexer of its own; the last layer need not
                assert cfg["indexer_types"][-1] == "shared" and len(state) > len(bare)
            state, cfg = with_mtp(state, cfg)
            made[name] = write(tmp_path_factory.mktemp(name) / "hf", state, cfg), state.keys() - bare.keys()
        return made[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_published_checkpoint_is_lost(name, published, tmp_path):
    folder, extra = published(name)
    with RoundTrip(folder, Sizes(tp=2, pp=2, ep=2)) as trip:
        verdict = trip.run(out=tmp_path / "out")
        assert verdict.status is Status.PASS, verdict.summary()
        tensors = verdict.coverage["tensors"]
        assert tensors.compared == tensors.expected == len(HfCheckpoint(folder)) and str(len(extra)) in verdict.info["left_out"]
        for text in ("converted:stale", "received:transpose"):
            verdict = trip.run(text)
            assert verdict.status is Status.FAIL and str(verdict.first_bad) == verdict.info["planted"]["text"]
        assert verdict.first_bad.tensor not in extra  # what an engine is sent
    assert diff(folder, tmp_path / "out").green
    source = HfCheckpoint(folder)
    plan = family_for(source.config).plan(source.config, source.files)
    to_hf(TorchDist(to_torch_dist(source, plan, tmp_path / "td")), folder, tmp_path / "back")
    assert diff(folder, tmp_path / "back").green


@pytest.mark.parametrize("name", CASES)
def test_left_out_is_what_the_policy_does_not_have(name, published):
    folder, extra = published(name)
    source = HfCheckpoint(folder)
    left = left_out(source.config, source)
    assert left.keys() == extra and f"{len(extra)} tensors" in describe(left)
    kept = source.keys() - left.keys()
    family_for(source.config).plan(source.config, hf_names=kept)  # complete without them
    assert left_out(source.config, kept) == {} and describe({}) == ""


def test_half_an_indexer_that_nobody_uses_is_still_a_loss(published):
    source = HfCheckpoint(published("glm_moe_dsa")[0])
    names = source.keys() - {"model.layers.1.self_attn.indexer.k_norm.bias"}
    assert source.config["indexer_types"][1] == "shared"
    with pytest.raises(WeightError, match=r"1 missing: model\.layers\.1\.self_attn\.indexer\.k_norm\.bias"):
        family_for(source.config).plan(source.config, hf_names=names)


def test_prediction_layers_that_the_config_does_not_count_are_refused(published):
    source = HfCheckpoint(published("deepseek_v3")[0])
    for count in (0, None):
        with pytest.raises(ConfigMismatch, match=r"model\.layers\.4\..*num_nextn_predict_layers 0, so no layer 4"):
            left_out({**source.config, "num_nextn_predict_layers": count}, source)


def test_a_conversion_does_not_ask_for_that_count(published, tmp_path):
    state, cfg = load(published("deepseek_v3")[0])
    verdict = roundtrip(write(tmp_path / "hf", state, {**cfg, "num_nextn_predict_layers": 0}))
    assert verdict.green and verdict.coverage["tensors"].compared == len(state) and "left_out" not in verdict.info


@pytest.mark.parametrize("value", ["4", None, True, 4.0])
def test_a_number_that_is_none_is_named(value, published):
    cfg = {**HfCheckpoint(published("deepseek_v3")[0]).config, "num_hidden_layers": value}
    with pytest.raises(ConfigMismatch, match=rf"num_hidden_layers is {value!r}; expected a number of 0 or more, without a fraction"):
        family_for(cfg).plan(cfg)


def test_an_engine_loads_the_policy_and_answers_as_without_the_rest(tmp_path):
    """Refused updates, unfilled parameters and other answers would each show: every stage in the engine is compared."""
    pytest.importorskip("vllm")
    from gates.synthetic import config_of
    from gates.synthetic import write as write_synthetic

    state, cfg = load(write_synthetic(config_of("glm5.2-6layer-tiny"), tmp_path / "bare"))
    torch.manual_seed(4)
    bare = len(state)
    state, cfg = with_mtp(with_spare_indexers(state, cfg), cfg)
    state = {n: t if n.endswith("e_score_correction_bias") else t.bfloat16() for n, t in state.items()}
    with RoundTrip(write(tmp_path / "hf", state, cfg), Sizes()) as trip:
        verdict = trip.run(serve=True)
    assert verdict.status is Status.PASS, verdict.summary()
    assert verdict.coverage["tensors"].compared == len(state) > bare
    assert verdict.stats["stages"]["received"] == verdict.stats["stages"]["loaded"] == {"equal": bare, "wrong": 0}


@pytest.mark.parametrize(("fields", "kinds"), [
    ({"index_topk_pattern": "FSFS"}, "FSFS"), ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFS"),
    ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"), ({"index_topk_freq": None}, "FFFF"),
    ({"indexer_types": ["full", "full", "shared", "shared"], "index_topk_pattern": "FSFS"}, "FFSS")])
def test_schedules_are_read_as_transformers_reads_them(fields, kinds, checkpoint):
    import transformers

    from vime.latent import indexer_types

    raw = json.loads((checkpoint("glm_moe_dsa") / "config.json").read_text())
    for key in ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"):
        raw.pop(key, None)
    words = ["full" if k == "F" else "shared" for k in kinds]
    assert indexer_types({**raw, **fields}) == words
    given = {k: v for k, v in fields.items() if v is not None}
    assert transformers.GlmMoeDsaConfig(**{**raw, **given}).indexer_types == words


@pytest.mark.parametrize(("fields", "says"), [
    *(({"num_nextn_predict_layers": bad}, "num_nextn_predict_layers is") for bad in ("x", 1.5, [1], -3)),
    *(({"indexer_types": bad}, "indexer_types is") for bad in (5, "full", [], ["full", ["full"], "full", "full"], [["full"]] * 4)),
    *(({"indexer_types": None, "index_topk_pattern": bad}, "index_topk_pattern is") for bad in (7, "FXFF", [1, 2, 3, 4], True)),
    *(({"indexer_types": None, field: bad}, f"{field} is") for field in ("index_topk_freq", "index_skip_topk_offset") for bad in ("x", 1.5, [1]))])
def test_a_field_of_another_form_is_named(fields, says, checkpoint):
    raw = json.loads((checkpoint("glm_moe_dsa") / "config.json").read_text())
    with pytest.raises((ConfigMismatch, UnsupportedLatent), match=says):
        left_out({**raw, **fields}, ["model.layers.1.self_attn.indexer.wk.weight"])
