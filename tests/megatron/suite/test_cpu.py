"""What Megatron asks of CUDA is answered for the CPU, and only where it asks."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vime.megatron import cpu


def test_applied_once_and_dynamo_is_off():
    assert cpu.applied() and os.environ["TORCHDYNAMO_DISABLE"] == "1"
    stream = torch.cuda.Stream
    cpu.apply()
    assert torch.cuda.Stream is stream and torch.cuda.current_device() == torch.device("cpu")


def test_device_literals_are_answered_in_megatron_only():
    from megatron.core.optimizer import clip_grads

    assert clip_grads.torch.zeros(2, device="cuda").device.type == "cpu"
    assert clip_grads.torch.float32 is torch.float32 and clip_grads.torch.nn is torch.nn
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_type_names_are_answered_in_megatrons_optimizer_only():
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert torch.ones(1).type(torch.float64).dtype is torch.float64
    asked = eval("lambda t: t.type()", {"__name__": "megatron.core.optimizer.optimizer"})
    assert asked(torch.ones(1, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"
    assert asked(torch.ones(1)) == "torch.cuda.FloatTensor"


def test_generator_states_go_through_megatrons_tracker():
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(11)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draws = []
    for _ in range(2):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            draws.append(torch.rand(3))
    assert torch.equal(torch.rand(3), expected)  # the fork left the generator outside as it was
    assert not torch.equal(*draws)  # and its own state goes on
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), draws[0])


def test_what_has_no_answer_is_named():
    with pytest.raises(cpu.UnsupportedOnCpu, match="perf_counter"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())
    with pytest.raises(cpu.UnsupportedOnCpu, match="CUDA graphs"):
        cpu._get_rng_state(graph_safe=True)


def test_split_sizes_become_numbers_for_gloo():
    from megatron.core.transformer.moe import token_dispatcher

    assert token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3, 4]), as_numpy=True).tolist() == [3, 4]
    assert torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3, 4])))


def test_it_builds_and_schedules_without_triton():
    """0.19.2's schedules need one triton-only module; every version must import and build where triton is missing."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from tests.megatron.suite import kit
from vime.megatron import cpu, parallel
parallel.initialize()
import megatron.core.pipeline_parallel.schedules, megatron.core.transformer.moe.moe_layer
kit.build("llama", torch.float32)
stand_in = sys.modules.get(cpu._TRITON_ONLY)
if stand_in is not None:
    try:
        stand_in.any_kernel()
    except cpu.UnsupportedOnCpu as error:
        assert "moe_paged_stash" in str(error)
    else:
        raise AssertionError("a stand-in that computes nothing must say so")
print("stand-in" if stand_in is not None else "not needed")
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    import megatron.core

    assert run.stdout.split("\n")[-2] == ("stand-in" if megatron.core.__version__.split("+")[0] == "0.19.2" else "not needed")
