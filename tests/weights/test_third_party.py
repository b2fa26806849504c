"""One forward of unpatched transformers on the round-tripped folder: equal files could share one mistake of ours."""
from __future__ import annotations

import pytest
import torch

from tests.weights.test_megatron import megatron
from tests.weights.tiny import CASES, load
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.families import family_for
from vime.weights.torch_dist.read import TorchDist, to_hf
from vime.weights.torch_dist.write import write


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3_moe", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "gemma4"])
def test_transformers_computes_the_same_logits(family, checkpoint, tmp_path):
    import transformers

    source = HfCheckpoint(checkpoint(family))
    write(source, family_for(source.config).plan(source.config, source.files, vocab_multiple=128), tmp_path / "td")
    to_hf(TorchDist(tmp_path / "td"), source.folder, tmp_path / "hf")
    model_class = getattr(transformers, CASES[family][0])
    ids = torch.arange(1, 13)[None]
    logits = []
    for folder in (source.folder, tmp_path / "hf"):
        model, report = model_class.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        with torch.no_grad():
            logits.append(model.eval()(ids).logits)
    assert torch.isfinite(logits[0]).all() and torch.equal(logits[0].view(torch.int32), logits[1].view(torch.int32))
    with torch.no_grad():  # the forward would notice
        next(model.parameters()).add_(0.5)
        assert not torch.equal(model(ids).logits, logits[0])


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3"])
def test_megatron_computes_what_transformers_computes(family, checkpoint):
    """A mistake that both directions share gives equal files, so Megatron has to run on what we loaded into it."""
    pytest.importorskip("megatron.core")
    import transformers

    folder, ids = checkpoint(family), list(range(3, 15))
    model = getattr(transformers, CASES[family][0]).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        want = model.eval()(torch.tensor([ids])).logits[0]
    scale = want.std()
    found = megatron("forward", load(folder)[1], f"{folder}:{ids}")
    off = {fault: float((torch.tensor(row["logits"], dtype=torch.float64) - want).abs().max() / scale) for fault, row in found.items()}
    assert all(row["equal"] for row in found.values())  # the round trip sees none of them
    if family == "qwen3":  # its output projection is not square, so nothing was transposed
        assert off.pop("transposed") == off["none"]
    assert off.pop("none") < 2e-3 and min(off.values()) > 0.5, off
