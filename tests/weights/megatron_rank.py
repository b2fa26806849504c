"""One rank with a real Megatron model under Megatron's own process groups: loads its shards, then gathers and exports.

A worker of :class:`vime.rl.ranks.Ranks`.
"""
from __future__ import annotations

from pathlib import Path

import torch


class Rank:
    def __init__(self, rank: int, world_size: int, spec: dict):
        import torch.distributed as dist

        torch.set_num_threads(1)
        from vime.megatron import cpu

        cpu.apply()
        from megatron.core import parallel_state, tensor_parallel

        store = dist.FileStore(spec["store"], world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=spec["tp"], pipeline_model_parallel_size=spec["pp"],
            expert_model_parallel_size=spec["ep"], expert_tensor_parallel_size=1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        from tests.weights.megatron_models import build
        from vime.weights.checkpoint import HfCheckpoint
        from vime.weights.families import family_for
        from vime.weights.groups import Groups
        from vime.weights.topology import experts_of

        self.source = HfCheckpoint(spec["hf"])
        self.plan = family_for(self.source.config).plan(self.source.config, self.source.files)
        self.model = build(self.source.config, spec)
        self.groups = Groups.of_megatron([self.model], experts_of(self.plan))
        self.rank = rank

    def groups_and_stages(self):
        return self.groups.topology.groups, self.groups.topology.stages

    def load(self) -> int:
        from vime.weights.megatron_state import load

        return load([self.model], self.plan, self.groups.topology, self.rank, self.source)

    def export(self) -> list[str]:
        """HF names whose bits are not those of the source; all names must come."""
        from vime.weights.convert import export
        from vime.weights.raw import same_bits

        found = dict(export(self._gatherer()))
        assert found.keys() == self.source.keys()
        return [n for n, t in found.items() if not same_bits(t, self.source[n])]

    def _gatherer(self):
        from vime.weights.gather import Gatherer
        from vime.weights.megatron_state import local_state

        return Gatherer(self.plan, self.groups, local_state([self.model], self.groups.topology, self.rank))

    def spoil(self, rank: int, what: str) -> None:
        """Change something on one rank only."""
        import dataclasses

        if self.rank != rank:
            return
        if what == "value":
            dict(self.model.named_parameters())["decoder.layers.0.input_layernorm.weight"].data[0] += 1
        elif what == "dtype":
            self.model.decoder.layers[0].input_layernorm.to(torch.bfloat16)
        elif what == "order":
            self.plan = dataclasses.replace(self.plan, units=self.plan.units[::-1])

    def update(self, inject: str | None = None) -> dict:
        """One update to a stand-in for an engine, as the trainer sends it. What came out of it, by rank."""
        from tests.vllm.stand_in import Engine
        from vime.vllm.protocol import UpdateFailed
        from vime.weights.online import Exporter
        from vime.weights.raw import same_bits
        from vime.weights.transports.base import Endpoint
        from vime.weights.transports.process_group import ProcessGroupSender

        exporter = Exporter([self.model], self.source.config, self.source.files)
        exporter.inject(inject)
        engine = Engine()
        try:
            tensors = exporter.tensors()
            if self.rank == 0:
                sender = ProcessGroupSender(Endpoint(url="http://127.0.0.1:1", timeout_s=30))
                sender.client = engine
                sender.send(tensors, 1)
            else:
                list(tensors)
            problem = None
        except ValueError as error:
            problem = f"{type(error).__name__}: {error}"
            if engine.begun:
                try:
                    engine.finish_update(1)
                except UpdateFailed as told:
                    engine.error = told
        got = engine.received
        return {"begun": engine.begun, "received": len(got), "problem": problem, "told": str(engine.error or ""),
                "different": [n for n, t in got.items() if n not in self.source or not same_bits(t, self.source[n])],
                "missing": sorted(set(self.source) - set(got))}

    def ledger(self) -> dict:
        """Entries of an online update with the ledger on."""
        from vime.weights.ledger import Ledger
        from vime.weights.online import Exporter

        ledger = Ledger(stacked=self.plan.stacked)
        for _ in Exporter([self.model], self.source.config, self.source.files, ledger=ledger).tensors():
            pass
        return ledger.entries

    def flip(self, rank: int, name: str) -> None:
        """One bit of one weight on one rank."""
        if rank == self.rank:
            dict(self.model.named_parameters())[name].data.view(-1).view(torch.int32)[3] ^= 1

    def live_bytes(self, bucket_bytes: int) -> tuple[int, int, int]:
        """Most bytes of gathered tensors alive at once, the largest tensor, all of them together."""
        import weakref

        from vime.weights.online import Exporter

        alive: dict[int, tuple[weakref.ref, int]] = {}
        most = largest = total = 0
        for _, tensor in Exporter([self.model], self.source.config, self.source.files).tensors(bucket_bytes):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in {p.untyped_storage().data_ptr() for p in self.model.parameters()}:
                alive[storage.data_ptr()] = weakref.ref(tensor), tensor.nbytes
            largest, total = max(largest, tensor.nbytes), total + tensor.nbytes
            most = max(most, sum(n for ref, n in alive.values() if ref() is not None))
        return most, largest, total

    def refusal(self) -> str:
        try:
            self._gatherer()
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return ""


def make(rank: int, world_size: int, spec: dict) -> Rank:
    assert Path(spec["hf"]).is_dir()
    return Rank(rank, world_size, spec)
