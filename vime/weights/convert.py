"""The last part of the way out: full Megatron tensors -> HF pieces -> whole HF tensors, streaming. And the whole way in."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from vime.weights.errors import WeightError
from vime.weights.families.base import Plan
from vime.weights.families.units import Unit, read_pieces
from vime.weights.gather import Gatherer
from vime.weights.ledger import Key, Tap


class AsMegatron(Mapping[str, torch.Tensor]):
    """HF tensors as Megatron's, whole, each converted when it is asked for and not kept."""

    def __init__(self, units: Mapping[str, Unit], hf_state: Mapping[str, torch.Tensor]):
        self._units, self._hf_state = units, hf_state

    def __getitem__(self, name: str) -> torch.Tensor:
        unit = self._units[name]
        return unit.to_megatron(read_pieces(unit, self._hf_state))

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)


def to_pieces(items: Iterable[tuple[Unit, torch.Tensor]], plan: Plan, tap: Tap | None = None) -> Iterator[tuple[Key, torch.Tensor]]:
    """HF pieces of each unit. A tied tensor comes out under every name that the source checkpoint used."""
    names = plan.hf_names or frozenset()
    for unit, full in items:
        pieces = unit.to_hf(full)
        batch = {Key(ref.name, ref.part): piece for ref, piece in zip(unit.hf, pieces, strict=True)}
        batch |= {Key(alias): pieces[0] for alias in unit.hf_alias if alias in names}
        yield from (batch if tap is None else tap("converted", batch)).items()


class Stacker:
    """Whole HF tensors, each as soon as its last slice is there. Memory: the stacked tensors of one layer."""

    def __init__(self, plan: Plan, tap: Tap | None = None):
        self._shapes, self._tap = plan.hf_tensors(), tap
        self._open: dict[str, tuple[torch.Tensor, set[int]]] = {}
        self._done: set[str] = set()

    def add(self, key: Key, piece: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Take one piece; give the tensors that are complete with it. Raises :class:`WeightError` for a slice that the tensor does
        not have, that came before, or whose dtype or shape is not that of the others."""
        whole = piece
        if key.part is not None:
            if key.name not in self._open:
                if key.name not in self._shapes or key.name in self._done:
                    raise WeightError(f"{key.name}: expert {key.part} " + ("arrived once more" if key.name in self._done else
                                                                           "arrived, and the model has no tensor of that name"))
                self._open[key.name] = (piece.new_empty(self._shapes[key.name]), set())
            whole, seen = self._open[key.name]
            # an assignment would convert the one and repeat the other
            if not 0 <= key.part < whole.shape[0] or key.part in seen:
                raise WeightError(f"{key.name}: expert {key.part} " + ("arrived twice" if key.part in seen else f"of {whole.shape[0]} arrived"))
            if piece.dtype != whole.dtype or piece.shape != whole.shape[1:]:
                raise WeightError(f"{key.name}: expert {key.part} arrived as {piece.dtype} {list(piece.shape)}, expected {whole.dtype} "
                                  f"{list(whole.shape[1:])} as the experts before it")
            whole[key.part] = piece
            seen.add(key.part)
            if len(seen) < whole.shape[0]:
                return
            del self._open[key.name]
            self._done.add(key.name)
        batch = {Key(key.name): whole}
        for done, tensor in (batch if self._tap is None else self._tap("stacked", batch)).items():
            yield done.name, tensor

    def finish(self) -> None:
        """Raise :class:`WeightError` if a stacked tensor is still waiting for slices."""
        for name, (whole, seen) in self._open.items():
            lost = sorted(set(range(whole.shape[0])) - seen)
            raise WeightError(f"{name}: {len(lost)} of {whole.shape[0]} experts never arrived, {lost[0]} the first")


def export(gatherer: Gatherer, tap: Tap | None = None,
           items: Iterable[tuple[Unit, torch.Tensor]] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """``(HF name, whole tensor)`` of a sharded model, on every rank that iterates. All ranks must iterate to the end.

    ``items``: what the gatherer gives, where somebody watches it on its way (:class:`vime.weights.online.Proof`).
    """
    stacker = Stacker(gatherer.plan, tap)
    for key, piece in to_pieces(gatherer if items is None else items, gatherer.plan, tap):
        yield from stacker.add(key, piece)
    stacker.finish()
