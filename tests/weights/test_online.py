"""The online update of a model on many ranks: what a receiver gets is the source checkpoint, bit for bit; a fault in the
gather is named and nothing is loaded."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from vime.rl.config import TrainConfig
from vime.rl.pool import TrainerPool
from vime.rl.ranks import Ranks, TrainerFailed
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.families import family_for
from vime.weights.manifest import digest_of
from vime.weights.topology import Sizes, Topology, experts_of, layers_of
from vime.weights.transports import Endpoint
from vime.weights.truth import Truth

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[2]
#: case, TP, PP, EP, on four ranks
POOLS = [("qwen3_moe", 1, 1, 2), ("glm4_moe", 1, 1, 4), ("qwen3_moe", 1, 2, 2), ("qwen2-tied", 2, 2, 1)]


@pytest.fixture(scope="module", params=POOLS, ids=str)
def pool(request, checkpoint, tmp_path_factory):
    case, tp, pp, ep = request.param
    spec = {"hf": str(checkpoint(case)), "tp": tp, "pp": pp, "ep": ep, "store": str(tmp_path_factory.mktemp("ranks") / "store")}
    env = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
           "CUDA_VISIBLE_DEVICES": ""}
    with Ranks(4, "tests.weights.megatron_rank:make", spec, preload=["megatron.core", "tests.weights.megatron_models"], env=env) as made:
        made.spec = spec
        made.call("load")
        yield made


def test_the_receiver_holds_the_source_checkpoint(pool):
    for _ in range(3):
        first, *others = pool.call("update")
        assert first["problem"] is None and first["different"] == first["missing"] == [] and first["received"] > 20
        assert all(o["problem"] is None and o["begun"] == 0 for o in others)


def test_memory_stays_near_a_bucket(pool):
    for most, largest, total in pool.call("live_bytes", 8 << 10):
        assert most <= (8 << 10) + largest < total / 4


def test_a_wrong_root_is_named_before_the_engine_hears_of_an_update(pool):
    kinds = [k for k in ("pp", "ep") if pool.spec[k] > 1 and 4 // pool.spec[k] > 1]
    for kind in kinds:
        for found in pool.call("update", f"{kind}:wrong-root"):
            assert re.search(rf"AgreementError: .*rank \d \(.*would take it from rank \d, but in its {kind} group .* owns it", found["problem"])
            assert found["begun"] == found["received"] == 0
    assert kinds or pool.spec["ep"] == 4  # one group of four holds every owner


@pytest.mark.parametrize("fault", ["source:stale", "full:gate-up", "ep:swapped-experts", "tp:shard-order", "full:dropped", "full:layer-offset"])
def test_what_the_gather_breaks_is_named_and_not_loaded(pool, fault):
    stage = fault.partition(":")[0]
    if stage in ("ep", "tp") and pool.spec[stage] == 1:
        return  # nothing passes this stage here; the pools above cover each at least once
    answers = pool.call("update", fault)
    problems = {a["problem"] for a in answers}
    assert len(problems) == 1 and re.search(r"GatherError: (decoder|output_layer)\S* .*rank \d", problems.pop())
    assert answers[0]["begun"] == 1 and answers[0]["received"] == 0
    assert "the sender gave up: GatherError" in answers[0]["told"]
    assert pool.call("update")[0]["problem"] is None


def test_replicas_that_drifted_apart_are_named(pool):
    """One bit on the last rank, which sends nothing itself where another rank holds a copy."""
    name = "decoder.final_layernorm.weight"
    if (pool.spec["pp"], pool.spec["ep"]) == (1, 2):  # two sets of experts
        name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    pool.call("flip", 3, name)
    problems = {a["problem"] for a in pool.call("update")}
    pool.call("flip", 3, name)
    assert len(problems) == 1 and re.search(rf"GatherError: {name.partition('layers')[0]}.*: rank \d .*(other bits)", problems.pop())
    assert pool.call("update")[0]["problem"] is None


def test_a_stale_copy_of_a_tied_tensor_is_named(pool):
    if pool.spec["tp"] == 1:
        return  # only the last of the pools holds a second copy
    pool.call("flip", 3, "output_layer.weight")
    problems = {a["problem"] for a in pool.call("update")}
    pool.call("flip", 3, "output_layer.weight")
    assert len(problems) == 1 and re.search(r"GatherError: output_layer\.weight: rank 3 .*stale copy", problems.pop())
    assert pool.call("update")[0]["problem"] is None


def test_the_ledger_of_an_update_is_what_slicing_the_checkpoint_gives(pool):
    source = HfCheckpoint(pool.spec["hf"])
    plan = family_for(source.config).plan(source.config, source.files)
    sizes = Sizes(tp=pool.spec["tp"], pp=pool.spec["pp"], ep=pool.spec["ep"], world=4)
    topology = Topology.build(sizes, layers_of(plan), experts_of(plan))
    truth, stages = Truth(source, plan, topology), ("source", "pp", "ep", "tp", "full")
    entries = pool.call("ledger")
    cells = [*truth.cells(entries, stages), *truth.cells(entries[:1], ("converted", "stacked"))]
    assert len(cells) > 300 and [c for c in cells if not c.good] == []
    pool.call("flip", 3, "decoder.layers.0.input_layernorm.weight" if pool.spec["pp"] == 1 else "decoder.final_layernorm.weight")
    with pytest.raises(TrainerFailed, match=r"rank \d .* other bits") as error:  # the ledger does not take the place of the check
        pool.call("ledger")
    assert error.value.kind == "GatherError"


@pytest.fixture(scope="module")
def trainers(checkpoint):
    """The trainer's own pool: four ranks, experts spread over pairs of them."""
    config = TrainConfig(str(checkpoint("qwen3_moe")), dtype="float32", actor_num_gpus=4, expert_model_parallel_size=2)
    with TrainerPool(config) as made:
        yield made


def test_the_trainers_digests_are_those_of_the_checkpoint(trainers, checkpoint):
    source = HfCheckpoint(checkpoint("qwen3_moe"))
    assert trainers.named_weights_digest() == {name: digest_of(tensor) for name, tensor in source.items()}


def test_the_trainer_refuses_a_wrong_root_before_it_calls_the_engine(trainers):
    nowhere = Endpoint(url="http://127.0.0.1:9", timeout_s=5)
    trainers.ranks.call("inject", "ep:wrong-root")
    with pytest.raises(TrainerFailed, match=r"failed in send_weights: .*experts\.0\..* would take it from rank .* in its ep group") as error:
        trainers.send_weights([nowhere], 1)
    assert error.value.kind == "AgreementError" and "Traceback" not in str(error.value)
