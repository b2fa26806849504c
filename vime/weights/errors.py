"""What can be wrong with weights, for a person to read."""
from __future__ import annotations


class WeightError(ValueError):
    """A tensor, a name or a file that is not what it has to be. The message names all three."""


class UnknownArchitecture(WeightError):
    """No family covers this config."""


class ConfigMismatch(WeightError):
    """The config and the tensors, or the config and the topology, contradict each other."""
