"""Likely causes of a difference. A diagnosis explains a verdict; it never changes one.

Every diagnosis rests on a residual: what it leaves unexplained must be zero bits, or within the rounding of the
formats involved. An explanation that leaves more is not given, and degenerate data (constant, too short, ambiguous)
give none either: a wrong explanation costs more time than a missing one.

    tensor(a, b)                       any two tensors of one meaning
    logprobs(a, b, logits, tokens)     log-probabilities: temperature, truncated softmax, lag
    norm(x, a, b)                      a normalisation with equal input: epsilon
    rotary(x, a, b, ...), tables(...)  rotary embedding: layout, frequency, laundered table
    topk(ids_a, ids_b, scores)         a selection: tie, rounded scores, order of slots
    projection(x, w, a, b)             a linear layer with equal input: transposed weight
    qkv(a, b), experts(a, b)           layout of fused weights; content of experts
    scale(a, b), applied(a, b, scales) scales of quantised tensors: left at one, inverted, rounded
    activation(x, a, b), residual(...) another activation; a residual left out or added twice
    nonfinite(tensors)                 where a NaN comes from
"""
from alignment.diagnose.activations import activation, residual
from alignment.diagnose.cuts import vocabularies
from alignment.diagnose.distributions import logprobs
from alignment.diagnose.modules import argmax, nonfinite, norm, projection, topk
from alignment.diagnose.numbers import rounded_through, rounding_modes
from alignment.diagnose.rotary import rerotated, rotary, tables
from alignment.diagnose.scales import applied, scale
from alignment.diagnose.structure import experts, lag_of_rows, padded, qkv, qkv_order, row_map
from alignment.diagnose.tensors import LARGEST, tensor
from alignment.diagnose.vectors import exchanged_rows, norm_weight

__all__ = [
    "LARGEST", "activation", "applied", "argmax",
    "exchanged_rows", "experts", "lag_of_rows", "logprobs", "nonfinite", "norm", "norm_weight", "padded", "projection", "qkv", "qkv_order", "rerotated", "residual", "rotary",
    "rounded_through", "rounding_modes", "row_map", "scale", "tables", "tensor", "topk", "vocabularies",
]  # fmt: skip
