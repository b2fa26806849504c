"""Run by test_plugin: one engine per operation, each in a fork of a process that has imported vLLM and computed nothing."""
from __future__ import annotations

import json
import os
import sys
import traceback


def one(op: str, folder: str) -> dict:
    from vime.vllm import plugin

    if op != "stock":
        os.environ[plugin.ENV] = plugin.settings([op])
    from vime.vllm.active import NotAligned, assert_active
    from vime.vllm.config import EngineConfig
    from vime.vllm.engine import Engine
    from vime.vllm.protocol import Request

    engine = Engine(EngineConfig(model=folder, kv_cache_bytes=16 << 20, max_model_len=256, max_num_batched_tokens=24,
                                 max_num_seqs=8))
    # Seeded and prefilled in chunks: what crashes stock sampling on CPU.
    engine.add([Request(request_id=str(i), prompt_token_ids=list(range(30 + i)), max_tokens=3, seed=i) for i in range(3)])
    samples = []
    while engine.busy:
        samples += engine.step()
    assert len(samples) == 3 and all(len(s.token_ids) == 3 for s in samples)
    refused = {}
    for other in plugin.ROUTED:
        try:
            assert_active(engine.model, (other,), engine.runner)
        except NotAligned as error:
            refused[other] = str(error)
    methods = [f"{cls.__name__}.{name}" for cls in _classes(engine) for name in dir(cls)
               if (getattr(getattr(cls, name, None), "__module__", None) or "").startswith("vime.")]
    return {"places": engine.places, "kernels": engine.stats()["kernels"], "contract": engine.contract().to_dict(),
            "refused": refused, "installed": plugin.installed(), "vime_methods": sorted(methods)}


def rope_kinds() -> dict:
    """Largest difference of each covered rotary class from vLLM's own native form, in fp32."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from vime.vllm import layers

    layers.install_rope()
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    kinds = {"default": {}, "linear": {"factor": 4.0}, "llama3": llama3, "partial": {"partial_rotary_factor": 0.5}}
    found = {}
    with set_current_vllm_config(VllmConfig()):
        for name, fields in kinds.items():
            kind = "default" if name == "partial" else name
            rope = get_rope(32, 512, True, {"rope_type": kind, "rope_theta": 10000.0, **fields}, dtype=torch.float32)
            positions = torch.tensor([0, 1, 7, 200, 511])
            query, key = torch.randn(5, 64), torch.randn(5, 32)
            ours = rope(positions, query.clone(), key.clone())
            stock = rope.forward_native(positions, query.clone(), key.clone())
            found[name] = {"class": type(rope).__name__,
                           "difference": max(float((a - b).abs().max()) for a, b in zip(ours, stock, strict=True))}
    return found


def _classes(engine) -> set:
    found = {type(engine.runner), type(engine.runner.sampler)}
    for module in engine.model.modules():
        found |= {type(module), type(getattr(module, "quant_method", None)), type(getattr(module, "impl", None))}
    return found


def main() -> None:
    import vllm
    import vllm.model_executor.models.llama
    import vllm.v1.worker.cpu_worker  # noqa: F401

    from vime.vllm import plugin

    results = {}
    for op in (*(op for op in plugin.ROUTED if op != "moe"), "stock", "rope kinds"):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                result = rope_kinds() if op == "rope kinds" else one(op, sys.argv[1])
            except BaseException:
                result = {"error": traceback.format_exc()[-2000:]}
            with os.fdopen(write, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            results[op] = json.load(pipe)
        os.waitpid(pid, 0)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
