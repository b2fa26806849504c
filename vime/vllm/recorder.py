"""Writes down what every layer of the engine put out, row by row, under (request, position, token).

Hooks sit at vLLM's own module boundary, never inside ``vime.ops``: an operation that is skipped on one side must not be
able to agree with itself. A layer's output is hidden plus residual in the model dtype, what both sides carry on.
Batches are continuous and prompts come in chunks, so each row is named by what it is and never by where it was; a
position that was served from the prefix cache was not computed and has no row.
"""
from __future__ import annotations

import functools
import json
import re
from typing import Any

import safetensors.torch
import torch

from vime.vllm.protocol import EngineError, RecordOptions


class Recorder:
    """Records of one model runner. Off until :meth:`start`; :meth:`stop` removes every hook."""

    def __init__(self, model: Any, runner: Any) -> None:
        self.model, self.runner = model, runner
        self._handles: list[Any] = []
        self._deciders: list[Any] = []
        self._names: dict[str, str] = {}
        self._had_graphs: bool | None = None
        self.clear()

    @property
    def active(self) -> bool:
        """Whether hooks are installed."""
        return bool(self._handles)

    def clear(self) -> None:
        """Forget what was recorded; what is being recorded goes on."""
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._rows: list[tuple[str, int, int]] = []
        self._logit_rows: list[tuple[str, int, int]] = []
        self._step: list[tuple[str, int, int]] = []
        self._positions: torch.Tensor | None = None

    def start(self, options: RecordOptions) -> None:
        """Install the hooks. Raises EngineError naming a layer that does not exist."""
        self.stop()
        self.clear()
        inner = self.model.model
        layers = range(len(inner.layers)) if options.layers is None else options.layers
        unknown = [i for i in layers if not 0 <= i < len(inner.layers)]
        if unknown:
            raise EngineError(f"cannot record layer {unknown[0]}; this model has layers 0 to {len(inner.layers) - 1}")
        self._graphs(False)  # a replayed graph runs no hooks
        first = inner.layers[0]
        self._handles = [
            inner.embed_tokens.register_forward_hook(lambda m, args, out: self._embedding(args[0], out, options.embedding)),
            first.register_forward_pre_hook(self._positions_hook, with_kwargs=True),
        ]
        for index in layers:
            self._handles.append(inner.layers[index].register_forward_hook(self._layer_hook(f"layers.{index}")))
        if options.final_norm:
            self._handles.append(inner.norm.register_forward_hook(
                lambda m, args, out: self._keep("final_norm", out[0] if isinstance(out, tuple) else out)))
        if options.routing:
            self._choices(set(layers))
        if options.logits:
            self._wrap_sample()

    def stop(self) -> None:
        """Remove every hook and let captured graphs run again. Harmless where nothing is being recorded."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._deciders:
            module.vime_observer = None
        self._deciders = []
        self._graphs(True)
        self.runner.__dict__.pop("_sample", None)

    def _graphs(self, on: bool) -> None:
        dispatcher = getattr(self.runner, "cudagraph_dispatcher", None)
        if dispatcher is not None and on and self._had_graphs is not None:
            dispatcher.keys_initialized, self._had_graphs = self._had_graphs, None
        elif dispatcher is not None and not on:
            self._had_graphs, dispatcher.keys_initialized = dispatcher.keys_initialized, False

    def name_request(self, internal: str, external: str) -> None:
        """vLLM renames requests; records carry the caller's name."""
        self._names[internal] = external

    def forget_requests(self) -> None:
        """None is running any more."""
        self._names.clear()

    # A forward runs: embedding -> first layer (its positions) -> layers -> norm -> (logits -> sample).

    def _embedding(self, ids_T: torch.Tensor, out_TH: torch.Tensor, keep: bool) -> None:
        self._ids = ids_T.detach().clone()
        self._pending = out_TH if keep else None

    def _positions_hook(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from vllm.forward_context import get_forward_context

        if get_forward_context().attn_metadata is None:  # this rank has no tokens and only keeps the others company
            self._step, self._last_rows, self._pending = [], [], None
            return
        positions = kwargs["positions"] if "positions" in kwargs else args[0]
        batch = self.runner.input_batch
        starts = self.runner.query_start_loc.np[:batch.num_reqs + 1].tolist()
        ids, positions = self._ids.tolist(), positions.tolist()
        self._step = [(self._names.get(request, request), positions[row], ids[row])
                      for number, request in enumerate(batch.req_ids[:batch.num_reqs])
                      for row in range(starts[number], starts[number + 1])]
        self._last_rows = [end - 1 for end in starts[1:]]
        self._rows += self._step
        if self._pending is not None:
            self._keep("embedding", self._pending)

    def _layer_hook(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, out: Any) -> None:
            hidden, residual = out
            self._keep(name, hidden + residual)

        return hook

    def _choices(self, layers: set[int]) -> None:
        """Observe the aligned layers that choose: experts (``layers.<i>.routing``) and keys (``layers.<i>.index``)."""
        for module in self.model.modules():
            what = getattr(module, "vime_decides", None)
            number = int(re.findall(r"\.(\d+)\.", module.layer_name)[0]) if what else -1
            if number in layers:
                module.vime_observer = functools.partial(self._keep, f"layers.{number}.{what}")
                self._deciders.append(module)
        if not self._deciders:
            self.stop()
            raise EngineError("cannot record routing: no recorded layer of this model has aligned experts or sparse attention")

    def _keep(self, name: str, value: torch.Tensor) -> None:
        # Padding rows of a batch come after the real ones.
        self._tensors.setdefault(name, []).append(value[:len(self._step)].detach().to("cpu", copy=True))

    def _wrap_sample(self) -> None:
        stock = self.runner._sample

        def sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._logit_rows += [self._step[row] for row in self._last_rows]
            self._tensors.setdefault("logits", []).append(logits.detach().to("cpu", copy=True))
            return stock(logits, *args, **kwargs)

        self.runner._sample = sample

    def dump(self) -> bytes:
        """Everything recorded since :meth:`start` or the last dump, as safetensors; the rows are in its metadata.

        Tensors ``embedding``, ``layers.<i>``, ``final_norm`` are ``[rows, H]``, ``logits`` is ``[logit rows, V]``, all in
        the model dtype. ``layers.<i>.routing`` are expert ids ``[rows, top k]`` in slot order, ``layers.<i>.index`` the
        positions ``[rows, top k]`` that were read, ``-1`` past the last. ``rows`` and ``logit_rows`` are JSON lists of
        ``[request, position, token]``; a logit row is the row of the token that the logits follow.
        """
        tensors = {name: torch.cat(parts).contiguous() for name, parts in self._tensors.items()}
        metadata = {"rows": json.dumps(self._rows), "logit_rows": json.dumps(self._logit_rows)}
        self.clear()
        return safetensors.torch.save(tensors, metadata=metadata)
