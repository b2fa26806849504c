"""Values that must not be there, looked for where a CUDA graph may be recording."""
from __future__ import annotations

from collections.abc import Callable

import torch


def refuse(bad: torch.Tensor, error: Callable[[], Exception], what: str) -> None:
    """Raise ``error()`` if ``bad`` (one bool) is true.

    The host waits for the device to know. Inside a capture it must not, so what is captured is a device-side assertion, which
    ends a replay with an error of CUDA's; ``what`` is in its text.
    """
    if bad.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(~bad, what)
    elif bad:
        raise error()
