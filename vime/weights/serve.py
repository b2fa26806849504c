"""The last two stages in a running vLLM: what it received, what it holds after loading, and what it answers with it.

One engine is started on the source folder and asked greedily. Then it gets other weights, so that equal answers later
cannot come from an engine that does not listen; then the tensors of the converted folder, through the transport of an
online update. What arrived is digested by the receiver, what was loaded is read back from the engine's own layout, and
both are compared with the source checkpoint, never with what was sent. Tokens and log-probabilities must be those of
the start, bit for bit.
"""
from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alignment.ledger import Cell, Origin
from alignment.verdict import Coverage, Status, Verdict
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.faults import Fault, FaultError, Rewired
from vime.weights.folders import NAMES
from vime.weights.ledger import Key
from vime.weights.manifest import digest_of
from vime.weights.policy import left_out
from vime.weights.truth import corruptions, previous

if TYPE_CHECKING:
    from vime.weights.truth import Truth

STAGES = ("received", "loaded")
PROMPTS, NEW_TOKENS = 4, 16
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_RANK = {"engine": 0}

Answers = dict[str, dict[str, Any]]


@dataclasses.dataclass
class Served:
    """What the engine said. ``received`` and ``loaded``: HF name -> digest; ``refused``: why it did not take the weights."""

    received: Mapping[str, str]
    loaded: Mapping[str, str]
    answers: Verdict
    refused: str | None = None


def check(source: HfCheckpoint, fault: Fault | None) -> str:
    """The dtype to serve in. Raises :class:`FaultError` for a fault that cannot be planted from outside an engine, and
    :class:`vime.vllm.protocol.EngineError` for a checkpoint that is not served."""
    from vime.vllm.protocol import EngineError

    if fault is not None and fault.stage == "loaded":
        raise FaultError(f"--inject loaded:{fault.kind} --serve: what is loaded lies inside the engine's process; plant it at received, "
                         "or leave --serve out")
    dtypes = [dtype for dtype, _ in source.specs.values()]
    if other := sorted(NAMES[dtype] for dtype in set(dtypes) - set(_DTYPES)):
        raise EngineError(f"{source.folder} holds tensors in {', '.join(other)}; --serve covers checkpoints in float32 and bfloat16")
    return _DTYPES[max(set(dtypes), key=dtypes.count)]


class Server:
    """An engine started on ``source``, for as many converted checkpoints as there are. A context manager.

    Raises :class:`vime.vllm.protocol.EngineError` (or one of its kinds) for an engine that cannot be started or dies.
    """

    def __init__(self, source: HfCheckpoint, dtype: str, device: str = "cpu"):
        self.source, self.dtype, self.device = source, dtype, device
        self.left = left_out(source.config, source)
        self._stack = contextlib.ExitStack()
        self._version = 0

    def __enter__(self) -> Server:
        from vime.vllm.launch import launch_engine

        with contextlib.ExitStack() as stack:
            logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-serve-"))
            longest = min(512, self.source.config.get("max_position_embeddings") or 512)
            self.engine = stack.enter_context(launch_engine(
                self.source.folder, device=self.device, dtype=self.dtype, log_path=Path(logs) / "engine.log", max_model_len=longest,
                kv_cache_bytes=1 << 28 if self.device == "cpu" else None))
            self.first = self._ask()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, converted: HfCheckpoint, fault: Fault | None = None, tell: Callable[[int, int], None] = lambda done, total: None) -> Served:
        """Give it other weights, then ``converted``. A ``fault`` at ``received`` is planted on the way."""
        from vime.vllm.protocol import UpdateFailed

        source = self.source
        changed = ((name, previous(tensor) if tensor.is_floating_point() else tensor) for name, tensor in source.items())
        self._send(changed)
        tell(1, 3)
        other = self._ask()
        sent: Mapping[str, torch.Tensor] = converted
        if fault is not None and fault.stage == "received":
            sent = Rewired(converted, fault, lambda name: None)
        refused, answers = None, None
        try:
            self._send(sent.items())
            answers = self._ask()
        except UpdateFailed as error:
            refused = str(error)
        tell(2, 3)
        held = self.engine.client.weights_digest()
        tell(3, 3)
        loaded = {t["name"]: f"bytes:{t['digest']}" for t in held["tensors"]}
        received = {name: f"bytes:{digest}" for name, digest in held["arrived"].items()}
        return Served(received, loaded, judge_answers(self.first, other, answers, refused), refused)

    def _send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vime.weights.transports import Endpoint, open_sender

        self._version += 1
        with open_sender(Endpoint(url=self.engine.url, token=self.engine.token, timeout_s=120)) as sender:
            sender.send(((name, tensor) for name, tensor in tensors if name not in self.left), self._version)

    def _ask(self) -> Answers:
        from vime.vllm.protocol import Request

        model = self.engine.client.info()["model"]
        room, vocab = model["max_model_len"] - NEW_TOKENS, model["vocab_size"]
        prompts = [[(7 + 31 * i + 17 * j) % vocab for j in range(min(room, 5 + 9 * i))] for i in range(PROMPTS)]
        samples = self.engine.client.generate([
            Request(request_id=f"greedy{i}", prompt_token_ids=p, max_tokens=NEW_TOKENS, temperature=0.0) for i, p in enumerate(prompts)])
        return {s.request_id: {"token_ids": s.token_ids, "prompt_token_ids": s.prompt_token_ids, "logprobs": s.logprobs} for s in samples}


