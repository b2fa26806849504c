"""Our sparse attention against Megatron's own (``experimental_attention_variant="dsa"``). Its index scores and its attention, as
functions of the same rows, in both releases; with 0.19 whole models on the same weights: scores, chosen keys, attention, logits
and gradients. Megatron's is an oracle here and never gated.

What cannot be compared, and why: the FP8 cache (Megatron trains without one); the two epsilons of GLM (Megatron has one for
all RMSNorms, so these models take 1e-6 everywhere); two full layers with shared ones between (Megatron states the layers as
one offset and one frequency, so one block is compared); rotated rows themselves (Megatron leaves the pairs as halves, which no
score can see); bf16, where both round in different places (its bits have gates of their own); whole models of 0.16
(:func:`tests.megatron.suite.megatron_dsa.whole_models` says what it lacks).
"""
from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vime
from gates.synthetic import write
from gates.synthetic_experts import SPARSE
from tests.megatron.suite import kit, megatron_dsa
from vime import ops
from vime.megatron import faults, forward
from vime.megatron import model as models
from vime.weights.checkpoint import HfCheckpoint

BOUND = 1e-5  # of a score, an element of the attention's output, a logit, in fp32
SWEEP = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def test_which_releases_build_whole_models():
    import megatron.core

    assert megatron_dsa.whole_models() == (tuple(int(n) for n in megatron.core.__version__.split(".")[:2]) >= (0, 17))


@SWEEP
@given(tokens=st.integers(2, 90), heads=st.integers(1, 12), dim=st.sampled_from([8, 16, 32, 128]), seed=st.integers(0, 99))
def test_scores_agree_with_megatrons(tokens, heads, dim, seed):
    g = torch.Generator().manual_seed(seed)
    q_THD, k_SD, w_TH = (torch.randn(*shape, generator=g) for shape in ((tokens, heads, dim), (tokens, dim), (tokens, heads)))
    mine, its = ops.index_scores(q_THD, k_SD, w_TH), megatron_dsa.scores_of(q_THD, k_SD, w_TH)
    with megatron_dsa.in_float64():
        exact = megatron_dsa.scores_of(q_THD.double(), k_SD.double(), w_TH.double())
    assert exact.dtype == torch.float64 and float((mine - its).abs().max()) < BOUND
    assert float((mine - exact).abs().max()) <= 3 * float((its - exact).abs().max()) + 1e-6


@SWEEP
@given(tokens=st.integers(6, 70), heads=st.integers(1, 6), top_k=st.integers(1, 12), seed=st.integers(0, 99))
def test_attention_agrees_with_megatrons(tokens, heads, top_k, seed):
    g, value_dim = torch.Generator().manual_seed(seed), 24
    q_THD, kv_SD = torch.randn(tokens, heads, 32, generator=g), torch.randn(tokens, 32, generator=g)
    scores_TS, scale = torch.randn(tokens, tokens, generator=g), 32**-0.5
    index_TK = ops.select(scores_TS, torch.arange(1, tokens + 1), min(top_k, tokens - 1))
    found = []
    for attend, dtype in ((ops.sparse_attention, torch.float32), (megatron_dsa.attention_of, torch.float32),
                          (megatron_dsa.attention_of, torch.float64)):
        q, kv = (x.to(dtype, copy=True).requires_grad_() for x in (q_THD, kv_SD))
        with megatron_dsa.in_float64() if dtype is torch.float64 else contextlib.nullcontext():
            out = attend(q, kv, index_TK, value_dim, scale)
            out.square().sum().backward()
        found.append((out.detach(), q.grad, kv.grad))
    for mine, its, exact in zip(*found, strict=True):
        largest = max(1.0, float(exact.abs().max()))
        assert float((mine - its).abs().max()) < BOUND * largest
        assert float((mine - exact).abs().max()) <= 3 * float((its - exact).abs().max()) + 1e-6 * largest


