"""enable, disable, enabled(): nesting, restoring, one operation alone, nothing left after a failure."""
from __future__ import annotations

import importlib

import pytest
import torch

import vime
from tests.megatron.suite import kit
from vime.megatron import forward, hooks
from vime.megatron.patch import HookPoint, MissingHookPoint, Patches
from vime.megatron.routes import ROUTES

# A forward takes them only where vime's attention is on, so each operation alone runs unpacked.
SEQUENCE = kit.sequences([21])[0]


def snapshot() -> dict[str, object]:
    """Every name that vime may replace, as it is now."""
    points = [p for route in ROUTES.values() for p in route.hook_points()]
    points += [HookPoint(owner, "forward", lambda stock: stock) for owner in (
        *hooks._GUARDED, "megatron.core.transformer.transformer_layer:TransformerLayer")]
    return {f"{p.owner}.{p.name}": vars(p.resolve())[p.name] for p in points}


STOCK = snapshot()


def patched() -> set[str]:
    return {name for name, value in snapshot().items() if value is not STOCK[name]}


def test_everything_goes_on_and_comes_off():
    assert not patched()
    vime.enable()
    assert patched() == set(STOCK) and vime.is_enabled() and all(vime.is_enabled(op) for op in hooks.COVERED)
    vime.enable()
    vime.disable()
    vime.disable()
    assert not patched() and not vime.is_enabled()


def test_blocks_nest_and_restore_after_an_exception():
    with vime.enabled(exclude="attention"):
        outside = patched()
        with pytest.raises(ZeroDivisionError), vime.enabled(["norm"]):
            assert vime.is_enabled("norm") and not vime.is_enabled("linear")
            with vime.enabled(()):
                assert not patched() and not vime.is_enabled()
            assert vime.is_enabled("norm")
            1 / 0  # noqa: B018
        assert patched() == outside and vime.is_enabled("linear") and not vime.is_enabled("attention")
        with vime.enabled():
            vime.disable()
        assert patched() == outside
    assert not patched()


@pytest.mark.parametrize("op", [op for op in ROUTES if op != "moe"])  # tests/megatron/test_experts.py has a model with experts
def test_each_operation_alone(op):
    """Only its own names are replaced, only its route runs, and the result moves by no more than rounding."""
    model = kit.shared("qwen3", torch.float32)
    ids = torch.tensor([SEQUENCE])
    call = {"input_ids": ids, "position_ids": torch.arange(len(SEQUENCE))[None], "attention_mask": None, "labels": ids}
    stock = model(**call)
    with vime.enabled([op]):
        mine = {f"{p.owner}.{p.name}" for p in ROUTES[op].hook_points()}
        guards = {f"{owner}.forward" for owner in hooks._GUARDED} | {"megatron.core.transformer.transformer_layer:TransformerLayer.forward"}
        assert patched() == mine | guards
        hooks.reset_counters()
        alone = model(**call)
        vime.assert_active()
    assert set(hooks.counters()) == {op}
    assert not patched()
    assert float((alone - stock).abs().max()) < 5e-4
    again = model(**call)
    assert kit.same_bits(again, stock)


def test_all_but_one():
    for op in ROUTES:
        with vime.enabled(exclude=[op]):
            assert vime.active_ops() == tuple(o for o in hooks.COVERED if o != op)
    assert not patched()


def test_an_unknown_name_is_refused_and_changes_nothing():
    with vime.enabled(["norm"]):
        for call in (lambda: vime.enable(["norms"]), lambda: vime.enable(exclude=["norms"]), lambda: vime.is_enabled("norms")):
            with pytest.raises(ValueError, match=r"'norms'.*known: embedding"):
                call()
        assert vime.is_enabled("norm") and vime.active_ops() == ("norm",)


def test_a_failed_enable_leaves_nothing_patched(monkeypatch):
    """A Megatron that lacks the last name of all: everything patched before it must come off again."""
    missing = HookPoint("megatron.core.tensor_parallel.layers", "renamed_in_some_release", lambda stock: stock)
    monkeypatch.setattr(ROUTES["logprob"], "hook_points", lambda: [missing])
    with pytest.raises(MissingHookPoint, match="renamed_in_some_release"):
        vime.enable()
    assert not vime.is_enabled()
    monkeypatch.undo()
    assert not patched()


def test_a_replacement_that_fails_to_build_is_rolled_back(monkeypatch):
    def explode(stock):
        raise KeyboardInterrupt

    points = ROUTES["norm"].hook_points()
    with pytest.raises(KeyboardInterrupt):
        Patches([*points, HookPoint("megatron.core.transformer.mlp:MLP", "forward", explode)])
    assert not patched()
    monkeypatch.setattr(ROUTES["rope"], "hook_points", lambda: [HookPoint("megatron.core.transformer.mlp:MLP", "forward", explode)])
    vime.enable(["norm"])
    with pytest.raises(KeyboardInterrupt):
        vime.enable(["norm", "rope"])
    assert vime.active_ops() == ("norm",)  # what was active before is active again