def judge_answers(first: Answers, other: Answers, converted: Answers | None, refused: str | None = None) -> Verdict:
    """Answers with the source's weights against those with the converted ones; ``other`` are those with other weights."""
    from alignment.logprobs import judge

    name = "served"
    if converted is None:
        return Verdict(name, Status.NOT_RUN, f"the engine refused the converted weights: {refused}", coverage={"requests": Coverage(0, len(first))})
    if first == other:
        return Verdict(name, Status.NOT_RUN, "the engine answers the same with other weights: equal answers show nothing",
                       coverage={"requests": Coverage(0, len(first))})
    return judge(first, converted, name=name)


def cells(served: Served, truth: Truth) -> Iterator[Cell]:
    """Every tensor of the policy at both stages, in model order, and what the engine has beside them."""
    left = left_out(truth.source.config, truth.source) if isinstance(truth.source, HfCheckpoint) else {}
    for stage, found in zip(STAGES, (served.received, served.loaded), strict=True):
        order = {ref.name: unit for unit in truth.plan.units for ref in unit.hf}
        names = [n for n in (*order, *(n for n in truth.source if n not in order)) if n not in left]
        for name in (*names, *sorted(found.keys() - set(names))):
            want = truth.served.get(name)
            if stage == "loaded" and name not in found and name in truth.source and _is_alias(truth, name):
                continue  # a tied head has no place of its own in the engine
            unit = order.get(name)
            expert = None if unit is None or name in truth.plan.stacked else unit.expert
            yield Cell(stage, name, want, found.get(name), _RANK, None if unit is None else unit.layer, expert)


def origin(cell: Cell, truth: Truth) -> Origin | None:
    """Where a wrong digest of :func:`cells` comes from."""
    if cell.found is None:
        return None
    if (name := truth.served_names.get(cell.found)) is not None:
        return Origin(name)
    if cell.want is None:
        return None
    true = truth.source[cell.name]
    variants = ((kind, note, v) for kind, note, v in corruptions(true) if v.dtype == true.dtype)
    return next((Origin(cell.name, kind=kind, note=note) for kind, note, v in variants if f"bytes:{digest_of(v)}" == cell.found), None)


def _is_alias(truth: Truth, name: str) -> bool:
    return any(name in unit.hf_alias for unit in truth.plan.units) and Key(name) in truth.pieces