if megatron_dsa.whole_models():  # a release without them has nothing to compare with; a skip would count as a test not run
    @pytest.fixture(scope="module")
    def pair(tmp_path_factory):
        """``pair(name)``: our model and Megatron's with the same weights, of a small model or of a gate's profile; Megatron's with
        other fields of its config, or in float64, where asked."""
        @functools.cache
        def mine(name):
            if name == "small":
                reference, config = kit.huggingface("glm_moe_dsa")
                files = kit.as_files(reference)
            else:
                config = SPARSE[name]
                held = HfCheckpoint(write(config, tmp_path_factory.mktemp("profile") / name))
                files = {n: held[n] for n in held}
            config = {**config, "rms_norm_eps": 1e-6}
            with vime.enabled():
                ours = models.build_model(config, torch.float32)
                models.load_weights(ours, files, config)
            return ours, config

        @functools.cache
        def make(name, dtype=torch.float32, **changes):
            ours, config = mine(name)
            return ours, megatron_dsa.build(config, ours.state_dict(), **changes).to(dtype)

        return make

    def look(model, sequences):
        """The same of our model as :func:`megatron_dsa.look` keeps of Megatron's."""
        scores, chosen, attention, handles, full, stock = {}, {}, {}, [], [], ops.select

        def select(scores_TS, counts_T, top_k):
            scores.setdefault(full[-1], []).append(scores_TS)
            return stock(scores_TS, counts_T, top_k)

        for i, layer in enumerate(model.decoder.layers):
            core = layer.self_attention.core_attention
            handles.append(layer.self_attention.register_forward_pre_hook(lambda m, args, i=i: full.append(i)))
            handles.append(core.register_forward_pre_hook(lambda m, args, i=i: chosen.update({i: args[2]})))
            handles.append(layer.self_attention.register_forward_hook(
                lambda m, args, out, i=i: attention.update({i: out[0].detach().flatten(0, 1)})))
        try:
            ops.select = select
            with vime.enabled():
                logits = forward.packed_logits(model, sequences)
        finally:
            ops.select = stock
            for handle in handles:
                handle.remove()
        return megatron_dsa.Seen(logits, scores, chosen, attention)

    def worst_score(ours, theirs):
        """Largest difference of a score that a query may choose by."""
        assert ours.scores.keys() == theirs.scores.keys()
        return max(float((a - b).tril().abs().max()) for i, parts in ours.scores.items() for a, b in zip(parts, theirs.scores[i], strict=True))

    def other_sets(ours, theirs):
        """(rows whose chosen keys differ, rows whose choice Megatron's own scores leave open within BOUND, keys left out)."""
        different, near, dropped, source = 0, 0, 0, None
        for i in ours.chosen:
            source = i if i in theirs.scores else source
            starts = [0]
            for part in theirs.scores[source]:
                starts.append(starts[-1] + len(part))
            for start, part in zip(starts, theirs.scores[source], strict=False):
                for t in range(len(part)):
                    mine = [r - start for r in ours.chosen[i][start + t].tolist() if r >= 0]
                    assert mine == sorted(mine)
                    its = sorted(r - start for r in theirs.chosen[i][start + t].tolist() if r >= 0)
                    dropped += t + 1 - len(its)
                    best = part[t, :t + 1].sort(descending=True).values
                    if len(its) <= t and best[len(its) - 1] - best[len(its)] < BOUND:
                        near += 1
                    else:
                        different += mine != its
        return different, near, dropped

    @pytest.mark.parametrize(("name", "lengths"), [("small", [60, 7, 33]), ("glm5.2-6layer-tiny", [70, 21])])
    def test_it_agrees_with_megatrons_own(pair, name, lengths):
        """Scores, sets, attention of every layer and logits; ours is as near to float64 as Megatron's own fp32."""
        ours, theirs = pair(name)
        sequences = kit.sequences(lengths, seed=5)
        a, b = look(ours, sequences), megatron_dsa.look(theirs, sequences)
        with megatron_dsa.in_float64():
            exact = megatron_dsa.look(pair(name, torch.float64)[1], sequences)
        assert exact.logits_TV.dtype == exact.scores[0][0].dtype == torch.float64
        different, near, dropped = other_sets(a, b)
        print(f"{name}: scores {worst_score(a, b):.1e}, keys left out {dropped}, near ties {near}, logits "
              f"{float((a.logits_TV - b.logits_TV).abs().max()):.1e}")
        assert (different, near) == (0, 0) and dropped > 1000
        assert worst_score(a, b) < BOUND
        assert a.attention.keys() == b.attention.keys() and len(a.attention) == len(ours.decoder.layers)
        for i in a.attention:
            assert float((a.attention[i] - b.attention[i]).abs().max()) < BOUND, i
        assert float((a.logits_TV - b.logits_TV).abs().max()) < BOUND
        assert torch.equal(a.logits_TV.argmax(-1), b.logits_TV.argmax(-1))
        assert other_sets(a, exact)[0] == 0
        error, its_error = (float((x.logits_TV - exact.logits_TV).abs().max()) for x in (a, b))
        assert error <= 3 * its_error + 1e-6, (error, its_error)

    @SWEEP
    @given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=4), seed=st.integers(0, 999))
    def test_it_agrees_on_any_packing(pair, lengths, seed):
        ours, theirs = pair("small")
        sequences = kit.sequences(lengths, seed)
        a, b = look(ours, sequences), megatron_dsa.look(theirs, sequences)
        assert other_sets(a, b)[0] == 0 and worst_score(a, b) < BOUND
        assert float((a.logits_TV - b.logits_TV).abs().max()) < BOUND

    def test_gradients_agree_with_megatrons_own(pair):
        ours, theirs = pair("small")
        sequences, found = kit.sequences([47, 20], seed=3), []
        ids = torch.tensor([t for s in sequences for t in s[1:]])
        rows = torch.tensor([*range(46), *range(47, 66)])
        for model, see in ((ours, look), (theirs, megatron_dsa.look)):
            model.zero_grad()
            torch.log_softmax(see(model, sequences).logits_TV[rows], -1).gather(1, ids[:, None]).mean().backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())})
            model.zero_grad()
        mine, its = found
        assert mine.keys() == its.keys() and len(mine) > 60 and not any(".indexer." in n for n in mine)
        for name, grad in mine.items():
            assert float((grad - its[name]).norm()) < 2e-5 * float(its[name].norm()), name

    @pytest.mark.parametrize("fault", ["the indexer's rotary layout", "RMSNorm epsilon", "router in bf16"])
    def test_the_oracle_tells_a_fault(pair, fault):
        ours, theirs = pair("small")
        sequences = kit.sequences([60, 7, 33], seed=5)
        undo = faults.plant(ours, fault, 2 if faults.FAULTS[fault][1] else 1)
        try:
            a = look(ours, sequences)
        finally:
            undo()
        b = megatron_dsa.look(theirs, sequences)
        assert float((a.logits_TV - b.logits_TV).abs().max()) > BOUND
        assert (other_sets(a, b)[0] > 0) == (fault == "the indexer's rotary layout")

    @pytest.mark.parametrize(("field", "value"), [("dsa_indexer_scoring_relu", False), ("dsa_indexer_rope_interleaved", False)])
    def test_megatrons_other_readings_of_the_indexer_are_not_ours(pair, field, value):
        """Megatron can leave out the ReLU or rotate halves; transformers, vLLM and we do neither for GLM."""
        ours, other = pair("small", **{field: value})
        sequences = kit.sequences([60], seed=5)
        assert other_sets(look(ours, sequences), megatron_dsa.look(other, sequences))[0] > 20
