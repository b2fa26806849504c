"""Proofs on disk: used in the environment they were made in, and never in another; what a side refuses at its start."""
from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vime import ops
from vime.ops import registry
from vime.ops.cuda import attention, attention_flashinfer, environment, gemm, needs, proven
from vime.ops.prove_types import CaseResult
from vime.ops.registry import UnsupportedOp

HERE = {"chip": "NVIDIA H200, compute 9.0, 132 multiprocessors", "driver": "580.1", "torch": "2.11.0", "cuda": "13.0", "triton": "3.6",
        "cublas": "13.0.2", "cublaslt": "130002", "fa3": "1 bytes, ab", "kernels": "cd", "switches": "none"}
ENTRY = {"kernel": "cublas", "differing_rows": {"cublas": 0}, "rows": [1, 2], "largest": 2048}
TILES_FOR_FEW = gemm._tiles_for_few


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("VIME_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("VIME_PROOFS", raising=False)
    monkeypatch.setattr(proven, "_stores", {})
    monkeypatch.setattr(gemm, "_routes", {})
    monkeypatch.setattr(gemm, "_tiles_for_few", lambda *_: gemm.Route.few)  # they are Triton's, which no CPU runs


def store(lines: list[str] | None = None, **changed: str) -> proven.Store:
    return proven.Store(HERE | changed, say=(lines if lines is not None else []).append)


def test_kept_and_found_again():
    store().put("linear fwd 960x576 bfloat16", ENTRY)
    lines: list[str] = []
    assert store(lines).get("linear fwd 960x576 bfloat16") == ENTRY and lines == []
    assert store().get("linear bwd 960x576 bfloat16") is None


@pytest.mark.parametrize("field", HERE)
def test_a_change_of_anything_is_named_and_nothing_is_used(field):
    store().put("a", ENTRY)
    lines: list[str] = []
    assert store(lines, **{field: "other"}).get("a") is None
    assert len(lines) == 1 and f"{field} was {HERE[field]} and is other" in lines[0] and "proven anew" in lines[0]
    assert store().get("a") == ENTRY, "the old proofs stay for the old environment"


def test_require_refuses_with_what_changed(monkeypatch):
    store().put("a", ENTRY)
    monkeypatch.setenv("VIME_PROOFS", "require")
    assert store().get("a") == ENTRY
    with pytest.raises(proven.ProofRefused, match=r"b is not proven .*1 other proof.*vime prove --device cuda"):
        store().get("b")
    with pytest.raises(proven.ProofRefused, match=r"a is not proven .*cublas was 13.0.2 and is 13.1.0"):
        store(cublas="13.1.0").get("a")


def test_off_reads_and_writes_nothing(monkeypatch, tmp_path):
    store().put("a", ENTRY)
    monkeypatch.setenv("VIME_PROOFS", "off")
    quiet = store()
    assert quiet.get("a") is None
    quiet.put("b", ENTRY)
    assert quiet.get("b") == ENTRY and "b" not in json.loads(quiet.path.read_text())["entries"]
    monkeypatch.setenv("VIME_PROOFS", "sometimes")
    with pytest.raises(proven.ProofRefused, match="VIME_PROOFS is 'sometimes'"):
        store()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_set_aside_and_never_believed(at, byte, cut):
    first = store()
    first.put("a", ENTRY)
    whole = first.path.read_bytes()
    at %= len(whole)
    damaged = whole[:at] if cut else whole[:at] + bytes([byte]) + whole[at + 1:]
    first.path.write_bytes(damaged)
    lines: list[str] = []
    again = store(lines)
    try:
        same = json.loads(damaged) == json.loads(whole)
    except ValueError:
        same = False
    assert again.get("a") == (ENTRY if same else None)
    if not same:
        assert "is not used" in lines[0] and "proven anew" in lines[0] and again.path.with_suffix(".unusable").exists()
        again.put("a", ENTRY)
        assert store().get("a") == ENTRY


def _add(number: int) -> None:
    for i in range(5):
        proven.Store(HERE, say=lambda line: None).put(f"{number}.{i}", ENTRY)


def test_processes_keep_each_others_proofs():
    workers = [multiprocessing.get_context("fork").Process(target=_add, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert set(store().entries) == {f"{n}.{i}" for n in range(3) for i in range(5)}
    assert not [p for p in store().folder.iterdir() if p.name.startswith(".proofs-")]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "proofs").write_text("a file in the way")
    lines: list[str] = []
    kept = store(lines)
    kept.put("a", ENTRY)
    assert kept.get("a") == ENTRY and "VIME_CACHE_DIR" in lines[-1]


@pytest.fixture
def device(monkeypatch):
    """A stand-in for the device: which shapes cuBLAS and Triton are invariant on, and what was proven so far."""
    now, asked, bad = dict(HERE), [], {}

    def differing_rows(kernel, weight_NK, forward, counts, largest):
        asked.append((kernel, tuple(weight_NK.shape), forward))
        return bad.get((kernel, tuple(weight_NK.shape)), 0)

    monkeypatch.setattr(environment, "current", lambda index=0: dict(now))
    monkeypatch.setattr(gemm, "differing_rows", differing_rows)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def run(*args, **kwargs):
        return needs.require(needs.Needs(torch.bfloat16, *map(frozenset, args), **kwargs), torch.device("cpu", 0))

    return dataclasses.make_dataclass("Device", ["now", "asked", "bad", "run"])(now, asked, bad, run)


def again(monkeypatch):
    """As a new process would begin."""
    monkeypatch.setattr(gemm, "_routes", {})
    monkeypatch.setattr(proven, "_stores", {})


def test_a_start_proves_once_and_the_next_one_reads(device, monkeypatch):
    shapes = {(960, 576), (576, 1536)}
    device.bad["cublas", (576, 1536)] = 3
    said = device.run(shapes, {(49152, 576)}, training=True)
    assert said["proof.linear.960x576"] == "cublas" and said["proof.linear.576x1536"] == "triton" and "proof.linear.49152x576" not in said
    assert {name.removeprefix("proof.") for name in said if "linear" not in name} == set(environment.SHARED) - {"flashinfer"}
    assert len(device.asked) == 2 * (1 + 2 + 1), "forward and backward, and the second route where the first one fails"
    device.asked.clear()
    again(monkeypatch)
    assert device.run(shapes, {(49152, 576)}, training=True) == said and device.asked == []
    device.now["triton"] = "3.7"
    again(monkeypatch)
    other = device.run(shapes, set())
    assert device.asked and other != said and other["proof.triton"] == "3.7"


def test_a_shape_without_an_invariant_kernel_is_refused_at_the_start(device):
    device.bad |= {("cublas", (960, 576)): 3, ("triton", (960, 576)): 1}
    with pytest.raises(UnsupportedOp, match=r"linear on cpu.*shape \(960, 576\).*'cublas': 3, 'triton': 1.*vime prove"):
        device.run({(960, 576)})


def test_a_switch_to_unknown_kernels_is_refused(device):
    device.now["switches"] = "NVIDIA_TF32_OVERRIDE=1"
    with pytest.raises(UnsupportedOp, match=r"shape \(960, 576\).*NVIDIA_TF32_OVERRIDE=1 leads to kernels that were never proven here; unset it"):
        device.run({(960, 576)})


def test_an_entry_that_names_an_unknown_kernel_is_proven_anew(device):
    proven.store().put(gemm.proof_key(960, 576, torch.bfloat16, True), ENTRY | {"kernel": "somebody's"})
    assert device.run({(960, 576)})["proof.linear.960x576"] == "cublas" and len(device.asked) == 1


@pytest.mark.parametrize("differing", [0, 4])
def test_attention_is_proven_at_the_start(device, monkeypatch, differing):
    result = CaseResult("attention", "attention_paged", "bfloat16", "9/3x64", "x", 100, 100, differing, {"row": 7} if differing else None)
    ran = []
    monkeypatch.setattr(needs.proof_attention, "attention", lambda sweep, quick: ran.append(sweep.shape) or [result])
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.enable_grad())
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.enable_grad())
    if differing:
        for _ in range(2):  # what failed is looked at again, and refused again
            with pytest.raises(UnsupportedOp, match=r"attention on cpu.*4 of 100 rows differ in 9/3x64.*'row': 7"):
                device.run(set(), set(), {(9, 3, 64)})
            again(monkeypatch)
        assert len(ran) == 2
    else:
        for _ in range(2):
            device.run(set(), set(), {(9, 3, 64)})
            again(monkeypatch)
        assert len(ran) == 1


