"""A stand-in for TransformerEngine 2.11.0, so that Megatron's own wrappers can be built and routed on a CPU.

It has the names, constructor arguments, attributes and parameter names that Megatron-core 0.19.2 and vime touch, written
down from reading 2.11.0, and plain torch arithmetic on purpose far from right (everything is scaled), so that a module
that is not routed can't agree with one that is. It proves nothing about TransformerEngine: ``tests/cuda/test_te.py`` does.
"""
__version__ = "2.11.0"

from . import common, pytorch

__all__ = ["common", "pytorch"]
