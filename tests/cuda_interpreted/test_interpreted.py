"""The Triton kernels run on a CPU as well: interpreted against float64, and compiled for Hopper without a GPU.

This shows that their equations are right and that no product is fused into a sum. What it cannot show, the order in
which a GPU adds, is proven on one (``tests/cuda``).
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [Path(__file__).with_name(name) for name in ("cases.py", "cases_paged.py")]


@pytest.mark.parametrize("cases", CASES, ids=[path.stem for path in CASES])
def test_kernels_interpreted(cases: Path) -> None:
    """A process of its own: the interpreter has to be chosen before Triton is imported."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(cases)],
                          env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed.group(1)) >= 10 and "skipped" not in done.stdout, done.stdout[-1000:]


@pytest.mark.parametrize("hidden", [576, 4096])
def test_norm_compiles_for_hopper_without_fused_products(hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``x * x`` must be rounded before it is added, in the plain and in the adding form alike."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vime.ops.cuda import norm

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = norm._launch(hidden)
    options = {name: launch[name] for name in ("num_warps", "enable_fp_fusion")}
    pointer = {f"{name}_ptr": "*bf16" for name in ("x", "residual", "weight", "y", "sum")}
    for add in (False, True):
        constants = {"H": hidden, "BLOCK": launch["BLOCK"], "ADD": add}
        signature = {**pointer, "eps": "fp32", **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(norm._forward, {name: signature[name] for name in norm._forward.arg_names}, constants)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert ".target sm_90" in code and "mul.rn.f32" in code and "fma.rn.f32" not in code
        fused = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, "enable_fp_fusion": True}).asm["ptx"]
        assert "fma.rn.f32" in fused  # the control: left to itself the compiler does fuse


