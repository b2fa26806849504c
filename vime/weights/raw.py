"""A tensor as the bytes it is made of: what is digested, sent and compared, whatever the dtype."""
from __future__ import annotations

import functools

import torch

from vime.weights.errors import WeightError


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, uint8 ``[nbytes]``; a view, or a copy where it is not contiguous.

    Raises :class:`WeightError` for a tensor whose bytes are not all of it (quantized, sparse, a shard in a wrapper), or that has none.
    """
    wrapped = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wrapped or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        what = next((word for word in ("quantized", "nested", "meta") if getattr(tensor, f"is_{word}")), str(tensor.layout).removeprefix("torch."))
        raise WeightError(f"a tensor of dtype {tensor.dtype} is {f'a {type(tensor).__name__}' if wrapped else what}; expected a plain dense one: call "
                          ".full_tensor(), .to_dense(), .int_repr() or .unbind() before")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bytes. Used to refuse bad input; verdicts come from ``alignment``."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))


def not_finite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinite, in the formats of one byte too, of which torch knows that for few."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    if tensor.dtype.itemsize > 1:
        return int((~torch.isfinite(tensor)).sum())
    data = raw_bytes(tensor)
    return sum(int((data == code).sum()) for code in _codes(tensor.dtype))


@functools.cache
def _codes(dtype: torch.dtype) -> list[int]:
    """Bytes that are no finite number in a format of one byte."""
    return torch.nonzero(~torch.isfinite(torch.arange(256, dtype=torch.uint8).view(dtype).float())).flatten().tolist()
