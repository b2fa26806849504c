"""Log-probabilities and layer outputs of token sequences, from a Megatron model.

With vime's attention the sequences are packed into one row of tokens with their boundaries beside it, as in training
at scale; each still gives the bits it gives alone. Stock Megatron's local attention refuses packed sequences, so the
unaligned run takes each sequence alone.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import vime
from vime.megatron.check import unwrap
from vime.megatron.routes import logprob


def packed_logits(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits ``[T, V]`` in the model dtype of the concatenated sequences, ``T`` tokens in all.

    Needs vime's attention. Each token attends to its own sequence only, at its own position.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    device = next(model.parameters()).device
    lengths = _lengths(sequences)
    ids_1T = torch.tensor([[token for sequence in sequences for token in sequence]], dtype=torch.int64, device=device)
    positions_1T = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    cu_seqlens_B1 = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens_B1, cu_seqlens_kv=cu_seqlens_B1,
                              max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    return model(ids_1T, positions_1T, None, packed_seq_params=packing)[0]


def single_logits(model: Any, sequence: Sequence[int]) -> torch.Tensor:
    """Logits ``[T, V]`` of one sequence, as any Megatron takes it."""
    device = next(model.parameters()).device
    _lengths([sequence])
    ids_1T = torch.tensor([list(sequence)], dtype=torch.int64, device=device)
    return model(ids_1T, torch.arange(len(sequence), device=device)[None], None)[0]


def logits_of(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits ``[T, V]`` of the concatenated sequences: packed with vime's attention, one by one without."""
    if vime.is_enabled("attention"):
        return packed_logits(model, sequences)
    return torch.cat([single_logits(model, sequence) for sequence in sequences])


@contextlib.contextmanager
def _lm_head_on(model: Any, rows_R: torch.Tensor) -> Iterator[None]:
    """Let the LM head see these rows of ``[T, 1, H]`` only: it is the widest layer, and prompts need no logits."""

    def select(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        return (inputs[0].index_select(0, rows_R), *inputs[1:])

    handle = unwrap(model).output_layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def token_logprobs_of(model: Any, sequences: Sequence[Sequence[int]], temperature: float = 1.0, *, grad: bool = False,
                      first: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Log-probability of each next token under ``logits / temperature``.

    Args:
        model: a Megatron GPT, maybe wrapped; its mode (train, eval) is left as it is.
        sequences: token ids, at least two each.
        temperature: positive.
        grad: keep the graph for a backward. The values have the same bits either way.
        first: position of the first token wanted of each sequence (its prompt length, say); at least 1, the default.

    Returns:
        One fp32 tensor ``[len - first]`` a sequence, for the tokens at positions ``first`` to ``len - 1``.

    Raises:
        ValueError: no sequence, one of fewer than two tokens, or a ``first`` outside 1 to ``len - 1``.
        vime.megatron.Refused: the model can't be aligned.
    """
    lengths = _lengths(sequences)
    starts = [1] * len(lengths) if first is None else list(first)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if not 1 <= start < length:
            raise ValueError(f"sequence {i} has {length} token(s) and the first wanted one is at {start}; expected 1 <= first < "
                             "length, since the token at position 0 is predicted by nothing")
    wanted = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
    # the logits at position p - 1 predict the token at p
    rows = [range(start - 1, length - 1) for start, length in zip(starts, lengths, strict=True)]
    device = next(model.parameters()).device
    with torch.set_grad_enabled(grad):
        if vime.is_enabled("attention"):
            offsets = [0, *itertools.accumulate(lengths)]
            rows_R = torch.tensor([o + p for o, r in zip(offsets, rows, strict=False) for p in r], device=device)
            with _lm_head_on(model, rows_R):
                logits = [packed_logits(model, sequences)]
            ids = [torch.tensor([token for part in wanted for token in part], device=device)]
        else:  # stock: the plain forward of each sequence, as any script does it
            logits = [single_logits(model, s)[r.start:r.stop] for s, r in zip(sequences, rows, strict=True)]
            ids = [torch.tensor(part, device=device) for part in wanted]
        found = torch.cat([_logprobs(x, y, temperature) for x, y in zip(logits, ids, strict=True)])
    return list(found.split([len(part) for part in wanted]))


def _logprobs(logits_TV: torch.Tensor, ids_T: torch.Tensor, temperature: float) -> torch.Tensor:
    if vime.is_enabled("logprob"):
        return logprob.token_logprobs(logits_TV, ids_T, temperature)
    return torch.log_softmax(logits_TV.float() / temperature, -1).gather(1, ids_T[:, None])[:, 0]


@dataclasses.dataclass(frozen=True)
class Recording:
    """Outputs at Megatron's own module boundaries, one row a token.

    Attributes:
        sequence_T, position_T, token_T: which token of which sequence each row belongs to, int64.
        outputs: ``"layers.0"`` ... (hidden states after the layer, residual included), ``"final_norm"``, ``"logits"``,
            each ``[T, width]`` in the model dtype, on the CPU.
    """

    sequence_T: torch.Tensor
    position_T: torch.Tensor
    token_T: torch.Tensor
    outputs: dict[str, torch.Tensor]

    def empty(self) -> Recording:
        """The same without any row: of a rank that ran for others only."""
        return Recording(self.sequence_T[:0], self.position_T[:0], self.token_T[:0],
                         {name: rows[:0] for name, rows in self.outputs.items()})


def record_layers(model: Any, sequences: Sequence[Sequence[int]]) -> Recording:
    """Run the sequences without grad and keep every layer's output. Raises as :func:`logits_of`."""
    gpt = unwrap(model)
    points = {f"layers.{i}": layer for i, layer in enumerate(gpt.decoder.layers)}
    if gpt.decoder.final_layernorm is not None:
        points["final_norm"] = gpt.decoder.final_layernorm
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in points}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            hidden = output[0] if isinstance(output, tuple) else output
            # bias_dropout_add works in place without grad, so the layer's own tensor may still change
            kept[name].append(hidden.detach().reshape(-1, hidden.shape[-1]).to("cpu", copy=True))

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in points.items()]
    try:
        with torch.no_grad():
            logits_TV = logits_of(model, sequences)
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name, parts in kept.items() if not parts]
    if silent:
        raise RuntimeError(f"no output was seen of {', '.join(silent)}: these modules did not run through their own forward")
    lengths = _lengths(sequences)
    return Recording(
        sequence_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        position_T=torch.cat([torch.arange(n) for n in lengths]),
        token_T=torch.tensor([token for sequence in sequences for token in sequence]),
        outputs={**{name: torch.cat(parts) for name, parts in kept.items()}, "logits": logits_TV.detach().cpu()},
    )


def _lengths(sequences: Sequence[Sequence[int]]) -> list[int]:
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or not all(lengths):
        raise ValueError(f"expected at least one sequence and no empty one, found lengths {lengths}")
    return lengths
