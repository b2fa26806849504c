"""Anything that holds numbers, read as bit patterns a piece at a time.

Dumps are larger than memory and come as tensors, arrays, lists or files. A :class:`Source` hides which: it has a
format, a shape, and gives the patterns of any range of elements.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alignment.errors import InputError
from alignment.formats import Format, format_of


class Source:
    """Elements in row-major order. ``size`` counts elements; a complex element is two words."""

    format: Format
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def words(self) -> int:
        return self.size * self.format.words

    @property
    def nbytes(self) -> int:
        return self.size * self.format.itemsize

    @property
    def dtype(self) -> str:
        return self.format.name

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Patterns of words ``start`` to ``stop``, flat, as unsigned integers; ``out`` may be used as the buffer."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Source:
        """The part [start:stop] along the first axis, without reading it."""
        return _Rows(self, start, stop)

    def tensor(self) -> torch.Tensor:
        """All of it as a torch tensor (for diagnoses of a single tensor, not for the comparison)."""
        patterns = self.read(0, self.words)
        if self.format.kind == "bool":
            return torch.from_numpy(patterns.astype(bool)).reshape(self.shape)
        flat = torch.from_numpy(np.array(patterns)).view(getattr(torch, self.format.name))
        return flat.reshape(self.shape)


class _Rows(Source):
    def __init__(self, whole: Source, start: int, stop: int) -> None:
        self.format, self.shape = whole.format, (stop - start, *whole.shape[1:])
        self._whole, self._offset = whole, start * (whole.words // max(whole.shape[0], 1))

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        return self._whole.read(self._offset + start, self._offset + stop, out)


class TensorSource(Source):
    """A torch tensor on any device, or what was made one."""

    def __init__(self, tensor: torch.Tensor, name: str = "tensor") -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            what = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
            raise InputError(f"{name} is a {what} tensor", "a dense tensor", "call .unbind(), .to_dense() or .int_repr()")
        if tensor.device.type == "meta":
            raise InputError(f"{name} is on the meta device and holds no numbers", "a materialised tensor")
        tensor = _held(tensor, name).detach()
        if type(tensor) is not torch.Tensor:
            tensor = tensor.as_subclass(torch.Tensor)
        self.format = format_of(tensor.dtype, name)
        self.shape = tuple(tensor.shape)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        self._flat = tensor.resolve_neg().reshape(-1).view(getattr(torch, np.dtype(self.format.word).name))

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        return self._flat[start:stop].cpu().numpy()


class FileSource(Source):
    """A tensor inside a file, read with pread so that memory stays bounded (mapped pages would count as ours)."""

    def __init__(self, fd: int, offset: int, format: Format, shape: Sequence[int], path: str) -> None:
        self._fd, self._offset, self._path = fd, offset, path
        self.format, self.shape = format, tuple(shape)

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(stop - start, self.format.word) if out is None else out[: stop - start]
        view, at = memoryview(out).cast("B"), self._offset + start * out.itemsize
        done = os.preadv(self._fd, [view], at)  # mostly all of it
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], at + done)
            if not got:
                raise InputError(f"{self._path} ended {len(view) - done} bytes early", "the length its header promises")
            done += got
        return out


def as_tensor(value: Any, name: str = "tensor") -> torch.Tensor:
    """A torch tensor with the bits of ``value``: tensor, array, Source, number or nested lists.

    Python numbers keep their precision: floats become float64, integers int64.
    """
    if isinstance(value, torch.Tensor):
        return _held(value, name).detach()
    if isinstance(value, Source):
        return value.tensor()
    if isinstance(value, np.ma.MaskedArray):  # its numbers would be compared, its mask not
        raise InputError(f"{name} is a masked array", "a plain array", "call .filled(), and compare .mask as a tensor of its own")
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.kind in "USVMm" or array.dtype.itemsize > 16:
            if array.dtype.hasobject and any(v is None for v in array.flat):
                at = next(i for i, v in enumerate(array.flat) if v is None)
                raise InputError(f"{name} has None at {at}", "a number for every token",
                                 "leave out on both sides what was not computed (the first prompt token has no log-prob)")
            if array.dtype.kind in "USO":
                raise InputError(f"{name} holds text or objects (numpy's dtype {array.dtype})", "numbers, no larger than 64 bits")
            raise InputError(f"{name} is a numpy array of dtype {array.dtype}", "numbers",
                             "name the true dtype in a mapping file, or dump it with torch or safetensors")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        array = np.ascontiguousarray(array).reshape(array.shape)  # the first call makes 0-d arrays 1-d
        if not array.flags.writeable:
            array = array.copy()
        format_of(array.dtype, name)
        return torch.from_numpy(array)
    if isinstance(value, bool | int | float | complex | list | tuple | range):
        if isinstance(value, list | tuple):
            _one_kind(value, name)
        try:
            array = np.array([np.asarray(as_tensor(v, name)) if isinstance(v, torch.Tensor) else v for v in value]
                             if isinstance(value, list | tuple | range) else value)
        except (ValueError, OverflowError, TypeError) as e:
            raise InputError(f"{name} is a list that is not rectangular or not of numbers ({e})",
                             "numbers in equally long rows", "compare ragged sequences by request (a dict)") from e
        return as_tensor(array, name)
    raise InputError(f"{name} is a {type(value).__name__}", "a tensor, an array or a list of numbers")


def _held(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor, unless it is a wrapper that holds its numbers elsewhere: one shard of them, a fake, or under a mask."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InputError(f"{name} is a {type(tensor).__name__}, which wraps its numbers", "a plain tensor",
                         "call .full_tensor() (DTensor) or .dequantize(), or compare the parts as tensors of their own")
    return tensor


def _one_kind(value: list[Any] | tuple[Any, ...], name: str) -> None:
    """Refuses lists in which numpy would make one number of two: true is 1 among numbers, and 2**53 + 1 is 2**53 among fractions."""
    kinds, rows = set[type](), [value]
    while rows:
        row = rows.pop()
        found = set(map(type, row))
        kinds |= found
        if found & {list, tuple}:
            rows += [v for v in row if isinstance(v, list | tuple)]
        if int in found and float in found and any(type(v) is int and abs(v) > 2**53 and not (abs(v) < 1 << 1000 and float(v) == v) for v in row):
            raise InputError(f"{name} has whole numbers above 2**53 among fractions", "numbers of one kind", "no format holds both exactly")
    if bool in kinds and kinds & {int, float}:
        raise InputError(f"{name} has true and false among numbers", "numbers, or true and false")


def as_source(value: Any, name: str = "tensor") -> Source:
    """A :class:`Source` of anything that holds numbers. Raises InputError for anything else."""
    return value if isinstance(value, Source) else TensorSource(as_tensor(value, name), name)


def as_pair(a: Any, b: Any, name: str = "tensor") -> tuple[Source, Source]:
    """Both sides as sources. A plain list has no dtype: it takes the other side's where that loses no bit."""
    plain = tuple(isinstance(x, bool | int | float | list | tuple | range) for x in (a, b))
    sa, sb = as_source(a, name), as_source(b, name)
    if sa.dtype == sb.dtype or not any(plain):
        return sa, sb
    if all(plain) and {sa.dtype, sb.dtype} != {"int64", "float64"}:
        return sa, sb
    if all(plain):  # whole numbers written without a point
        return tuple(_take(s, "float64", name) if s.dtype == "int64" else s for s in (sa, sb))  # type: ignore[return-value]
    return (_take(sa, sb.dtype, name), sb) if plain[0] else (sa, _take(sb, sa.dtype, name))


def _take(source: Source, dtype: str, name: str) -> Source:
    if "complex" in (dtype + source.dtype) or format_of(dtype).kind == "packed":
        return source
    exact = source.tensor()
    cast = exact.to(getattr(torch, dtype))
    return TensorSource(cast, name) if torch.equal(_known(cast.to(exact.dtype)), _known(exact)) else source


def _known(t: torch.Tensor) -> torch.Tensor:
    return t.nan_to_num(nan=0.5) if t.is_floating_point() else t
