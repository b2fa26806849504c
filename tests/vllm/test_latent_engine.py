"""Engines with latent attention, sparse attention and experts: rows do not see the batch, chunks or the cache; their bits are
those of a plain pass over the files; unpatched transformers agrees; weights are updated and read back; stock parts are named."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gates.synthetic import write
from gates.synthetic_experts import SPARSE
from tests.vllm import plain as plain_module
from tests.vllm.plain import Plain
from vime import ops
from vime.vllm import plugin
from vime.vllm.client import EngineClient
from vime.vllm.launch import EngineProcess, launch_engine
from vime.vllm.protocol import EnginePoisoned, EngineStartError, Request, Sample, UpdateFailed
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.transports import Endpoint, open_sender

GROUPS = {**SPARSE["deepseek-v3-tiny"], "n_group": 4, "topk_group": 2}
CONFIGS: dict[str, dict[str, Any]] = {**{n: SPARSE[n] for n in SPARSE if n.endswith("-tiny")}, "deepseek-v3-groups": GROUPS}
#: case -> (config, dtype, FP8 cache)
CASES = {"glm": ("glm5.2-6layer-tiny", "bfloat16", False), "glm-fp32": ("glm5.2-6layer-tiny", "float32", False),
         "glm-fp8": ("glm5.2-6layer-tiny", "bfloat16", True), "deepseek": ("deepseek-v3-groups", "float32", False),
         "qwen3-moe": ("qwen3-moe-tiny", "float32", False)}
LENGTHS, RESPONSE, SHARED = (41, 66, 80, 53), 8, 38


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write(CONFIGS[name], tmp_path_factory.mktemp("made") / name)
        return made[name]

    return get


def launch(folder: Path, log: Path, dtype: str, **options: Any) -> EngineProcess:
    return launch_engine(folder, dtype=dtype, log_path=log / "engine.log", kv_cache_bytes=32 << 20, max_model_len=192,
                         max_num_batched_tokens=128, env={"OMP_NUM_THREADS": "1"}, **options)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(name, engine, plain model, folder); the engine serves every test of its case."""
    name, dtype, fp8 = CASES[request.param]
    options = {"kv_cache_dtype": "fp8_e4m3"} if fp8 else {}
    with launch(folders(name), tmp_path_factory.mktemp("log"), dtype, **options) as engine:
        yield request.param, engine, Plain(folders(name), getattr(torch, dtype), fp8), folders(name)