def test_what_a_sweep_finds_is_kept_and_refused_from_then_on(device, monkeypatch):
    from vime.ops.cuda.shapes import MODELS

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    model = MODELS["smollm2-135m"]

    def case(op: str, function: str, shape: str, differing: int) -> CaseResult:
        return CaseResult(op, function, "bfloat16", shape, "x", 500, 500, differing, {"rows": 65, "row": 2} if differing else None)

    good = [case("linear", "linear", "smollm2-135m qkv N=960 K=576", 0), case("attention", "attention_paged", "9/3x64", 0),
            case("attention", "attention_backward", "9/3x64", 0), case("norm", "rms_norm", "H=576", 0),
            case("attention", "attention_varlen", "9/3x64", 0)]  # in no order: both forwards count
    device.run({(960, 576)})
    needs.keep(good, torch.bfloat16, model, False)
    again(monkeypatch)
    entries = proven.store().entries
    assert entries["linear fwd 960x576 bfloat16"]["swept_rows"] == 500 and entries["linear fwd 960x576 bfloat16"]["kernel"] == "cublas"
    assert entries["attention fwd 9/3x64 bfloat16"] == {"rows_compared": 1000, "differing_rows": 0, "sweep": "full"}
    assert entries["attention bwd 9/3x64 bfloat16"] == {"rows_compared": 500, "differing_rows": 0, "sweep": "full"}
    assert device.run({(960, 576)}, set(), {(9, 3, 64)}, training=True)["proof.linear.960x576"] == "cublas"
    needs.keep([case("linear", "linear", "smollm2-135m qkv N=960 K=576", 3)], torch.bfloat16, model, False)
    again(monkeypatch)
    with pytest.raises(UnsupportedOp, match=r"found 3 of 500 rows to differ, the first at .*'rows': 65"):
        device.run({(960, 576)})
    needs.keep(good[:1], torch.bfloat16, model, False)
    again(monkeypatch)
    assert device.run({(960, 576)})["proof.linear.960x576"] == "cublas"


