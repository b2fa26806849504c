"""What a model needs proven before it runs, and what of it trainer and engine must have in common.

Asked for when a side builds its contract, so that a chip, a shape or a switch that nobody has proven is refused at the
start, with what was found, and not met in the middle of a run.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import torch

from vime.ops import registry
from vime.ops.cuda import environment, gemm, proof_attention, proven
from vime.ops.cuda.proof import Sweep
from vime.ops.cuda.shapes import ModelShape
from vime.ops.prove_types import CaseResult
from vime.ops.registry import UnsupportedOp


@dataclasses.dataclass(frozen=True)
class Needs:
    """Shapes of a model that decide kernels.

    Attributes:
        dtype: of the model.
        linears: (N, K) of the linear layers that both sides have in this form.
        apart: (N, K) of those that a side has in a form of its own (an LM head whose vocabulary the engine pads, fused projections
            of latent attention, experts): proven too, and no part of the contract.
        attention: (heads, groups, head dim) of every kind of attention layer.
        training: whether a backward runs as well.
    """

    dtype: torch.dtype
    linears: frozenset[tuple[int, int]]
    apart: frozenset[tuple[int, int]] = frozenset()
    attention: frozenset[tuple[int, int, int]] = frozenset()
    training: bool = False


def require(needs: Needs, device: torch.device) -> dict[str, str]:
    """Prove what is not proven yet; returns the parameters of the contract that say by what it runs.

    Raises:
        UnsupportedOp: a shape for which no kernel here is invariant, with the rows that differed; or a switch that leads to kernels
            that were never looked at.
        vime.ops.cuda.proven.ProofRefused: it is not proven, and ``VIME_PROOFS`` allows no proof now.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    now = environment.current(index)
    if now["switches"] != "none":
        shape = next(iter(sorted(needs.linears | needs.apart)), None)
        raise UnsupportedOp("linear", device, needs.dtype, shape, f"{now['switches']} leads to kernels that were never proven here; unset it "
                            "(and set CUBLASLT_WORKSPACE_SIZE=0 CUBLAS_WORKSPACE_CONFIG=:16:8), or exclude linear on both sides.")
    kernels: dict[str, str] = {}
    for n, k in sorted(needs.linears):
        kernels[f"{n}x{k}"] = _linear(n, k, needs, device)
    for n, k in sorted(needs.apart - needs.linears):
        _linear(n, k, needs, device)
    for kind in sorted(needs.attention):
        for backward in (False, True)[: 2 if needs.training else 1]:
            _attention(kind, needs.dtype, device, index, backward)
    return {f"proof.{name}": now[name] for name in environment.SHARED if name in now} | {f"proof.linear.{size}": kernel for size, kernel in kernels.items()}


def _linear(n: int, k: int, needs: Needs, device: torch.device) -> str:
    weight_NK = torch.empty(1, dtype=needs.dtype, device=device).expand(n, k)  # a shape; the proof draws numbers of its own
    if needs.training:
        gemm.route(weight_NK, forward=False)
    return gemm.route(weight_NK).kernel


def attention_key(shape: tuple[int, int, int], dtype: torch.dtype, backward: bool) -> str:
    """What a proof of one attention shape is called on disk; one kernel's is none of another's. By the kernel that runs here, and
    not by the variable that chose it when the kernels were loaded."""
    heads, groups, dim = shape
    chosen = registry.implementation("attention", "cuda", dtype).rpartition("/")[2].partition("-")[0]  # cuda/attention/fa3-split1@1
    kernel = "attention" if chosen == "fa3" else f"attention by {chosen}"
    return f"{kernel} {'bwd' if backward else 'fwd'} {heads}/{groups}x{dim} {str(dtype)[6:]}"


def _attention(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, index: int, backward: bool) -> None:
    proofs, key = proven.store(index), attention_key(shape, dtype, backward)
    entry = proofs.get(key)
    if entry is not None and entry.get("differing_rows") == 0 and entry.get("rows_compared", 0) > 0:
        return
    heads, groups, dim = shape
    model = ModelShape("at start", groups * dim, heads, groups, dim, groups * dim, groups * dim)
    with torch.random.fork_rng([index]), torch.cuda.device(index), torch.no_grad():
        torch.manual_seed(20253)
        sweep = Sweep(model, dtype, quick=True)
        results = list(proof_attention.attention_backward(sweep, True) if backward else proof_attention.attention(sweep, True))
    proofs.put(key, {"rows_compared": sum(r.rows_compared for r in results), "differing_rows": sum(r.differing_rows for r in results),
                     "sweep": "start"})
    bad = next((r for r in results if r.differing_rows), None)
    if bad is not None:
        raise UnsupportedOp("attention", device, dtype, shape, f"{bad.differing_rows} of {bad.rows_compared} rows differ in {bad.shape}, the first "
                            f"at {bad.first_bad}. Run `vime prove --device cuda --ops attention` for the sweep, or exclude attention on both "
                            "sides.")


def keep(cases: Iterable[CaseResult], dtype: torch.dtype, shape: ModelShape, quick: bool) -> None:
    """Keep what a sweep of ``vime prove`` found for a model: it covers more than the proofs at the start do."""
    cases = list(cases)
    results = [case for case in cases if case.op == "attention"]
    proofs, kind = proven.store(torch.cuda.current_device()), (shape.heads, shape.groups, shape.head_dim)
    for backward in (False, True):
        group = [case for case in results if (case.function == "attention_backward") == backward]
        if group:
            proofs.put(attention_key(kind, dtype, backward), {"rows_compared": sum(case.rows_compared for case in group), "differing_rows":
                                                              sum(case.differing_rows for case in group), "sweep": "quick" if quick else "full"})
    for case in cases:
        found = re.search(r" N=(\d+) K=(\d+)$", case.shape) if case.op == "linear" else None
        if found is not None:
            key = gemm.proof_key(int(found[1]), int(found[2]), dtype, case.function == "linear")
            swept = {"swept_rows": case.rows_compared, "sweep": "quick" if quick else "full"}
            bad = {"refused": f"{case.differing_rows} of {case.rows_compared} rows to differ, the first at {case.first_bad}"}
            kept = {name: value for name, value in (proofs.entries.get(key) or {}).items() if name != "refused"}
            proofs.put(key, kept | swept | (bad if case.differing_rows else {}))