def requests(**fields: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    head = torch.randint(512, (SHARED,), generator=generator).tolist()
    return [Request(**{"request_id": f"r{i}", "prompt_token_ids": head + torch.randint(512, (n - SHARED,), generator=generator).tolist(),
                       "max_tokens": RESPONSE, "seed": 40 + i, **fields}) for i, n in enumerate(LENGTHS)]


def same(found: list[Sample], wanted: list[Sample]) -> None:
    by_name = {s.request_id: s for s in wanted}
    for s in found:
        w = by_name[s.request_id]
        assert s.token_ids == w.token_ids and s.logprobs == w.logprobs, s.request_id


def alone(client: EngineClient) -> list[Sample]:
    client.set_chunk(None)
    out = []
    for request in requests():
        client.reset_prefix_cache()
        out += client.generate([request])
    return out


def test_bits_are_those_of_a_plain_pass(case) -> None:
    name, engine, plain, _ = case
    before = engine.client.stats()
    samples = alone(engine.client)
    for s in samples:
        assert s.logprobs == plain.logprobs(s.prompt_token_ids, s.token_ids), s.request_id
    after = engine.client.stats()
    seen, dropped = (after[k] - before[k] for k in ("keys_seen", "keys_dropped"))
    print(f"{name}: {dropped} of {seen} keys dropped by the indexer")
    assert (dropped > 0) == name.startswith("glm")
    assert len({t for s in samples for t in s.token_ids}) > RESPONSE  # the model tells tokens apart


def test_no_batch_chunk_order_or_cache_shows(case) -> None:
    _, engine, _, _ = case
    client, wanted = engine.client, alone(engine.client)
    try:
        for chunk in (None, 1, 7, 64):
            client.set_chunk(chunk)
            for order in (requests(), requests()[::-1]) if chunk != 1 else (requests(),):
                client.reset_prefix_cache()
                same(client.generate(order), wanted)
                warm = client.generate(order)
                same(warm, wanted)
                assert all(s.num_cached_tokens > 0 for s in warm)
    finally:
        client.set_chunk(None)


def test_choices_are_recorded_and_those_of_the_plain_pass(case) -> None:
    name, engine, plain, _ = case
    client, request = engine.client, requests()[2]
    client.reset_prefix_cache()
    client.record(True, layers=None, embedding=False, final_norm=False, routing=True)
    try:
        (sample,) = client.generate([request])
        records = client.fetch_records()
    finally:
        client.record(False)
    plain.logits([*sample.prompt_token_ids, *sample.token_ids][:-1])
    order = torch.tensor([position for _, position, _ in records.rows])
    assert sorted(order.tolist()) == list(range(len(order)))
    for i, ids in plain.routing.items():
        assert torch.equal(records.tensors[f"layers.{i}.routing"], ids[order])
    for i, chosen in plain.index.items():
        assert torch.equal(records.tensors[f"layers.{i}.index"], chosen[order])
    assert len(plain.index) == (6 if name.startswith("glm") else 0)


def _other_layout(function: Any) -> Any:
    return lambda *args: function(*args[:-1], not args[-1])


def _scales_swapped(row: torch.Tensor, rank: int) -> torch.Tensor:
    q, scale = ops.quantise_blocks(row[:, :rank])
    return torch.cat([ops.dequantise_blocks(q, scale.roll(1, dims=1), row.dtype), row[:, rank:]], dim=1)


def _by_expert(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = ops.route(*args, **kwargs)
    order = ids.argsort(dim=1)
    return ids.gather(1, order), weights.gather(1, order)


def _falling(*args: Any) -> torch.Tensor:
    chosen = ops.select(*args)
    count = (chosen >= 0).sum(1, keepdim=True)
    place = torch.arange(chosen.shape[1])
    return torch.where(place < count, chosen.gather(1, (count - 1 - place).clamp(min=0)), -1)


#: fault -> (case, replaced functions of ``ops``)
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "router in bf16": ("glm", {"router_scores": lambda *a: ops.router_scores(*a).bfloat16().float()}),
    "slots in expert order": ("glm-fp32", {"route": _by_expert}),  # in bf16 the one rounding hides it here
    "indices unsorted": ("glm", {"select": _falling}),
    "epsilon of RMSNorm": ("glm", {"rms_norm": lambda x, w, eps: ops.rms_norm(x, w, eps * 100)}),
    "rotary layout of the indexer": ("glm", {n: _other_layout(getattr(ops, n)) for n in ("index_row", "index_query")}),
    "KV scale off by one block": ("glm-fp8", {"through_fp8_cache": _scales_swapped}),
    "no FP8 cache": ("glm-fp8", {"through_fp8_cache": lambda row, rank: row}),
}


@pytest.mark.parametrize(("case", "fault"), [(where, name) for name, (where, _) in FAULTS.items()], indirect=["case"])
def test_a_planted_fault_is_seen(case, fault, monkeypatch) -> None:
    _, engine, plain, _ = case
    samples = engine.client.generate(requests()[:2])
    assert all(s.logprobs == plain.logprobs(s.prompt_token_ids, s.token_ids) for s in samples)
    changed = FAULTS[fault][1]
    with monkeypatch.context() as patch:
        patch.setattr(plain_module, "ops", SimpleNamespace(**{**vars(ops), **changed}))
        wrong = [plain.logprobs(s.prompt_token_ids, s.token_ids) for s in samples]
    differing = sum(a != b for s, w in zip(samples, wrong, strict=True) for a, b in zip(s.logprobs, w, strict=True))
    print(f"{fault}: {differing} of {2 * RESPONSE} log-probs differ")
    assert differing > 0


@pytest.mark.parametrize("name", ["glm5.2-6layer-tiny", "deepseek-v3-groups", "qwen3-moe-tiny"])
def test_unpatched_transformers_agrees(name, folders) -> None:
    """In fp32, on the plain pass, whose bits the engines have: tokens, log-probs, and the sets that the indexer chose."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32).eval()
    chosen: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        if type(module).__name__ == "GlmMoeDsaIndexer":
            module.register_forward_hook(lambda m, args, out, n=module_name: chosen.__setitem__(n, out[0]))
    plain = Plain(folders(name), torch.float32)
    worst, sets = 0.0, 0
    for request in requests():
        ids = request.prompt_token_ids
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0]
        ours = plain.logits(ids)
        assert torch.equal(theirs.argmax(1), ours.argmax(1))
        worst = max(worst, float((theirs.log_softmax(1) - ours.log_softmax(1)).abs().max()))
        for module_name, index in chosen.items():
            mine = plain.index[int(module_name.split(".")[2])]
            for t in range(len(ids)):
                assert {p for p in index[t].tolist() if p <= t} == {p for p in mine[t].tolist() if p >= 0}, (module_name, t)
                sets += 1
    print(f"{name}: log-probs within {worst:.1e} of transformers; {sets} index sets equal")
    assert worst < 1e-5 and (sets > 0) == name.startswith("glm")


@pytest.mark.parametrize("case", [name for name, (_, dtype, _) in CASES.items() if dtype == "float32"], indirect=True)
def test_greedy_tokens_are_those_of_transformers(case) -> None:
    import transformers

    _, engine, _, folder = case
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for s in engine.client.generate(requests(temperature=0.0)):
        with torch.no_grad():
            logits = model(torch.tensor([[*s.prompt_token_ids, *s.token_ids]])).logits[0, len(s.prompt_token_ids) - 1:-1]
        assert logits.argmax(1).tolist() == s.token_ids
        theirs = logits.log_softmax(1).gather(1, torch.tensor(s.token_ids)[:, None])[:, 0]
        assert float((theirs - torch.tensor(s.logprobs)).abs().max()) < 1e-5


def endpoint(engine: EngineProcess) -> Endpoint:
    return Endpoint(url=engine.url, token=engine.token, timeout_s=60)


def test_an_update_is_read_back_used_and_undone(case) -> None:
    name, engine, _, folder = case
    dtype = getattr(torch, CASES[name][1])
    original = {n: t if n.endswith("e_score_correction_bias") else t.to(dtype) for n, t in HfCheckpoint(folder).items()}
    before = alone(engine.client)
    held = engine.client.weights_digest()
    assert {t["name"] for t in held["tensors"]} == set(original)
    with open_sender(endpoint(engine)) as sender:
        for changed in [n for n in original if ".layers.3." in n and not any(f"experts.{e}." in n for e in range(1, 16))]:
            if not changed.endswith(("gate.weight", "kv_b_proj.weight", "experts.0.down_proj.weight", "wk.weight", "bias", "q_norm.weight")):
                continue
            report = sender.send({**original, changed: original[changed].flip(0)}.items(), 1)  # a factor may be lost in a norm
            assert report["elements_compared"] == report["elements"]
            assert engine.client.weights_digest()["digest"] == report["digest"]
            assert [s.logprobs for s in alone(engine.client)] != [s.logprobs for s in before], changed
        report = sender.send(original.items(), 2)
        assert engine.client.weights_digest()["digest"] == report["digest"]
        same(alone(engine.client), before)


def test_a_bad_update_poisons_and_a_good_one_heals(case) -> None:
    name, engine, _, folder = case
    dtype = getattr(torch, CASES[name][1])
    original = {n: t if n.endswith("e_score_correction_bias") else t.to(dtype) for n, t in HfCheckpoint(folder).items()}
    lost = "model.layers.3.mlp.experts.7.up_proj.weight"
    with open_sender(endpoint(engine)) as sender:
        with pytest.raises(UpdateFailed, match=rf"{lost}: missing"):
            sender.send({n: t for n, t in original.items() if n != lost}.items(), 1)
        with pytest.raises(EnginePoisoned, match="missing"):
            engine.client.generate(requests())
        sender.send(original.items(), 2)
    assert engine.client.generate(requests()[:1])


def test_stock_parts_are_named(folders) -> None:
    """Of an aligned engine nothing is; of each planted fault its place; of stock experts each layer, and no read-back."""
    env = {k: v for k, v in os.environ.items() if k != plugin.ENV} | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    script = Path(__file__).with_name("stock_parts.py")
    done = subprocess.run([sys.executable, str(script), str(folders("glm5.2-6layer-tiny")), str(folders("qwen3-moe-tiny"))], env=env,
                          capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    glm, qwen = found["planted"], found["stock experts"]
    assert "error" not in glm, glm
    assert glm["aligned"].startswith("fine") and (glm["places"]["moe"], glm["places"]["attention"]) == (3, 6)
    assert "moe: model.layers.3.mlp.experts: Stock.forward is not vime's" in glm["another runner"]
    assert "model.layers.3.mlp.experts: the expert bias is torch.bfloat16" in glm["bias"]
    assert "norm: model.layers.3.self_attn.indexer.k_norm: stock LayerNorm" in glm["index norm"]
    assert "attention: model.layers.3.self_attn.mla_attn: stock MultiHeadLatentAttentionWrapper" in glm["attention"]
    assert "error" not in qwen, qwen
    assert "4 place(s)" in qwen["moe"] and "model.layers.0.mlp.experts: MoERunner.forward is not vime's" in qwen["moe"]
    assert "moe" not in qwen["places"] and qwen["contract"]["ops"]["moe"] == "stock" and "packed" in qwen["digest"]


@pytest.mark.parametrize(("options", "changes", "message"), [
    ({"ops": ["linear", "attention"]}, {}, "latent attention of glm_moe_dsa is aligned as a whole: attention is on, norm, rope off"),
    ({"ops": ["linear", "moe"]}, {}, "an expert layer of glm_moe_dsa is aligned as a whole: moe is on, activation off"),
    ({"ops": ["linear", "moe", "activation"], "kv_cache_dtype": "fp8_e4m3"}, {}, "kv_cache_dtype is 'fp8_e4m3'.*Use auto"),
    ({"kv_cache_dtype": "int4"}, {}, "kv_cache_dtype is 'int4'; expected auto or fp8_e4m3"),
    ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters of type 'yarn'"),
    ({}, {"index_topk_freq": 1}, r"layers\.4\.self_attn\.attn: the config says its indices are shared.*vLLM computes them; write index_topk"),
    ({"ops": []}, {}, "Sparse Attention is not supported on CPU"),  # stock vLLM's own refusal, lifted only where vime is asked for
    ({}, {"topk_method": None}, r"layers\.3\.mlp\.experts: expert bias: True in config.json, False in vLLM.*topk_method"),
])
def test_what_cannot_be_aligned_is_refused_by_name(options, changes, message, tmp_path) -> None:
    folder = write(SPARSE["glm5.2-6layer-tiny"], tmp_path / "model")
    config = {n: v for n, v in {**SPARSE["glm5.2-6layer-tiny"], **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineStartError, match=message):
        launch(folder, tmp_path, "float32", **options)