def test_nothing_is_asked_of_a_cpu():
    assert ops.proven(torch.device("cpu"), torch.float32, [(8, 8)], [], [(1, 1, 8)], True) == {}


def test_what_the_environment_is_read_from(monkeypatch, tmp_path):
    assert environment.loaded_library("libc.so") is not None and environment.loaded_library("libnothing.so") is None
    assert environment.library_version("libnothing.so", "f") == "not loaded"
    library = tmp_path / "fa3.so"
    library.write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(environment.fa3, "library", lambda: library)
    before = environment.attention_library()
    with library.open("r+b") as file:
        file.write(b"\x7fELF other build")
    assert environment.attention_library() != before
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert "NVIDIA_TF32_OVERRIDE=1" in environment.switches() and "CUBLASLT_WORKSPACE_SIZE=4096" in environment.switches()
    assert environment.digest(HERE) != environment.digest(HERE | {"cublas": "x"})


def test_our_own_kernels_are_part_of_it_and_what_times_them_is_not():
    folder = Path(environment.__file__).parent
    assert {"gemm.py", "gemm_triton.py", "attention.py", "softmax.py"} <= {p.name for p in folder.glob("*.py")} - environment._NO_KERNELS
    assert {p.name for p in folder.glob("*.py")} >= environment._NO_KERNELS - {"__init__.py"}


