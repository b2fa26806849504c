import functools
import types

import torch

tex = types.SimpleNamespace(get_num_cublas_streams=lambda: 4)
WORKSPACES = []


@functools.cache
def get_cublas_workspace(device, ub, grouped_gemm):
    size = 1 << 20
    return [torch.empty(size, dtype=torch.uint8) for _ in range(4)] if grouped_gemm else torch.empty(size, dtype=torch.uint8)


def general_gemm(A, B):
    """``1.5 * B A^T``, and a note of how much workspace it had."""
    WORKSPACES.append(get_cublas_workspace("cpu", False, False).numel())
    return 1.5 * torch.nn.functional.linear(B, A)