@pytest.mark.parametrize("kernel", ["_forward", "_backward_q", "_backward_rows"])
def test_sparse_attention_of_glm_compiles_for_hopper(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the true widths (512 compressed, 64 rotated) every kernel fits the shared memory of a block, in bf16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vime.ops.cuda import sparse

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(sparse, kernel)
    constants = {"D": 576, "L": 512, "BL": 512, "BR": 64, "BH": sparse._HEADS, "TILE": sparse._TILE}
    types = {"q_ptr": "*bf16", "kv_ptr": "*bf16", "o_ptr": "*bf16", "do_ptr": "*bf16", "dq_ptr": "*bf16", "index_ptr": "*i32", "n_ptr": "*i32",
             "lse_ptr": "*fp32", "delta_ptr": "*fp32", "share_ptr": "*fp32", "scale": "fp32", "H": "i32", "K": "i32", "kv_stride": "i32", "first": "i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    compiled = triton.compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32), options=dict(sparse._LAUNCH))
    assert ".target sm_90" in compiled.asm["ptx"] and compiled.metadata.shared <= 227 * 1024


def compiled_for_hopper(function, constants: dict, types: dict, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                        aligned: tuple[str, ...] = ()):
    """What ``function`` compiles to; arguments that are named in neither are int32. ``aligned``: those divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    divisible = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return triton.compile(ASTSource(function, signature, constants, divisible), target=GPUTarget("cuda", 90, 32), options=options)


def test_the_form_without_the_host_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the true widths: scores by block table, a choice among 8192 positions, cells written and dequantised."""
    from vime.ops.cuda import cells, select, sparse_index

    where = {"table_ptr": "*i32", "row_ptr": "*i64", "position_ptr": "*i64"}
    scores = compiled_for_hopper(sparse_index._scores, {"H": 32, "D": 128, "BD": 128, "TILE": sparse_index._TILE, "UNROLL": sparse_index._UNROLL},
                                 {"q_ptr": "*bf16", "k_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*fp32", "dim_scale": "fp32",
                                  "head_scale": "fp32", **where}, {"num_warps": 4, "enable_fp_fusion": False}, tmp_path, monkeypatch)
    assert "fma.rn.f32" not in scores.asm["ptx"] and "mul.rn.f32" in scores.asm["ptx"]
    chosen = compiled_for_hopper(select._select, {"BS": 8192, "BK": 2048}, {"score_ptr": "*fp32", "count_ptr": "*i64", "out_ptr": "*i32"},
                                 {"num_warps": 8}, tmp_path, monkeypatch)
    rows = compiled_for_hopper(cells._dequantise, {"L": 512, "R": 64, "BL": 512, "BR": 64, "C": 128, "TILE": cells._TILE},
                               {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "key_ptr": "*bf16", "slot_ptr": "*i32", "n_ptr": "*i32",
                                "out_ptr": "*bf16"}, {"num_warps": 4, "enable_fp_fusion": False}, tmp_path, monkeypatch)
    assert "cvt" in rows.asm["ptx"] and "cvt.rn.bf16" in rows.asm["ptx"]
    written = compiled_for_hopper(cells._write, {"W": 704, "BW": 1024}, {"cell_ptr": "*bf16", "cache_ptr": "*bf16", "slot_ptr": "*i64"},
                                  {"num_warps": 4}, tmp_path, monkeypatch)
    assert all(".target sm_90" in one.asm["ptx"] and one.metadata.shared <= 227 * 1024 for one in (scores, chosen, rows, written))


@pytest.mark.parametrize(("heads", "groups", "dim"), [(14, 2, 64), (32, 8, 128)])
def test_rotation_by_position_compiles_for_hopper_without_fused_products(heads: int, groups: int, dim: int, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vime.ops.cuda import rope

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    size = triton.next_power_of_2
    constants = {"H": heads, "G": groups, "D": dim, "R": dim // 2, "BH": size(heads), "BG": size(groups), "BR": dim // 2, "BP": 1,
                 "INTERLEAVED": False, "BACKWARD": False}
    types = {name: "*bf16" for name in ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr")} | {"cos_ptr": "*fp32", "sin_ptr": "*fp32",
             "position_ptr": "*i64"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in rope._rotate_at.arg_names}
    code = triton.compile(ASTSource(rope._rotate_at, signature, constants), target=GPUTarget("cuda", 90, 32),
                          options={"enable_fp_fusion": False}).asm["ptx"]
    assert ".target sm_90" in code and "mul.rn.f32" in code and "fma.rn.f32" not in code


@pytest.mark.parametrize("kernel", ["_heads", "_experts", "_one"])
def test_grouped_products_of_glm_compile_for_hopper(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the true widths, in bf16, on the tensor cores, with two programs to a multiprocessor."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vime.ops.cuda import grouped

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(grouped, kernel)
    tile = dict(grouped._TILE[torch.bfloat16])
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    widths = {"_heads": {"H": 64, "N": 512, "K": 192, "SWH": 448 * 512, "SWN": 1, "SWK": 512},
              "_experts": {"N": 4096, "K": 6144, "SWE": 4096 * 6144, "SWN": 6144, "SWK": 1, "BE": 256},
              "_one": {"N": 4096, "K": 6144, "SWN": 6144, "SWK": 1}}[kernel]
    constants = {**widths, **tile}
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "source_ptr": "*i64", "target_ptr": "*i64", "row_end_ptr": "*i64",
             "tile_end_ptr": "*i32", "T": "i32", "E": "i32", "R": "i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in ("x_ptr", "w_ptr", "y_ptr")}
    compiled = triton.compile(ASTSource(function, signature, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options)
    assert ".target sm_90" in compiled.asm["ptx"] and "wgmma" in compiled.asm["ptx"]
    assert 2 * compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("kernel", ["_peaks", "_quantise", "_quantise_rows", "_products"])
def test_block_fp8_of_glm_compiles_for_hopper(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the FP8 tensor cores, with the scales multiplied and added by one fused operation, as DeepGEMM does it, and divisions rounded to nearest."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vime.ops.cuda import blockwise, quantise

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function, tile = getattr(blockwise if kernel == "_products" else quantise, kernel), dict(blockwise._TILE)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    options["enable_fp_fusion"] &= kernel == "_products"
    constants = {"N": 4096, "K": 6144, "KB": 48, "C": 128, "ROWS": quantise._ROWS, "BE": 256, "LARGEST": 448.0, "PRECISION": "tf32", **tile}
    types = {name: "*i64" for name in ("block_ptr", "source_ptr", "target_ptr", "row_end_ptr")} | {"tile_end_ptr": "*i32", "y_ptr": "*bf16"}
    types |= {name: "*fp32" for name in ("sx_ptr", "sw_ptr", "most_ptr", "scale_ptr")} | {"q_ptr": "*fp8e4nv", "x_ptr": "*fp8e4nv"}
    types["w_ptr"] = "*fp8e4nv" if kernel == "_products" else "*bf16"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in ("x_ptr", "w_ptr", "q_ptr", "y_ptr")}
    used = {name: value for name, value in constants.items() if name in function.arg_names}
    compiled = triton.compile(ASTSource(function, signature, used, aligned), target=GPUTarget("cuda", 90, 32), options=options)
    code = compiled.asm["ptx"]
    assert ".target sm_90" in code and compiled.metadata.shared <= 227 * 1024
    if kernel == "_products":
        assert "wgmma" in code and "e4m3" in code and "fma.rn.f32" in code
    if kernel != "_products":
        assert "fma.rn.f32" not in code
    if kernel in ("_quantise", "_quantise_rows"):
        assert "div.rn.f32" in code and "cvt.rn.satfinite.e4m3" in code


def test_tiles_for_few_rows_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weight as it lies, whatever its size: bf16 on the tensor cores, fp32 by products and sums of fp32."""
    import torch

    from vime.ops.cuda import gemm_triton

    for dtype, tiles in gemm_triton.FEW.items():
        for tile in tiles:
            options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}
            constants = {"PRECISION": "ieee" if dtype == torch.float32 else "tf32", "stride_ak": 1, "stride_bk": 1} | {
                name: tile[name] for name in ("BM", "BN", "BK")}
            kind = "*fp32" if dtype == torch.float32 else "*bf16"
            found = compiled_for_hopper(gemm_triton._few, constants, {name: kind for name in ("a_ptr", "b_ptr", "c_ptr")}, options, tmp_path,
                                        monkeypatch, aligned=("a_ptr", "b_ptr", "c_ptr", "stride_am", "stride_bn", "N", "K"))
            code = found.asm["ptx"]
            assert found.metadata.shared <= 227 * 1024
            assert "fma.rn.f32" in code if dtype == torch.float32 else "wgmma" in code if tile["BM"] == 64 else "mma.sync" in code


def test_a_router_compiles_for_hopper_without_fused_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.ops.cuda import router

    plain = {"num_warps": 4, "enable_fp_fusion": False}
    route = compiled_for_hopper(router._route, {"E": 256, "K": 8, "BE": 256, "BK": 8, "BIAS": True, "NORMALISE": True},
                                {"score_ptr": "*fp32", "bias_ptr": "*fp32", "id_ptr": "*i64", "weight_ptr": "*fp32", "nan_ptr": "*i32", "scaling": "fp32"},
                                plain, tmp_path, monkeypatch)
    assert "div.rn.f32" in route.asm["ptx"] and "fma.rn.f32" not in route.asm["ptx"]
    types = {"row_ptr": "*bf16", "weight_ptr": "*fp32", "y_ptr": "*bf16"}
    combine = compiled_for_hopper(router._combine, {"K": 8, "BLOCK": router._COLUMNS}, types, plain, tmp_path, monkeypatch)
    assert "mul.rn.f32" in combine.asm["ptx"] and "add.rn.f32" in combine.asm["ptx"] and "fma.rn.f32" not in combine.asm["ptx"]
    fused = compiled_for_hopper(router._combine, {"K": 8, "BLOCK": router._COLUMNS}, types, {"num_warps": 4, "enable_fp_fusion": True}, tmp_path,
                                monkeypatch)
    assert "fma.rn.f32" in fused.asm["ptx"]  # the control: left to itself the compiler does fuse


def test_lists_and_plans_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.ops.cuda import cells, grouped

    where = {"id_ptr": "*i64", "place_ptr": "*i64", "row_end_ptr": "*i64", "tile_end_ptr": "*i32"}
    found = [compiled_for_hopper(kernel, constants, where, {"num_warps": 4}, tmp_path, monkeypatch) for kernel, constants in (
        (grouped._place, {"BLOCK": 16, "CHUNK": 128}), (grouped._row_ends, {"BLOCK": 16, "CHUNK": 128}), (grouped._tile_ends, {"BE": 256, "BM": 64}))]
    lists = {"position_ptr": "*i32", "table_ptr": "*i32", "row_ptr": "*i64", "slot_ptr": "*i32", "n_ptr": "*i32", "at_ptr": "*i64",
             "write_ptr": "*i64", "count_ptr": "*i64"}
    for count in (False, True):
        found.append(compiled_for_hopper(cells._list, {"BLOCK": 1024, "COUNT": count}, lists, {"num_warps": 4}, tmp_path, monkeypatch))
    assert all(".target sm_90" in one.asm["ptx"] for one in found) and ("atom" in found[-1].asm["ptx"]) > ("atom" in found[-2].asm["ptx"])
