"""One description of a model family from which every other weight question is answered.

A checkpoint goes wrong in the places where two formats are described twice. Here a family lists its *units* once:
one Megatron tensor, the Hugging Face tensors it holds, how their rows interleave, how tensor parallelism cuts it,
and which layer or expert it belongs to. Conversion both ways, per-rank shards, ownership, the ledger's truth at
each stage and the shape checks are all read from that list, and none of them knows a family.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vime.weights.errors import ConfigMismatch, WeightError
from vime.weights.families.units import Unit

SYNONYMS = {"num_experts": ("num_local_experts",), "n_routed_experts": ("num_local_experts",)}  # by transformers version
#: Buffers that older files hold though the config gives them: transformers and vLLM leave them aside, and so do we.
COMPUTED = (".rotary_emb.inv_freq",)


class Config:
    """Read access to an HF ``config.json`` (its ``text_config`` where it has one). Attributes are counts: a missing field, or
    one that is none, is an error. Every field of another kind than expected raises :class:`ConfigMismatch` with its name."""

    def __init__(self, hf_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self.raw = dict(hf_config)
        self._fields = dict(self.raw)
        self._fields = {**(defaults or {}), **(self.table("text_config") or hf_config)}

    def __getattr__(self, name: str) -> Any:
        for known in (name, *SYNONYMS.get(name, ())):
            if known in self._fields:
                return self._count(known)
        raise ConfigMismatch(f"config.json has no field {name!r}, which this architecture needs")

    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    def count(self, name: str, default: int = 0) -> int:
        """A field that may be missing."""
        return default if self._fields.get(name) is None else self._count(name)

    def kinds(self, name: str, layers: int) -> list[str] | None:
        """A field with a word for every layer, which may be missing."""
        value = self._fields.get(name)
        if value is not None and not (isinstance(value, list) and len(value) >= layers and all(isinstance(kind, str) for kind in value)):
            raise ConfigMismatch(f"config.json: {name} is {value!r}; expected a list of {layers} words, one for each layer")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """A field that holds fields of its own; empty where it is missing."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise ConfigMismatch(f"config.json: {name} is {value!r}; expected an object")
        return value or {}

    def _count(self, name: str) -> int:
        value = self._fields[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigMismatch(f"config.json: {name} is {value!r}; expected a number of 0 or more, without a fraction")
        return value

    @property
    def head_dim(self) -> int:
        return self.count("head_dim") or self.hidden_size // max(1, self.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        if not (found := self.count("num_key_value_heads") or self.num_attention_heads):
            raise ConfigMismatch("config.json: num_key_value_heads and num_attention_heads are 0")
        return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """The units of one checkpoint in model order, after the optional ones were resolved against real names."""

    family: str
    units: tuple[Unit, ...]
    carried: tuple[str, ...] = ()  # HF tensors outside the language model: copied, never converted
    hf_names: frozenset[str] | None = None  # those of the checkpoint, None where none were given

    @property
    def by_name(self) -> dict[str, Unit]:
        """Units by Megatron name, aliases included."""
        return {n: u for u in self.units for n in (u.name, *u.megatron_alias)}

    @property
    def stacked(self) -> frozenset[str]:
        """HF tensors that hold one expert a slice."""
        return frozenset(ref.name for unit in self.units for ref in unit.hf if ref.part is not None)

    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every HF tensor the units describe (aliases not included) -> its whole shape."""
        out: dict[str, tuple[int, ...]] = {}
        for unit in self.units:
            for ref in unit.hf:
                out[ref.name] = ref.shape if ref.part is None else (ref.parts, *ref.shape)
        return out


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its architectures and a function that lists the units of a config."""

    name: str
    architectures: tuple[str, ...]
    list_units: Callable[[Config, Callable[[str], bool]], Iterable[Unit]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    carried_prefixes: tuple[str, ...] = ()

    def plan(self, cfg: Mapping[str, Any], hf_names: Collection[str] | None = None, vocab_multiple: int = 1) -> Plan:
        """The units of ``cfg``.

        Args:
            cfg: the parsed ``config.json``.
            hf_names: tensors of the checkpoint, or a mapping from name to file, for the messages. Optional units (MTP layers,
                FP8 scales) are in if it holds them; without names they are out, and no name is checked.
            vocab_multiple: Megatron pads the vocabulary to a multiple of it.

        Raises:
            WeightError: a name that no unit describes, or a described name that is missing.
            ConfigMismatch: fields of the config that contradict each other, or are not there.
        """
        names = frozenset(hf_names or ())
        config = Config(cfg, self.defaults)
        units = []
        for unit in self.list_units(config, names.__contains__):
            if unit.place in ("embedding", "head") and unit.split == "column":
                rows = -(-unit.hf[0].shape[0] // vocab_multiple) * vocab_multiple
                unit = dataclasses.replace(unit, pad_rows=rows)
            units.append(unit)
        carried = tuple(n for n in sorted(names) if n.startswith(self.carried_prefixes) or n.endswith(COMPUTED))
        plan = Plan(self.name, tuple(units), carried, None if hf_names is None else names)
        if hf_names is not None:
            needed = set(plan.hf_tensors())
            known = needed | set(carried) | {a for u in units for a in u.hf_alias}
            _check_names(f"the {self.name} checkpoint", hf_names, needed, known)
        return plan


def _check_names(what: str, found: Collection[str], needed: set[str], known: set[str]) -> None:
    """``found`` may be a mapping from name to file; then the file is part of the message."""
    files = found if isinstance(found, Mapping) else {}
    missing = sorted(needed - set(found))
    unknown = [f"{n} (in {files[n]})" if n in files else n for n in sorted(set(found) - known)]
    lines = []
    for title, names in (("missing", missing), ("unknown", unknown)):
        if names:
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            lines.append(f"  {len(names)} {title}: {shown}")
    if lines:
        raise WeightError(
            f"{what} does not hold the tensors its config describes:\n" + "\n".join(lines)
            + "\nEither the config belongs to another checkpoint, or files are missing."
        )
