"""Log-probabilities and layer outputs of token sequences, from a Megatron model.

With vime's attention the sequences are packed into one row of tokens with their boundaries beside it, as in training
at scale; each still gives the bits it gives alone. Stock Megatron's local attention refuses packed sequences, so the
unaligned run takes each sequence alone.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

import vime
from vime.megatron.routes import logprob


def unwrap(model: Any) -> Any:
    """The model inside Megatron's data parallel and precision wrappers."""
    while not hasattr(model, "decoder"):
        model = model.module
    return model


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


def token_logprobs_of(model: Any, sequences: Sequence[Sequence[int]], temperature: float = 1.0, *,
                      grad: bool = False) -> list[torch.Tensor]:
    """Log-probability of each next token under ``logits / temperature``.

    Args:
        model: a Megatron GPT, maybe wrapped; its mode (train, eval) is left as it is.
        sequences: token ids, at least two each.
        temperature: positive.
        grad: keep the graph for a backward. The values have the same bits either way.

    Returns:
        One fp32 tensor ``[len - 1]`` a sequence: element ``p`` belongs to the token at position ``p + 1``.

    Raises:
        ValueError: a sequence of fewer than two tokens, or none.
        vime.megatron.Refused: the model can't be aligned.
    """
    short = [i for i, sequence in enumerate(sequences) if len(sequence) < 2]
    if short:
        raise ValueError(f"sequence {short[0]} has {len(sequences[short[0]])} token(s); a next token needs at least two")
    with torch.set_grad_enabled(grad):
        logits_TV = logits_of(model, sequences)
        # The last row of a sequence predicts nothing; it gets any id and is dropped, which leaves it without gradient.
        ids_T = torch.cat([torch.tensor([*sequence[1:], 0], device=logits_TV.device) for sequence in sequences])
        if vime.is_enabled("logprob"):
            lp_T = logprob.token_logprobs(logits_TV, ids_T, temperature)
        else:
            lp_T = torch.log_softmax(logits_TV.float() / temperature, -1).gather(1, ids_T[:, None])[:, 0]
    return [part[:-1] for part in lp_T.split([len(sequence) for sequence in sequences])]


@dataclasses.dataclass(frozen=True)
class Recording:
    """Outputs at Megatron's own module boundaries, one row a token.

    Attributes:
        sequence_T, position_T, token_T: which token of which sequence each row belongs to, int64.
        outputs: ``"layers.0"`` ... (hidden states after the layer, residual included), ``"final_norm"``, ``"logits"``,
            each ``[T, width]`` in the model dtype.
    """

    sequence_T: torch.Tensor
    position_T: torch.Tensor
    token_T: torch.Tensor
    outputs: dict[str, torch.Tensor]


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
            kept[name].append(hidden.detach().reshape(-1, hidden.shape[-1]).clone())

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
        outputs={**{name: torch.cat(parts) for name, parts in kept.items()}, "logits": logits_TV.detach()},
    )


def _lengths(sequences: Sequence[Sequence[int]]) -> list[int]:
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or not all(lengths):
        raise ValueError(f"expected at least one sequence and no empty one, found lengths {lengths}")
    return lengths