def test_a_foreign_replacement_is_not_undone_but_told():
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    stock = layers.linear_with_frozen_weight
    vime.enable(["linear", "norm"])
    layers.linear_with_frozen_weight = foreign = lambda *args, **kwargs: None
    with pytest.raises(RuntimeError, match="linear_with_frozen_weight"):
        vime.disable()
    assert layers.linear_with_frozen_weight is foreign and not vime.is_enabled()
    layers.linear_with_frozen_weight = stock
    assert not patched()


def test_a_wrap_that_is_undone_gives_back_stock_names():
    """Whoever undoes a wrap restores what it found, vime's replacement: the next ``disable`` must take that off."""
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    vime.enable(["linear", "norm"])
    mine = layers.linear_with_frozen_weight
    layers.linear_with_frozen_weight = foreign = lambda *args, **kwargs: mine(*args, **kwargs)
    for call in (vime.disable, vime.disable, vime.enable):  # each time, and nothing is put on top of it
        with pytest.raises(RuntimeError, match="linear_with_frozen_weight"):
            call()
        assert layers.linear_with_frozen_weight is foreign and not vime.is_enabled()
        assert patched() == {"megatron.core.tensor_parallel.layers.linear_with_frozen_weight"}
    layers.linear_with_frozen_weight = mine
    vime.disable()
    assert not patched() and not vime.is_enabled()


def test_a_foreign_replacement_stops_a_switch_before_it_changes_anything():
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    vime.enable(["linear", "norm"])
    outside, mine = patched(), layers.linear_with_frozen_weight

    def foreign(*args, **kwargs):
        return mine(*args, **kwargs)

    layers.linear_with_frozen_weight = foreign
    with pytest.raises(RuntimeError, match="linear_with_frozen_weight"):
        vime.enable(["norm"])
    assert vime.active_ops() == ("linear", "norm") and patched() == outside
    layers.linear_with_frozen_weight = mine
    with pytest.raises(RuntimeError, match="linear_with_frozen_weight"), vime.enabled(["linear"]):
        mine, inside = layers.linear_with_frozen_weight, patched()
        layers.linear_with_frozen_weight = foreign
    assert vime.active_ops() == ("linear",) and patched() == inside
    layers.linear_with_frozen_weight = mine
    vime.disable()
    assert not patched() and not vime.is_enabled()


def test_assert_active_names_what_never_ran():
    with vime.enabled():
        hooks.reset_counters()
        with pytest.raises(AssertionError, match="never ran: embedding, linear"):
            vime.assert_active()
        forward.token_logprobs_of(kit.shared("llama", torch.float32), [SEQUENCE])
        with pytest.raises(AssertionError, match="never ran: logprob "):
            vime.assert_active()  # this helper calls vime.ops itself; Megatron's loss was not taken


def test_assert_active_needs_something_active():
    with pytest.raises(AssertionError, match="no operation is active"):
        vime.assert_active()
    with vime.enabled(["norm"]):
        forward.token_logprobs_of(kit.shared("llama", torch.float32), [SEQUENCE])
        vime.assert_active()
        with vime.enabled(()), pytest.raises(AssertionError, match="no operation is active"):
            vime.assert_active()


def test_a_run_before_enable_proves_nothing_about_the_next():
    """Nor does leaving a block, but a block inside another one must not make the outer one forget."""
    model = kit.shared("llama", torch.float32)
    for again in (lambda: vime.enable(["norm"]), lambda: vime.enable(["norm"], model=model)):
        vime.enable(["norm"])
        forward.token_logprobs_of(model, [SEQUENCE])
        vime.assert_active()
        vime.disable()
        again()
        with pytest.raises(AssertionError, match="never ran: norm"):
            vime.assert_active()
        vime.disable()
    with vime.enabled(["norm"]):
        with pytest.raises(AssertionError, match="never ran: norm"):
            vime.assert_active()
        forward.token_logprobs_of(model, [SEQUENCE])
        with vime.enabled(()), vime.enabled(["linear"]):
            pass
        with vime.enabled(["norm", "linear"]):
            vime.disable()
        vime.assert_active()


def test_a_model_checked_by_enable_still_expects_its_experts():
    with vime.enabled():
        model = kit.build("qwen3_moe", torch.float32)
    with vime.enabled(["moe"], model=model), pytest.raises(AssertionError, match="never ran: moe"):
        vime.assert_active()
