"""What a weight update announces: every tensor by name, dtype, shape and digest of its bytes.

An update is applied only if what arrived is what was announced, no tensor more and no tensor less, and it counts as done
only if what the engine then holds has the announced digests. So a manifest is the one description that sender, transport
and engine compare against; a tensor that changed dtype or lost a row on the way has another digest.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch
import xxhash

from vime.errors import VimeError
from vime.weights.errors import WeightError
from vime.weights.raw import not_finite, raw_bytes


class ManifestError(VimeError):
    """A manifest that cannot be read, or tensors that do not match one."""


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor. ``dtype`` like ``"bfloat16"``; ``digest`` 32 hex digits of its contiguous bytes (xxh3-128)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0:
            raise ManifestError(f"{self.name} has shape {list(self.shape)}; expected sizes of 0 or more")


class Manifest(msgspec.Struct, kw_only=True):
    """All tensors of one update, under Hugging Face names, in the order they were sent."""

    version: int
    tensors: list[TensorInfo]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for info in self.tensors:
            if info.name in seen:
                raise ManifestError(f"version {self.version} announces {info.name} twice")
            seen.add(info.name)

    def by_name(self) -> dict[str, TensorInfo]:
        return {info.name: info for info in self.tensors}

    def digest(self) -> str:
        """One digest over all tensors, whatever their order."""
        # a name with a line break in it must not pass for two rows
        rows = sorted(f"{t.name.encode('unicode_escape').decode()} {t.dtype} {list(t.shape)} {t.digest}" for t in self.tensors)
        return xxhash.xxh3_128_hexdigest("\n".join(rows).encode())

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Manifest:
        """Raises ManifestError on a document of another form."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ManifestError(f"not a weight manifest: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_from(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`. Raises ManifestError on a name that is no torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"{name!r} is not a dtype; expected a torch dtype such as float32 or bfloat16")
    return dtype


def digest_of(tensor: torch.Tensor) -> str:
    """32 hex digits over the bytes of ``tensor``; -0 and +0, and any two NaN payloads, differ."""
    flat = raw_bytes(tensor)
    return in_pieces(flat) if flat.is_cuda and flat.numel() else xxhash.xxh3_128_hexdigest(flat.cpu().numpy().data)


def in_pieces(flat: torch.Tensor, piece: int = 64 << 20) -> str:
    """The digest of bytes, through two pieces of pinned memory that are used again: one is copied while the other is hashed.

    Fresh memory for a whole copy of a large model costs more than the copy.
    """
    state, pieces = xxhash.xxh3_128(), flat.split(piece)
    room = [torch.empty(min(piece, flat.numel()), dtype=torch.uint8, pin_memory=flat.is_cuda) for _ in pieces[:2]]

    def copy(i: int) -> torch.cuda.Event | None:
        room[i % 2][:pieces[i].numel()].copy_(pieces[i], non_blocking=True)
        if not flat.is_cuda:
            return None
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(flat.device))
        return done

    under_way = copy(0)
    for i, part in enumerate(pieces):
        done, under_way = under_way, copy(i + 1) if i + 1 < len(pieces) else None
        if done is not None:
            done.synchronize()
        state.update(room[i % 2][:part.numel()].numpy().data)
    return state.hexdigest()


def describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    """The manifest entry of ``tensor``. Raises ManifestError for one that is not plain and dense."""
    try:
        digest = digest_of(tensor)
    except WeightError as error:
        raise ManifestError(f"{name}: {error}") from error
    return TensorInfo(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), digest=digest)


def manifest_of(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Manifest:
    """The manifest of a set of tensors."""
    return Manifest(version=version, tensors=[describe(name, tensor) for name, tensor in tensors])


def mismatch(announced: TensorInfo, found: TensorInfo) -> str | None:
    """How ``found`` differs from ``announced``, or None."""
    for field in ("dtype", "shape", "digest"):
        a, b = getattr(announced, field), getattr(found, field)
        if a != b:
            return f"{announced.name}: {field} {b} instead of {a}"
    return None


def arrival_problems(manifest: Manifest, received: Mapping[str, torch.Tensor], found: Mapping[str, TensorInfo] | None = None) -> list[str]:
    """What is wrong with ``received`` as an arrival of ``manifest``: names, dtypes, shapes, digests, finiteness.

    ``found``: entries of what was received, where they are known already. An empty list means that every announced tensor is
    there, byte for byte, and finite; of a tensor without storage (``meta``) whoever let it go must have looked for that.
    """
    found = {name: describe(name, tensor) for name, tensor in received.items()} if found is None else found
    announced = manifest.by_name()
    problems = [f"{name}: announced but not received" for name in announced if name not in received]
    problems += [f"{name}: received but not announced" for name in received if name not in announced]
    for name, info in announced.items():
        if name not in received:
            continue
        tensor = received[name]
        problem = mismatch(info, found[name])
        if problem is not None:
            problems.append(problem)
        elif not tensor.is_meta and (bad := not_finite(tensor)):
            problems.append(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite")
    return problems


def first_problems(what: str, problems: list[str], limit: int = 6) -> str:
    """A message of one screen for a list of problems."""
    more = f"\n  ... and {len(problems) - limit} more" if len(problems) > limit else ""
    return f"{what}, {len(problems)} problem(s):\n  " + "\n  ".join(problems[:limit]) + more
