"""Run by test_latent_engine: what ``assert_active`` says of an aligned GLM engine, of faults planted in it, and of stock experts."""
from __future__ import annotations

import json
import os
import sys
from typing import Any


def refusal(engine: Any, ops: tuple[str, ...]) -> str:
    from vime.vllm.active import NotAligned, assert_active

    try:
        return f"fine: {assert_active(engine.model, ops, engine.runner)}"
    except NotAligned as error:
        return str(error)


def engine(folder: str, ops: tuple[str, ...]) -> Any:
    from vime.vllm import plugin
    from vime.vllm.config import EngineConfig
    from vime.vllm.engine import Engine

    os.environ[plugin.ENV] = plugin.settings(ops)
    return Engine(EngineConfig(model=folder, kv_cache_bytes=16 << 20, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=8))


def planted(folder: str) -> dict[str, Any]:
    """Each fault alone; put back after each."""
    import torch

    from vime.vllm import plugin

    e = engine(folder, plugin.ROUTED)
    out: dict[str, Any] = {"aligned": refusal(e, plugin.ROUTED), "places": e.places}
    layer = e.model.model.layers[3]
    runner, bias = layer.mlp.experts, layer.mlp.gate.e_score_correction_bias

    class Stock(type(runner)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    ours, runner.__class__ = runner.__class__, Stock
    out["another runner"] = refusal(e, ("moe",))
    runner.__class__ = ours
    bias.data = bias.data.bfloat16()
    out["bias"] = refusal(e, ("moe",))
    bias.data = bias.data.float()
    layer.self_attn.indexer.k_norm = torch.nn.LayerNorm(32)
    out["index norm"] = refusal(e, ("norm",))
    wrapper = layer.self_attn.mla_attn
    wrapper.__class__ = type(wrapper).__mro__[1]
    out["attention"] = refusal(e, ("attention",))
    return out


def stock_experts(folder: str) -> dict[str, Any]:
    from vime.vllm import plugin

    e = engine(folder, tuple(op for op in plugin.ROUTED if op != "moe"))
    try:
        e.weights_digest()
        said = "read back"
    except Exception as error:
        said = str(error)
    return {"places": e.places, "moe": refusal(e, ("moe",)), "contract": e.contract().to_dict(), "digest": said}


def main() -> None:
    found = {}
    for name, function, folder in (("planted", planted, sys.argv[1]), ("stock experts", stock_experts, sys.argv[2])):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                result = function(folder)
            except BaseException as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(write, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            found[name] = json.load(pipe)
        os.waitpid(pid, 0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
