"""Layer records: every computed row once, under its request, position and token, and the values that transformers has."""
from __future__ import annotations

import pytest
import torch

from tests.vllm.models import LAYERS, prompts
from vime.vllm.protocol import EngineError, Request, Sample
from vime.vllm.records import EngineRecords


def record(engine, requests: list[Request], **options: object) -> tuple[EngineRecords, list[Sample]]:
    engine.client.record(**options)
    samples = engine.client.generate(requests)
    records = engine.client.fetch_records()
    engine.client.record(enabled=False)
    return records, samples


def requests() -> list[Request]:
    return [Request(request_id=f"q{i}", prompt_token_ids=p, max_tokens=4, seed=i) for i, p in enumerate(prompts(4, seed=11))]


def by_key(records: EngineRecords, name: str) -> dict:
    rows = records.logit_rows if name == "logits" else records.rows
    return dict(zip(rows, records.tensors[name], strict=True))


def test_rows_are_complete_and_equal_in_any_batch(llama_engine) -> None:
    client = llama_engine.client
    client.reset_prefix_cache()
    client.set_chunk(37)
    together, samples = record(llama_engine, requests(), logits=True)
    client.set_chunk(None)
    keys = [(s.request_id, position, token) for s in samples
            for position, token in enumerate([*s.prompt_token_ids, *s.token_ids[:-1]]) if position >= s.num_cached_tokens]
    assert sorted(together.rows) == sorted(keys)
    names = {"embedding", "final_norm", "logits", *(f"layers.{i}" for i in range(LAYERS))}
    assert set(together.tensors) == names
    for request in requests():
        client.reset_prefix_cache()
        single, _ = record(llama_engine, [request], logits=True)
        for name in names:
            mine, theirs = by_key(single, name), by_key(together, name)
            shared = mine.keys() & theirs.keys()
            assert shared, name
            bad = [key for key in sorted(shared) if not torch.equal(mine[key].view(torch.int32), theirs[key].view(torch.int32))]
            assert not bad, f"{name} differs first at {bad[0]}"


def test_layer_outputs_are_those_of_transformers(llama_engine, llama_dir) -> None:
    import transformers

    llama_engine.client.reset_prefix_cache()
    records, samples = record(llama_engine, requests()[:1])
    model = transformers.AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    ids = [*samples[0].prompt_token_ids, *samples[0].token_ids[:-1]]
    outputs = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda m, a, out, i=index: outputs.update(
            {f"layers.{i}": out[0] if isinstance(out, tuple) else out}))
    model.model.norm.register_forward_hook(lambda m, a, out: outputs.update(final_norm=out))
    with torch.no_grad():
        model(torch.tensor([ids]))
    order = [records.rows.index((samples[0].request_id, p, t)) for p, t in enumerate(ids)]
    for name, expected in outputs.items():
        assert (records.tensors[name][order] - expected.reshape(len(ids), -1)).abs().max() < 1e-4, name


def test_positions_from_the_prefix_cache_have_no_row(llama_engine) -> None:
    llama_engine.client.reset_prefix_cache()
    llama_engine.client.generate(requests())
    records, samples = record(llama_engine, requests())
    for sample in samples:
        assert sample.num_cached_tokens > 0
        have = {position for request, position, _ in records.rows if request == sample.request_id}
        assert set(range(max(have))) - have == set(range(sample.num_cached_tokens))


def test_off_means_nothing_is_kept(llama_engine) -> None:
    llama_engine.client.record(enabled=False)
    llama_engine.client.generate(requests())
    assert llama_engine.client.fetch_records().tensors == {}


def test_an_unknown_layer_is_refused(llama_engine) -> None:
    with pytest.raises(EngineError, match=f"cannot record layer 9; this model has layers 0 to {LAYERS - 1}"):
        llama_engine.client.record(layers=[9])