def test_a_proof_of_one_attention_kernel_is_none_of_another(monkeypatch):
    """Which one runs was settled when the kernels were loaded; the variable says nothing any more."""
    key, asked = ("attention", "cuda", torch.bfloat16), ((9, 3, 64), torch.bfloat16, False)
    monkeypatch.setenv("VIME_ATTENTION", "flashinfer")
    assert registry.implementation(*key) == attention.IMPLEMENTATION
    assert needs.attention_key(*asked) == "attention fwd 9/3x64 bfloat16"
    monkeypatch.setitem(registry._table, key, registry.Implementation(*key, attention_flashinfer.IMPLEMENTATION, {}))
    monkeypatch.delenv("VIME_ATTENTION")
    assert needs.attention_key(*asked) == "attention by flashinfer fwd 9/3x64 bfloat16"


def test_flashinfer_is_part_of_it_where_it_was_chosen(monkeypatch):
    """Its kernel is compiled on first use, by its version, its compiler and flags from outside."""
    properties = dataclasses.make_dataclass("Properties", ["name", "major", "minor", "multi_processor_count"])("a", 9, 0, 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(environment, "driver_version", lambda: "1")
    monkeypatch.setattr(environment.flashinfer.importlib.metadata, "version", lambda name: "0.6.14")
    monkeypatch.setenv("VIME_ATTENTION", "flash_attn")
    assert "flashinfer" not in environment.current()
    monkeypatch.setenv("VIME_ATTENTION", "flashinfer")
    first = environment.current()
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-fmad=true")
    second = environment.current()
    assert first["flashinfer"] == "0.6.14" and environment.changes(first, second) == [
        "flashinfer was 0.6.14 and is 0.6.14, FLASHINFER_EXTRA_CUDAFLAGS=-fmad=true"]
    monkeypatch.setattr(environment, "current", lambda index=0: HERE | {"flashinfer": "0.6.14"})
    said = needs.require(needs.Needs(torch.bfloat16, frozenset()), torch.device("cpu", 0))
    assert said["proof.flashinfer"] == "0.6.14" and set(environment.SHARED) == {name.removeprefix("proof.") for name in said}


@pytest.mark.parametrize(("same", "ratio", "want"), [(range(4), (0.9, 0.5, 0.8, 1.2), 1), ((0, 2), (0.9, 0.5, 0.8, 1.2), 2), ((3,), (0.9, 0.5, 0.8, 1.2), None),
                                                     (range(4), (0.98, 1.0, 2.0, 1.2), None)])
def test_few_rows_take_the_fastest_tile_with_the_same_bits(same, ratio, want, monkeypatch):
    """Up to 16 rows here; more do not. What was kept is read by the next start, and what is no number of a tile is not."""
    calls = []

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).to(a.dtype)

    def few(a: torch.Tensor, b: torch.Tensor, which: int) -> torch.Tensor:
        calls.append((a.shape[0], which))
        return exact(a, b) if which in same else exact(a, b).index_fill_(1, torch.tensor([3]), 0.0)

    monkeypatch.setattr(gemm, "_tiles_for_few", TILES_FOR_FEW)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(proven, "store", lambda *_: kept)
    monkeypatch.setattr(gemm, "_ROUTES", {"cublas": exact})
    monkeypatch.setattr(gemm.gemm_triton, "few", few)
    monkeypatch.setattr(gemm.gemm_triton, "FEW", {torch.bfloat16: ({},) * 4})
    monkeypatch.setattr(gemm, "_few_ratio", lambda kernel, weight, which, rows: ratio[which] if rows == 16 else 1.0)
    weight = torch.randn(12, 32, dtype=torch.bfloat16)
    for _ in range(2):  # the second one from disk
        kept = proven.Store(HERE, say=lambda _: None)
        assert gemm.route(weight).few == (want, None)
        monkeypatch.setattr(gemm, "_routes", {})
    assert gemm.route(weight.float()).few == gemm.route(weight, forward=False).few == (None, None)
    calls.clear()
    whole = gemm.linear(torch.ones(64, 32, dtype=torch.bfloat16), weight)
    assert calls == [] and torch.equal(gemm.linear(torch.ones(16, 32, dtype=torch.bfloat16), weight), whole[:16])
    assert calls == ([] if want is None else [(16, want)])
    for damaged in (None, True, [want], [9, None], ["1", None], [True, None]):
        assert gemm._kept_tiles(damaged, torch.bfloat16) == (None, None)
