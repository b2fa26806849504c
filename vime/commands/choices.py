"""What an option of the command line may be: the words that are typed, and what they are passed on as."""
from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Transport(StrEnum):
    disk = "disk"
    ipc = "ipc"
    nccl = "nccl"


class Tier(StrEnum):
    exact = "exact"
    close = "1e-6"


class CacheDtype(StrEnum):
    auto = "auto"
    fp8_e4m3 = "fp8_e4m3"


class Fp8(StrEnum):
    off = "off"
    blockwise = "blockwise"


class ToHf(StrEnum):
    raw = "raw"
    bridge = "bridge"


class Reward(StrEnum):
    math = "math"
    gate = "gate"


class Backend(StrEnum):
    auto = "auto"
    flash_attn = "flash_attn"
    flashinfer = "flashinfer"


class OptimizerKind(StrEnum):
    adam = "adam"
    sgd = "sgd"


class Impl(StrEnum):
    local = "local"
    transformer_engine = "transformer_engine"


class Arrival(StrEnum):
    given = "given"
    reversed = "reversed"
    shuffled = "shuffled"
