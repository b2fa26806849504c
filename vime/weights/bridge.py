"""``--megatron-to-hf-mode bridge``: names and layouts by mbridge instead of by our own table, behind the same interface.

mbridge (https://github.com/ISEEKYAN/mbridge, PyPI ``mbridge``) knows the names of TransformerEngine's fused modules
only, so it is shown the model under those. It gathers with collectives of its own, which check less than ours: no
ownership, no agreement, no proof of the gathered bits. What comes out is therefore checked against the names and shapes
of the source checkpoint. Its use is a second opinion: two converters that share no line.
"""
from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vime.weights.checkpoint import HfCheckpoint
from vime.weights.errors import WeightError
from vime.weights.megatron_state import named_weights, unwrap
from vime.weights.policy import left_out

VERSION = "0.15.1"
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
#: norm of the local spec -> the projection after it, which has taken it in where that exists in the layer
_NORMS = (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1"),
          ("self_attention.q_layernorm", "self_attention.linear_q_up_proj"),
          ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj"))


class BridgeMissing(WeightError):
    """mbridge is not installed, or does not know this architecture. The message says what to do."""


def require() -> None:
    """Raise :class:`BridgeMissing` unless mbridge can be imported. Imports nothing."""
    if importlib.util.find_spec("mbridge") is None:
        raise BridgeMissing(f"--megatron-to-hf-mode bridge needs mbridge, which is not installed: pip install --no-deps mbridge=={VERSION}, "
                            "or use --megatron-to-hf-mode raw")


def fused_names(names: Collection[str]) -> dict[str, str]:
    """Name in the local spec -> name in a model of TransformerEngine's fused and grouped modules."""
    out = {}
    for name in names:
        new = _EXPERT.sub(r"experts.\2.\3\1", name)
        for norm, projection in _NORMS:
            head, found, kind = name.rpartition(f".{norm}.")
            if found and f"{head}.{projection}.weight" in names:
                new = f"{head}.{projection}.layer_norm_{kind}"
        out[name] = new
    return out


class _Renamed:
    """A model chunk under TransformerEngine's names, as far as mbridge looks at it."""

    def __init__(self, chunk: torch.nn.Module):
        inner = unwrap(chunk)
        self.decoder = inner.decoder
        parameters = dict(inner.named_parameters())
        self._weights = dict(named_weights(chunk))
        names = fused_names(self._weights)
        self._parameters = {names[name]: parameter for name, parameter in parameters.items()}
        self._state = {names[name]: tensor for name, tensor in self._weights.items()}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._parameters.items()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state


class BridgeExporter:
    """As :class:`vime.weights.online.Exporter`, by mbridge.

    ``folder`` is the source checkpoint: mbridge reads its config, and its names and shapes are what has to come out.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], folder: str | Path):
        require()
        import transformers
        from mbridge import AutoBridge

        self.chunks = list(chunks)
        source = HfCheckpoint(folder)
        left = left_out(source.config, source)
        self.specs: Mapping[str, Any] = {name: spec for name, spec in source.specs.items() if name not in left}
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.model_type not in AutoBridge.list_supported_models():
            raise BridgeMissing(f"mbridge does not know model_type {config.model_type!r} (it knows "
                                f"{', '.join(sorted(AutoBridge.list_supported_models()))}); use --megatron-to-hf-mode raw")
        try:
            self.bridge = AutoBridge.from_config(config, dtype=next(self.chunks[0].parameters()).dtype)
        except (AttributeError, TypeError, ValueError, AssertionError) as error:
            raise BridgeMissing(f"this mbridge cannot read a {config.model_type} config of transformers {transformers.__version__} "
                                f"({type(error).__name__}: {error}); use --megatron-to-hf-mode raw") from error

    def inject(self, text: str | None) -> None:
        """Faults are planted into our own gather only."""
        if text is not None:
            raise WeightError(f"--inject {text}: planted faults need --megatron-to-hf-mode raw")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(HF name, tensor)``. Every rank must iterate to the end. Raises :class:`WeightError` for a name that is not in
        the source checkpoint, comes twice or never, and for a wrong shape."""
        seen: set[str] = set()
        for name, tensor in self.bridge.export_weights([_Renamed(chunk) for chunk in self.chunks]):
            if name not in self.specs:
                raise WeightError(f"mbridge exports {name}, which the source checkpoint does not hold")
            if name in seen:
                raise WeightError(f"mbridge exports {name} twice")
            if tuple(tensor.shape) != self.specs[name][1]:
                raise WeightError(f"mbridge exports {name} with shape {list(tensor.shape)}, expected {list(self.specs[name][1])}")
            seen.add(name)
            yield name, tensor.detach().contiguous()
        if lost := sorted(self.specs.keys() - seen):
            raise WeightError(f"mbridge exports {len(seen)} tensors and not {lost[0]} ({len(lost)} such); "
                              "a copy of a tied tensor is not written by it")
