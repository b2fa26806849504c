"""On a GPU: Megatron built of TransformerEngine's modules against the local spec, the same weights, bit for bit.

Needs megatron-core 0.19.2 and TransformerEngine 2.11.0; under a minute.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vime
from vime.megatron import forward, hooks, te
from vime.megatron.model import build_model, load_megatron_weights
from vime.weights.megatron_state import canonical, named_weights

BOTH = ("local", "transformer_engine")
_DENSE = dict(vocab_size=32000, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0, num_hidden_layers=4)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": dict(_DENSE, model_type="qwen2", hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2,
                  tie_word_embeddings=True),
    "llama": dict(_DENSE, model_type="llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
                  tie_word_embeddings=False),
    "qwen3": dict(_DENSE, model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
                  head_dim=128, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    if not te.present():
        pytest.skip("TransformerEngine is not installed: nothing of it is tested")
    from vime.megatron import parallel

    with parallel.single_process("cuda", seed=1):
        yield
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:  # TransformerEngine compiles its fusions; the workers for that keep the process from ending
        compiler.shutdown_compile_workers()


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    hooks.reset_counters()
    yield
    vime.disable()


def build(family: str, impl: str, recompute: bool = False) -> Any:
    """A bf16 model with weights that its family and nothing else decides."""
    model = build_model(MODELS[family], torch.bfloat16, "cuda", recompute, initialize=False, transformer_impl=impl)
    shapes = sorted((canonical(name), tensor.shape) for name, tensor in named_weights(model))
    generator = torch.Generator(device="cuda").manual_seed(7)
    weights = {}
    for name, shape in shapes:
        noise = torch.randn(shape, device="cuda", generator=generator)
        weights[name] = (1 + 0.1 * noise if "norm" in name else noise * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)).bfloat16()
    load_megatron_weights(model, weights)
    return model


def sequences(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 32000, (n,), generator=generator).tolist() for n in (3, 300, 64, 17, 129, 1)]


def run(model: Any, packed: list[list[int]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    found = torch.cat(forward.token_logprobs_of(model, [s for s in packed if len(s) > 1], grad=True))
    (found * torch.linspace(0.5, 1.5, len(found), device="cuda")).sum().backward()
    return found.detach(), {canonical(name): p.grad.clone() for name, p in model.named_parameters()}


def bits(x: torch.Tensor) -> torch.Tensor:
    assert torch.isfinite(x).all()
    return x.contiguous().view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("family", MODELS)
def test_both_specs_give_the_same_bits(family: str) -> None:
    with vime.enabled():
        te.workspace.reset()
        (want, want_grads), (got, got_grads) = (run(build(family, impl), sequences()) for impl in BOTH)
        again, _ = run(build(family, "transformer_engine", recompute=True), sequences())
        assert te.workspace.products() == 0, "a GEMM of TransformerEngine ran in a routed model"
    assert torch.equal(bits(got), bits(want)) and torch.equal(bits(again), bits(want)), int((got != want).sum())
    assert got_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        assert torch.equal(bits(got_grads[name]), bits(grad)) and bool(grad.any()), name


def test_a_sequence_alone_is_the_same_as_packed() -> None:
    packed = sequences()
    with vime.enabled(), torch.no_grad():
        model = build("qwen2", "transformer_engine")
        together = forward.packed_logits(model, packed).split([len(s) for s in packed])
        for rows, sequence in zip(together, packed, strict=True):
            assert torch.equal(bits(forward.packed_logits(model, [sequence])), bits(rows))


def test_a_flipped_bit_in_a_fused_norm_is_seen() -> None:
    with vime.enabled(), torch.no_grad():
        model = build("qwen2", "transformer_engine")
        before = forward.packed_logits(model, sequences())
        model.decoder.layers[1].mlp.linear_fc1.layer_norm_weight.view(torch.int16)[3] ^= 1 << 5
        assert not torch.equal(bits(forward.packed_logits(model, sequences())), bits(before))


def _without(ops: tuple[str, ...]) -> torch.Tensor:
    """Log-probabilities of the TransformerEngine spec with these operations left to it, one sequence at a time."""
    with vime.enabled(exclude=ops), torch.no_grad():
        model = build("llama", "transformer_engine")
        return torch.cat([forward.single_logits(model, s) for s in sequences() if len(s) > 1])


def test_what_is_left_to_transformer_engine_differs() -> None:
    """The control: without the routes of linear layers and norms the two specs are told apart."""
    assert not torch.equal(_without(()), _without(("linear", "norm")))


def test_starved_products_of_transformer_engine() -> None:
    """How many of its rows depend on M, with its workspace and without; without, the products must at least run and be right."""
    import transformer_engine.pytorch as engine

    differing = {}
    for starved in (False, True):
        with vime.enabled(() if not starved else "linear"), torch.no_grad():
            count = 0
            for n, k in ((896, 4864), (1152, 896), (9728, 896), (256, 6144)):
                torch.manual_seed(0)
                layer = engine.Linear(k, n, bias=False, params_dtype=torch.bfloat16)
                x = torch.randn(2048, k, device="cuda", dtype=torch.bfloat16)
                whole = layer(x)
                exact = x[:64].double() @ layer.weight.double().t()
                assert float((whole[:64].double() - exact).norm() / exact.norm()) < 6e-3
                for m in (64, 65, 96, 127, 129, 200, 256, 257, 511, 513, 1000, 1024):
                    count += int((layer(x[:m].clone()) != whole[:m]).any(1).sum())
        differing[starved] = count
    print(f"rows of TransformerEngine's products that depend on M: {differing[False]} with its workspace, {differing[True]} without")
    assert differing[True] < differing[False], differing  # so with it some differ: else this shows nothing
