"""Generated checkpoints are what the hub's files are: transformers loads them whole, and our families convert them."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from gates import synthetic
from gates.profiles import PROFILES
from gates.synthetic import write
from gates.synthetic_experts import SPARSE
from tests.weights.conversion import differing, to_hf, to_megatron
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.families import family_for

TINY = {**{name: SPARSE[name] for name in SPARSE if name.endswith("-tiny")},
        "deepseek-v3-groups": {**SPARSE["deepseek-v3-tiny"], "n_group": 4, "topk_group": 2}}


@pytest.fixture(scope="module", params=TINY)
def folder(request, tmp_path_factory):
    return write(TINY[request.param], tmp_path_factory.mktemp("made") / request.param)


def test_transformers_loads_it_and_tells_tokens_apart(folder):
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(model).__name__ == HfCheckpoint(folder).config["architectures"][0]
    with torch.no_grad():
        probabilities = model(torch.arange(3, 60)[None]).logits[0].softmax(1)
    entropy = -(probabilities * probabilities.clamp(min=1e-20).log()).sum(1)
    assert 0.5 < float(entropy.mean()) < 5.7, "neither a point nor flat (ln 512 is 6.2)"


def test_families_convert_it_both_ways(folder):
    source = HfCheckpoint(folder)
    source.check(family_for(source.config).plan(source.config, source.files))
    state = dict(source)
    assert differing(state, to_hf(*to_megatron(state, source.config))) == []
    assert {t.dtype for n, t in state.items() if n.endswith("e_score_correction_bias")} <= {torch.float32}


def test_the_full_shape_is_the_one_of_the_gate():
    c = SPARSE["glm5.2-6layer"]
    assert PROFILES["glm5.2-6layer"].devices == ("cuda",)
    assert (c["hidden_size"], c["kv_lora_rank"] + c["qk_rope_head_dim"], c["n_routed_experts"], c["index_topk"]) == (6144, 576, 256, 2048)
    assert ["full" if max(i - 3, 0) % 4 == 0 else "shared" for i in range(6)] == c["indexer_types"]
    assert all(SPARSE[name].get("n_routed_experts", 16) % 8 == 0 for name in SPARSE)


@pytest.mark.parametrize("tied", [False, True])
def test_the_third_party_takes_weights_that_are_in_no_file(tied, tmp_path, monkeypatch):
    from gates.reference import load

    monkeypatch.setitem(synthetic.DENSE, "small", ("qwen2" if tied else "llama", 2, 64, 96, 4, 2, 16, 320, tied))
    folder = synthetic.ensure("small", tmp_path, counted=True)
    assert not list(folder.glob("*.safetensors"))
    held, made = load(folder).state_dict(), HfCheckpoint(folder)
    assert len(made) > 20 and all(torch.equal(held[name], made[name].float()) for name in made)
    assert set(held) - set(made) == ({"lm_head.weight"} if tied else set())


def test_processes_that_start_together_make_it_once(tmp_path):
    code = f"from pathlib import Path; from gates.synthetic import ensure; ensure('dense-tiny', Path({str(tmp_path)!r}))"
    started = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [(p.communicate(timeout=120)[1], p.returncode) for p in started] == [("", 0)] * 4
    assert json.loads((tmp_path / "dense-tiny" / "config.json").read_text())["model_type"] == "qwen2"
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir() and p.name != ".dense-tiny.config") == ["dense-tiny"]
