"""Names, shapes and torch_dist checkpoints against megatron-core itself, in processes of its own."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.weights.tiny import load, make_checkpoint, with_mtp
from tests.weights.tiny import write as write_hf
from vime.rl.ranks import Ranks
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.diff import diff
from vime.weights.families import family_for
from vime.weights.topology import Sizes, Topology
from vime.weights.torch_dist.read import TorchDist, to_hf
from vime.weights.torch_dist.write import write

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[2]
NAMED = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe")


def megatron(command, cfg, *folders, alternative=False):
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if alternative:
        folder = os.environ.get("VIME_MCORE_ALT", "")
        if folder == "none":
            pytest.skip("VIME_MCORE_ALT=none: only the installed megatron-core is tested, as asked")
        assert (Path(folder) / "megatron").is_dir() and folder, "VIME_MCORE_ALT: expected an unpacked megatron-core 0.19.2 (or 'none')"
        paths.insert(0, folder)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.weights.megatron_models", command, json.dumps(cfg), *folders],
                         env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    line = [x for x in run.stdout.splitlines() if x.startswith("RESULT ")]
    assert line, run.stderr[-2000:]
    answer = json.loads(line[0][7:])
    # an installation inside a git checkout appends that checkout's commit: 0.19.2+21f9217
    assert answer["version"].split("+")[0] == "0.19.2" or not alternative
    return answer["result"]


def expected(state, cfg):
    return {u.name: list(u.shape) for u in family_for(cfg).plan(cfg, hf_names=state).units}


@pytest.mark.parametrize("family", NAMED)
def test_names_and_shapes_are_megatrons(family, checkpoint):
    state, cfg = load(checkpoint(family))
    assert megatron("names", cfg) == expected(state, cfg)


def test_the_indexer_of_sparse_attention(tmp_path):
    state, cfg = load(make_checkpoint("glm_moe_dsa", tmp_path / "hf", index_topk_freq=1))
    assert sum("indexer.wk.weight" in n for n in state) == 4
    assert megatron("names", cfg, alternative=True) == expected(state, cfg)


@pytest.mark.parametrize("alternative", [False, True], ids=["installed", "other version"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_model_with_a_prediction_layer(family, alternative, checkpoint, tmp_path):
    """The names of its MTP layer, which are others in 0.19, and its weights there and back."""
    state, cfg = with_mtp(*load(checkpoint(family)))
    folder = write_hf(tmp_path / "hf", state, cfg)
    names = megatron("names", cfg, alternative=alternative)
    want = expected(state, cfg)
    assert sum(n.startswith("mtp.layers.0.") for n in want) > 20
    assert {n: s for n, s in names.items() if n.startswith("mtp.")} == {n: s for n, s in want.items() if n.startswith("mtp.")}
    assert names == want
    result = megatron("export", cfg, str(folder), alternative=alternative)
    assert result == {"compared": len(state), "different": []}


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3_moe", "deepseek_v3"])
def test_megatron_loads_our_torch_dist(family, checkpoint, tmp_path):
    source = HfCheckpoint(checkpoint(family))
    plan = family_for(source.config).plan(source.config, source.files)
    made = write(source, plan, tmp_path / "made")
    result = megatron("load", source.config, f"{source.folder}:{made}")
    assert result["different"] == [] and result["compared"] >= len(plan.units)


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3_moe", "deepseek_v3"])
def test_we_read_what_megatron_saved(family, checkpoint, tmp_path):
    source = HfCheckpoint(checkpoint(family))
    megatron("save", source.config, f"{source.folder}:{tmp_path}")
    for form in ("numbered", "stacked"):
        assert to_hf(TorchDist(tmp_path / form), source.folder, tmp_path / f"hf-{form}") == 0
        assert diff(source, tmp_path / f"hf-{form}").green


@pytest.fixture(scope="module", params=[("qwen2-tied", 2, 2, 1), ("qwen3_moe", 1, 2, 2)], ids=str)
def ranks(request, checkpoint, tmp_path_factory):
    """Four ranks with a real model in Megatron's own groups."""
    case, tp, pp, ep = request.param
    spec = {"hf": str(checkpoint(case)), "tp": tp, "pp": pp, "ep": ep, "store": str(tmp_path_factory.mktemp("ranks") / "store")}
    env = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with Ranks(4, "tests.weights.megatron_rank:make", spec, preload=["megatron.core", "tests.weights.megatron_models"], env=env) as made:
        made.sizes = Sizes(tp=tp, pp=pp, ep=ep, world=4)
        yield made


def test_a_real_model_is_loaded_and_gathered_bitwise(ranks):
    groups, stages = ranks.call("groups_and_stages")[0]
    want = Topology.build(ranks.sizes, 4, 8 if ranks.sizes.ep > 1 else 0)
    assert {k: sorted(g) for k, g in groups.items()} == {k: sorted(g) for k, g in want.groups.items()}
    assert stages == want.stages
    assert all(n > 0 for n in ranks.call("load"))
    assert ranks.call("export") == [[]] * 4
    ranks.call("spoil", 0, "value")  # rank 0 alone exports what it changed itself
    assert ranks.call("export")[0] == ["model.layers.0.input_layernorm.weight"]
    ranks.call("load")
    assert ranks.call("export") == [[]] * 4


@pytest.mark.parametrize(("what", "message"), [("order", "AgreementError: ranks . and . are about to send different things"),
                                               ("dtype", r"OwnershipError: decoder\.layers\.0\.input_layernorm\.weight: rank 1 ")])
def test_all_ranks_refuse_what_one_does_differently(ranks, what, message):
    if what == "dtype" and ranks.sizes.ep == 1:
        message = message.replace("rank 1", "rank .")
    ranks.call("spoil", 1, what)
    for refusal in ranks.call("refusal"):
        assert re.search(message, refusal), refusal
    ranks.call("spoil", 1, what if what == "order" else "nothing")
