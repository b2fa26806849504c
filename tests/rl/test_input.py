"""A checkpoint folder that cannot be used is refused before anything is started on it, with the file and what is wrong in it."""
from __future__ import annotations

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from gates.synthetic import write
from gates.synthetic_experts import SPARSE
from tests.rl.tiny import write_checkpoint
from vime.commands import demo, train
from vime.commands.output import OutputUnusable
from vime.errors import exit_code_of
from vime.megatron.experts import ExpertsDoNotDivide
from vime.megatron.model import UnsupportedModel, WeightsDoNotFit
from vime.rl.config import ConfigError, TrainConfig, read_hf_config
from vime.rl.data import DataError, Problem
from vime.rl.progress import Silent
from vime.rl.rollout import require_room
from vime.rl.session import Session
from vime.rl.text import Text, TokenizerError


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "c")


def refused(folder, *words):
    with pytest.raises(Exception) as caught:
        read_hf_config(folder)
    assert exit_code_of(caught.value) == 2
    for word in words:
        assert word in str(caught.value), str(caught.value)


def change(folder, **fields):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def shards(folder, second=None):
    """Split the weights in two files; ``second`` takes tensors out of the second one after the index was written."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(state) // 2
    items = list(state.items())
    parts = {"model-00001-of-00002.safetensors": dict(items[:half]), "model-00002-of-00002.safetensors": dict(items[half:])}
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        save_file({n: t for n, t in part.items() if not (file.startswith("model-00002") and n == second)}, folder / file)
    return list(parts["model-00002-of-00002.safetensors"])


def test_one_that_is_whole_is_taken(folder):
    assert read_hf_config(folder)["num_hidden_layers"] == 2
    shards(folder)
    assert read_hf_config(folder)["num_hidden_layers"] == 2


def test_a_shard_that_is_missing(folder):
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors is missing", "Download that file again")


def test_a_shard_that_lost_a_tensor(folder):
    name = "model.norm.weight"
    assert name in shards(folder, second=name)
    refused(folder, f"says {name} is in model-00002-of-00002.safetensors, but that file does not hold it")


def test_a_tensor_that_no_file_holds(folder):
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    refused(folder, "1 missing: model.layers.1.mlp.up_proj.weight", "belongs to another checkpoint, or files are missing")


@pytest.mark.parametrize(("fields", "words"), [
    ({"hidden_size": 128}, ("model.embed_tokens.weight in", "model.safetensors has shape [272, 64]", "says [272, 128]")),
    ({"vocab_size": 300}, ("has shape [272, 64]", "says [300, 64]")),
    ({"num_attention_heads": 8}, ("self_attn", "config.json of this llama model says")),
    ({"num_hidden_layers": 3}, ("9 missing: model.layers.2.input_layernorm.weight",)),
    ({"num_hidden_layers": 1}, ("9 unknown: model.layers.1.input_layernorm.weight (in model.safetensors)",)),
    ({"tie_word_embeddings": False}, ("1 missing: lm_head.weight",)),
    ({"model_type": "mistral"}, ("c/config.json: model_type is 'mistral'", "llama, qwen2, qwen3")),
    ({"architectures": None}, ("c/config.json: architectures is missing", "LlamaForCausalLM")),
    ({"architectures": ["Qwen2ForCausalLM"]}, ("architectures is ['Qwen2ForCausalLM']", "a llama model has LlamaForCausalLM")),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("c/config.json: rope_scaling of type 'yarn'", "llama3")),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("c/config.json: rope_scaling has no field 'low_freq_factor'",)),
    ({"hidden_size": "64"}, ("hidden_size is '64'", "an integer")),
], ids=lambda v: "-".join(map(str, v)) if isinstance(v, dict) else "")
def test_a_config_that_contradicts_the_tensors_or_is_not_covered(folder, fields, words):
    change(folder, **fields)
    refused(folder, *words)


def test_weights_that_are_whole_numbers(folder):
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**state, name: state[name].to(torch.int32)}, folder / "model.safetensors")
    refused(folder, f"{name} in ", "is torch.int32", "floating point")


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_text(p.read_text()[:500])], ids=["missing", "cut"])
def test_a_tokenizer_is_looked_at_before_anything_is_started(folder, tmp_path, damage, monkeypatch):
    damage(folder / "tokenizer.json")
    monkeypatch.setattr(train, "Session", lambda *_: pytest.fail("trainer and engine were started"))
    out = tmp_path / "out"
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        train.run(TrainConfig(str(folder), output_dir=str(out)))
    assert not out.exists()
    with pytest.raises(TokenizerError):
        train.train(TrainConfig(str(folder)), Silent())


@pytest.mark.parametrize(("content", "words"), [("{", "is not readable JSON"), ("[]", "holds a list; expected an object"), ("\udcff", "not readable")])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_settings_of_a_tokenizer_that_cannot_be_read_are_named(folder, name, content, words):
    (folder / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(TokenizerError, match=rf"{name} {words}|{name} is {words}"):
        Text(folder)


LLAMA_2 = "{{ bos_token + '[INST] ' + messages[0]['content'] + ' [/INST]' }}"


def with_template(folder, template, **settings):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings}))
    return Text(folder)


def test_a_special_token_is_taken_from_an_object_as_from_a_string(folder):
    text = with_template(folder, LLAMA_2, bos_token="<s>", pad_token=None)
    plain = text.encode_question("1 + 1?")
    assert text.decode(plain).startswith("<s>[INST] 1 + 1?")
    added = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    assert with_template(folder, LLAMA_2, bos_token=added).encode_question("1 + 1?") == plain


@pytest.mark.parametrize(("template", "words"), [
    (LLAMA_2, "'bos_token' is undefined"), ("{% if %}", "Expected an expression"), ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
    ("{% generation %}{% endgeneration %}", "unknown tag 'generation'"), ("{{ messages + 1 }}", "can only concatenate list"),
])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_template_that_cannot_be_used_is_named_before_anything_is_started(folder, tmp_path, name, template, words, monkeypatch):
    with_template(folder, template if name == "tokenizer_config.json" else "")
    if name == "chat_template.jinja":
        (folder / name).write_text(template)
    monkeypatch.setattr(train, "Session", lambda *_: pytest.fail("trainer and engine were started"))
    with pytest.raises(TokenizerError, match=rf"the chat template in .*{name} cannot be used: .*{words}.*; expected one that needs"):
        train.train(TrainConfig(str(folder)), Silent())


def test_of_several_templates_the_default_is_taken(folder):
    named = [{"name": "tool_use", "template": "{{ 1 / 0 }}"}, {"name": "default", "template": LLAMA_2}]
    expected = with_template(folder, LLAMA_2, bos_token="<s>").encode_question("1 + 1?")
    assert with_template(folder, named, bos_token="<s>").encode_question("1 + 1?") == expected
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")  # which goes first, whatever is in the settings
    assert Text(folder).encode_question("1 + 1?") == with_template(folder, [], bos_token="<s>").encode_question("1 + 1?") != expected


@pytest.mark.parametrize(("template", "words"), [
    ([{"name": "tool_use", "template": "x"}], "a list of templates without one named 'default' (its names: 'tool_use')"), ([], "its names: none"),
    (["x"], "an entry 'x'"), ([{"name": "default", "template": None}], "an entry {'name': 'default', 'template': None}"),
    ({"default": "x"}, "a dict"), (7, "an int")])
def test_templates_of_which_none_can_be_chosen_are_named(folder, template, words):
    with pytest.raises(TokenizerError, match=rf"chat_template in .*tokenizer_config.json is .*{re.escape(words)}.*; expected text"):
        with_template(folder, template)


def test_a_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read: .*copy it again"):
        Text(folder)


@pytest.mark.parametrize("flag", ["output_dir", "save"])
def test_a_place_that_cannot_be_written_is_named_before_anything_is_started(folder, tmp_path, flag, monkeypatch):
    monkeypatch.setattr(train, "Session", lambda *_: pytest.fail("trainer and engine were started"))
    (tmp_path / "taken").write_text("mine")
    for place in (tmp_path / "taken", tmp_path / "taken" / "below" / "it"):
        with pytest.raises(OutputUnusable, match=rf"--{flag.replace('_', '-')} {place} cannot be written: {tmp_path / 'taken'} is there and no folder"):
            train.run(TrainConfig(str(folder), **{flag: str(place)}))
    monkeypatch.setattr("os.access", lambda *_: False)  # a superuser may write everywhere
    with pytest.raises(OutputUnusable, match=rf"this user may not write to {tmp_path}; give another place"):
        train.run(TrainConfig(str(folder), **{flag: str(tmp_path / "new" / "one")}))
    assert (tmp_path / "taken").read_text() == "mine" and not (tmp_path / "new").exists()


def test_a_report_that_would_be_a_folder_is_named_before_anything_is_started(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trainer and engine were started"))
    with pytest.raises(OutputUnusable, match=rf"--report {tmp_path} is a folder; expected the name of a file") as caught:
        demo.run(folder, ["float32"], 1, tmp_path, True)
    assert exit_code_of(caught.value) == 2
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(OutputUnusable, match="taken is there and no folder"):
        demo.run(folder, ["float32"], 1, tmp_path / "taken" / "report.json", True)


@pytest.mark.parametrize(("changes", "limit"), [
    ({"max_tokens_per_gpu": 300}, r"--max-tokens-per-gpu allows \(300\)"), ({"max_model_len": 300}, r"--max-model-len allows \(300\)"),
    ({}, r"the model's max_position_embeddings allows \(512\)"),
])
def test_a_prompt_that_leaves_no_room_is_named_before_anything_is_started(folder, changes, limit):
    text, short, long = Text(folder), Problem("d.jsonl-1", "1 + 1?", "#### 2"), Problem("d.jsonl-2", "x" * 600, "#### 2")
    config = TrainConfig(str(folder), rollout_batch_size=1, num_rollout=1, **changes)
    with pytest.raises(DataError, match=rf"d.jsonl-2: its prompt has \d+ tokens.* 32 is more than {limit}"):
        require_room(config, text, [short, long], 512)
    require_room(config.replace(check_last_update=False), text, [short, long], 512)  # the second line is not read
    exact = Problem("p", "é" * 100, "#### 2")  # more bytes than a prefilter lets through
    tokens = len(text.encode_question(exact.question)) + 32
    require_room(config.replace(max_tokens_per_gpu=tokens), text, [exact], None)
    with pytest.raises(DataError, match=rf"allows \({tokens - 1}\)"):
        require_room(config.replace(max_tokens_per_gpu=tokens - 1), text, [exact], None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named_whichever_side_met_it_first(folder, tmp_path, value):
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state[name].view(-1)[7] = value
    save_file(state, folder / "model.safetensors")
    config = TrainConfig(str(folder), dtype="float32", kv_cache_gib=0.125, max_model_len=256)
    with pytest.raises(WeightsDoNotFit, match=rf"{name} in .*model.safetensors: 1 of \d+ values are NaN or infinite"):
        Session(config, tmp_path / "logs").__enter__()


@pytest.mark.parametrize(("fields", "words"), [
    ({"transformer_impl": "transformer_engine", "device": "cuda"}, "transformer_impl is 'transformer_engine' for a deepseek_v3 model; latent attention"),
    ({"kv_cache_dtype": "fp8_e4m3"}, None), ({"actor_num_gpus": 3, "expert_model_parallel_size": 3}, "can't be spread evenly over 3 ranks")])
def test_settings_that_the_model_cannot_have_are_refused_before_anything_is_started(tmp_path, fields, words, monkeypatch):
    folder = write(SPARSE["deepseek-v3-tiny"], tmp_path / "latent")
    monkeypatch.setattr("vime.rl.session.TrainerPool", lambda *_: pytest.fail("a rank was started"))
    monkeypatch.setattr("vime.rl.session.require_memory", lambda *_: None)
    monkeypatch.setattr("vime.rl.session.prepare_kernels", lambda *_: None)
    with pytest.raises((UnsupportedModel, ExpertsDoNotDivide) if words else pytest.fail.Exception, match=words or "a rank was started"):
        Session(TrainConfig(str(folder), **fields), tmp_path / "logs").__enter__()


def test_the_cache_of_latent_attention_is_refused_for_another_model_before_anything_is_started(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vime.rl.session.TrainerPool", lambda *_: pytest.fail("a rank was started"))
    monkeypatch.setattr(train, "Session", lambda *_: pytest.fail("trainer and engine were started"))
    config = TrainConfig(str(folder), kv_cache_dtype="fp8_e4m3")
    for start in (lambda: Session(config, tmp_path / "logs").__enter__(), lambda: train.train(config, Silent())):
        with pytest.raises(UnsupportedModel, match="the FP8 cache is that of latent attention"):
            start()


@pytest.mark.parametrize(("field", "value", "expected"), [
    *((f, v, "0 or more, and finite") for f in ("lr", "weight_decay", "clip_grad", "eps_clip", "eps_clip_high", "kv_cache_gib")
      for v in (math.nan, math.inf, -1.0)),
    *(("timeout_s", v, "seconds above 0") for v in (math.nan, math.inf, 0.0, -1.0)), ("seed", -1, "from 0 to 2"), ("seed", 2**32, "from 0 to 2"),
    ("rollout_temperature", math.inf, "and finite"), ("rollout_temperature", math.nan, "more than 0"), ("max_model_len", 0, "at least 1"),
    ("max_num_batched_tokens", -5, "at least 1"), ("engine_url", "localhost:8000", "http://host:port")])
def test_numbers_that_are_none_are_refused_by_name(field, value, expected):
    with pytest.raises(ConfigError, match=rf"--{field.replace('_', '-')} is {re.escape(repr(value))}; expected .*{re.escape(expected)}"):
        TrainConfig("m", **{field: value})


def test_ranks_of_an_engine_elsewhere_are_not_ours_to_start():
    with pytest.raises(ConfigError, match="1 with an --engine-url"):
        TrainConfig("m", engine_url="http://h:1", engine_data_parallel_size=2)


def test_one_sample_of_a_prompt_is_refused_before_anything_is_started(folder, monkeypatch):
    monkeypatch.setattr(train, "Session", lambda *_: pytest.fail("trainer and engine were started"))
    config = TrainConfig(str(folder), n_samples_per_prompt=1)
    with pytest.raises(ConfigError, match="--n-samples-per-prompt is 1; expected at least 2"):
        train.train(config, Silent())
    with pytest.raises(pytest.fail.Exception, match="were started"):
        train.train(config.replace(num_rollout=0), Silent())  # a comparison alone
