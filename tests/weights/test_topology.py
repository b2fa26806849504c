"""Groups, stages and owners are Megatron's own; names go both ways; every group has exactly one root, inside it."""
from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.weights.tiny import load
from vime.weights.families import family_for
from vime.weights.families.units import Ref, Unit
from vime.weights.gather import ShardStore, check_ownership
from vime.weights.groups import OwnershipError
from vime.weights.online import GatherError, Proof
from vime.weights.topology import KINDS, Sizes, Topology, TopologyError, rank_groups, split_layers

SIZE = st.sampled_from([1, 2, 3, 4])
SIZES = st.builds(Sizes, tp=SIZE, pp=SIZE, ep=SIZE, etp=st.sampled_from([1, 2]))


@settings(max_examples=80, deadline=None)
@given(sizes=SIZES, replicas=st.sampled_from([1, 2]))
def test_groups_are_megatrons(sizes, replicas):
    generator = pytest.importorskip("megatron.core.parallel_state").RankGenerator
    sizes = Sizes(sizes.tp, sizes.pp, sizes.ep, sizes.etp, world=sizes.world * replicas)
    per_stage = sizes.world // sizes.pp
    order = "tp-cp-ep-dp-pp"
    dense = generator(sizes.tp, 1, per_stage // sizes.tp, sizes.pp, 1, order)
    expert = generator(sizes.etp, sizes.ep, per_stage // (sizes.etp * sizes.ep), sizes.pp, 1, order)
    want = {"tp": dense.get_ranks("tp"), "pp": dense.get_ranks("pp"), "ep": expert.get_ranks("ep"), "etp": expert.get_ranks("tp")}
    got = rank_groups(sizes)
    assert {k: sorted(map(tuple, g)) for k, g in want.items()} == {k: sorted(g) for k, g in got.items()}


@settings(max_examples=120, deadline=None)
@given(layers=st.integers(1, 24), pp=st.integers(1, 4), vpp=st.integers(1, 3), first=st.none() | st.integers(1, 6),
       last=st.none() | st.integers(1, 6))
def test_stages_are_megatrons(layers, pp, vpp, first, last):
    module = pytest.importorskip("megatron.core.transformer.transformer_layer")
    assume(pp > 1 or (first is None and last is None and vpp == 1))
    try:
        stages = split_layers(layers, Sizes(pp=pp, vpp=vpp, first_stage=first, last_stage=last))
    except TopologyError:
        assume(False)
    if first is None and last is None and layers % pp:
        last = len(sum(stages[-1], ()))  # the rest, which Megatron wants to be told
    assume(not (pp == 2 and first and last and vpp > 1))  # Megatron divides by zero there
    config = SimpleNamespace(
        num_layers=layers, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last, pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False)
    for rank, chunk in itertools.product(range(pp), range(vpp)):
        offset = module.get_transformer_layer_offset(config, chunk if vpp > 1 else None, rank)
        assert stages[rank][chunk][:1] in ((), (offset,))


def test_the_uneven_last_stage():
    assert split_layers(7, Sizes(pp=2)) == (((0, 1, 2, 3),), ((4, 5, 6),))
    assert split_layers(5, Sizes(pp=2, last_stage=1)) == (((0, 1, 2, 3),), ((4,),))
    assert split_layers(8, Sizes(pp=2, vpp=2)) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))


def test_owner_map_of_two_pipeline_groups():
    topology = Topology({"tp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3)), "ep": ((0,), (1,), (2,), (3,)),
                         "etp": ((0,), (1,), (2,), (3,))}, (((0,),), ((1,),)))
    assert topology.roots("pp", Unit("decoder.layers.0.w", (Ref("w", (1,)),), layer=0)) == {0: 0, 2: 0, 1: 1, 3: 1}


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, layers=st.integers(4, 9), slots=st.integers(1, 3), data=st.data())
def test_every_group_has_one_owner_as_root_and_names_go_both_ways(sizes, layers, slots, data):
    experts = slots * sizes.ep
    topology = Topology.build(sizes, layers, experts)
    layer, expert = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, experts - 1))
    name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
    unit = Unit(name, (Ref("w", (1,)),), layer=layer, expert=expert)
    holders = {r for r in range(topology.world) if topology.holds(r, unit)}
    for rank, root in topology.roots("pp", unit).items():
        assert root in topology.group("pp", rank) and topology.index("pp", root) == topology.stage(unit)
    roots = topology.roots("ep", unit)
    for group in topology.groups["ep"]:
        stage = topology.index("pp", group[0])
        inside = holders & set(group)
        assert len(inside) == (stage == topology.stage(unit))
        assert {roots[r] for r in group} == (inside or {group[topology.ep_index(expert)]})
    for rank in holders:
        assert topology.names_on(rank, unit) == (name,)
        assert topology.global_name(*topology.local_name(name, rank), rank) == name


