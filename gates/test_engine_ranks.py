"""Gate: experts spread over two ranks of the engine show in no bit of it.

The same requests on an engine of one rank and on one of two (data parallel, each rank with half of the experts), with the
FP8 cache: tokens, log-probabilities, and every layer's output. Control: two experts of one layer, one of each rank, change
places in the engine of two; the gate has to fail at that layer. On GPUs the engine of the other part of this gate has two ranks
itself, each on its own GPU, and is held to the trainer's bits.
"""
from __future__ import annotations

import contextlib

import msgspec
import pytest

from alignment.verdict import Place
from gates.collect import require_device
from gates.experts import PROFILE, settings
from gates.harness import Harness
from gates.judging import same_layers, same_logprobs
from gates.profiles import find

RANKS = 2


def swap(harness, client, layer, a, b):
    """Send the checkpoint to every rank with experts ``a`` and ``b`` of ``layer`` exchanged."""
    import torch

    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.transports import Endpoint, open_sender

    names = {f"layers.{layer}.mlp.experts.{x}.": f"layers.{layer}.mlp.experts.{y}." for x, y in ((a, b), (b, a))}
    held = HfCheckpoint(harness.folder)

    def source(name):
        return next((name.replace(x, y) for x, y in names.items() if x in name), name)

    def tensor(name):
        found = held[source(name)]
        return found if name.endswith("e_score_correction_bias") else found.to(getattr(torch, harness.dtype))

    for url, token in client.addresses:
        with open_sender(Endpoint(url=url, token=token, timeout_s=harness.config.timeout_s)) as sender:
            sender.send(((name, tensor(name)) for name in held), 1)


@pytest.mark.gate_ep2(profile=PROFILE, device="cpu")
def test_engine_ranks(gate):
    from vime.latent import experts
    from vime.rl.config import read_hf_config

    profile = find(gate.profile or PROFILE)
    require_device(profile, gate.device)
    harness = Harness(profile, gate.device, profile.dtypes[0], kv_cache_dtype=settings(1)["kv_cache_dtype"])
    moe = experts(read_hf_config(harness.folder))
    sparse = [i for i, has in enumerate(moe.sparse) if has]
    layer = sparse[len(sparse) // 2]
    requests = harness.requests(2 * profile.prompts, tag="ranks")
    prompts = [msgspec.structs.replace(r, max_tokens=1) for r in requests]  # both sides compute the same tokens, fault or not
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(harness.another_engine())
        many = stack.enter_context(harness.another_engine(data_parallel_size=RANKS))
        wanted, clean = harness.engine_layers(requests, one)
        _, clean_prompts = harness.engine_layers(prompts, one)
        if not gate.control_only:
            found, spread = harness.engine_layers(requests, many)
            gate.record(same_logprobs(wanted, found, f"{RANKS} ranks", gate.tier, ("one rank", f"{RANKS} ranks")))
            gate.record(same_layers(clean, spread, f"layers of {RANKS} ranks", gate.tier))
            shares = [{t["name"] for t in c.weights_digest()["tensors"]} for c in many.clients]
            gate.happened("experts held by one rank only", len(set.symmetric_difference(*shares)))
            gate.describe(model=profile.name, dtype=harness.dtype, topology=f"engine dp{RANKS} ep{RANKS}",
                          kernels={"engine": many.stats()["kernels"]})
        swap(harness, many, layer, 0, moe.count - 1)
        said = same_layers(clean_prompts, harness.engine_layers(prompts, many)[1], "layers, two experts exchanged")
        if gate.control_only:
            gate.record(said)
        else:
            gate.control("two experts exchanged between ranks", Place(layer=layer), said)