def test_wrong_sizes_are_refused():
    for build, message in (
        (lambda: Sizes(tp=0), "--tp is 0"),
        (lambda: Sizes(tp=2, pp=2, world=6), r"6 ranks is not a multiple of pp \* tp = 4"),
        (lambda: Sizes(ep=4, etp=2, world=4), r"not a multiple of pp \* ep \* etp = 8"),
        (lambda: Sizes(last_stage=3), "the last stage was given 3 layers and --pp is 1: one stage holds all layers"),
        (lambda: Sizes(tp=2, first_stage=1), "the first stage was given 1 layers and --pp is 1"),
        (lambda: Topology.build(Sizes(ep=4), 2), "--ep 4 would cut routed experts, and this model has none; expected 1, leave it out"),
        (lambda: Topology.build(Sizes(ep=2, etp=2), 2), "--ep 2 and --etp 2 would cut routed experts, .* leave them out"),
        (lambda: Topology.build(Sizes(ep=3), 2, 8), "EP 3 does not divide the 8 experts"),
        (lambda: split_layers(3, Sizes(pp=4)), "3 layers cannot be put on 4 pipeline stages"),
        (lambda: split_layers(6, Sizes(pp=2, vpp=2)), "3 layers cannot be cut into 2 virtual chunks"),
        (lambda: Topology({k: ((0, 1),) for k in KINDS} | {"pp": ((0, 0),)}, (((0,),),)), "every rank exactly once"),
    ):
        with pytest.raises(TopologyError, match=message):
            build()


def test_a_tensor_that_tp_cannot_split_is_named(checkpoint):
    state, cfg = load(checkpoint("qwen2"))
    plan = family_for(cfg).plan(cfg, hf_names=state)
    with pytest.raises(ValueError, match=r"embedding\.word_embeddings.*136 cannot be split evenly over 3"):
        Topology.build(Sizes(tp=3), 4).check(plan)


def test_experts_of_one_tensor_in_several_dtypes_are_refused_before_anything_moves(checkpoint):
    """Each expert agrees with itself on every rank; put into one tensor of the file, one of them would be converted."""
    state, cfg = load(checkpoint("gemma4"))
    plan, top = family_for(cfg).plan(cfg, hf_names=state), Topology.build(Sizes(ep=2), 4, 8)
    held = [ShardStore(state, plan, top, rank).inventory() for rank in range(2)]
    check_ownership(plan, top, held)
    name = next(n for n in held[1] if "layers.2." in n and "experts.5.linear_fc1" in n)
    held[1][name] = (torch.bfloat16, held[1][name][1])
    with pytest.raises(OwnershipError, match=rf"{name}: rank 1 \(.*ep 1.*\) holds torch\.bfloat16, but .*experts\.0\..*part of model\.layers\.2\.experts\.gate_up"):
        check_ownership(plan, top, held)


def test_the_copy_of_the_embedding_on_the_last_stage_is_looked_at(checkpoint):
    """Megatron keeps one for its MTP layers. It is sent to nobody, so nobody else could know."""
    state, cfg = load(checkpoint("qwen2"))
    plan, top = family_for(cfg).plan(cfg, hf_names=state), Topology.build(Sizes(pp=2), 4)
    unit = next(u for u in plan.units if u.place == "embedding")
    full = state["model.embed_tokens.weight"]
    held = [ShardStore(state, plan, top, rank).inventory() for rank in range(2)]
    check_ownership(plan, top, [held[0], held[1] | {unit.name: (full.dtype, tuple(full.shape))}])
    for dtype, shape, message in ((torch.bfloat16, tuple(full.shape), "bfloat16, another owner"), (full.dtype, (8, 32), r"shape \[8, 32\], expected")):
        with pytest.raises(OwnershipError, match=rf"{unit.name}: rank 1 \(pp 1, .*{message}"):
            check_ownership(plan, top, [held[0], held[1] | {unit.name: (dtype, shape)}])
    for copy, stale in ((full, False), (full + 1, True)):
        proof = Proof(SimpleNamespace(topology=top, rank=1, local={unit.name: copy}, plan=SimpleNamespace(units=[unit])))
        proof._see(unit, full)
        if stale:
            with pytest.raises(GatherError, match=rf"{unit.name}: rank 1 \(pp 1, .*stale copy"):
                proof._compare([(proof._marks, []), (proof._marks, proof._not_mine)])
        else:
            proof._compare([(proof._marks, []), (proof._marks, proof._not_mine)])
