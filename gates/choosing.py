"""The third party of a model that chooses experts or keys: unpatched ``transformers``, held to what the engine chose.

Rounding to bf16 may turn a choice over where two scores nearly tie, and everything behind it moves by a step; a bound that
allows for such steps finds nothing else. So there are two questions. Were the engine's choices right? Each is held against the
scores that ``transformers`` gives in fp32, and the worst chosen one may be below the best that was left out by no more than
twice what ``transformers`` itself mistakes these scores by when it runs in bf16. And given these choices, are the
log-probabilities right? Nothing jumps any more then, and the engine may be no farther from fp32 than :data:`FACTOR` times what
``transformers`` in bf16 is, on the same tokens.

In fp32 (:func:`engine_in_fp32`) only what ties within :data:`NEAR` may fall the other way: the contract breaks ties by the lower
id, ``transformers`` by no rule of its own.

The engine's choices get in through ``torch``'s function modes and forward hooks; no line of ``transformers`` is changed.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from alignment import layers
from alignment.verdict import Coverage, Place, Status, Verdict
from gates.harness import Harness, record
from gates.judging import same_logprobs
from gates.third_fp8 import Fp8Linears, left_of

#: How many times its own rounding in bf16 the other side may be away: both round every activation, in different places.
FACTOR = 2.0
#: Scores in fp32 that are no farther apart are a tie.
NEAR = 1e-6
#: How far logits and log-probabilities may be from ``transformers`` when both run in fp32.
BOUND_FP32 = "1e-5"
_HIDDEN = -1e30  # what a mask leaves of a score
Choices = dict[tuple[str, int], torch.Tensor]
_TopK = collections.namedtuple("_TopK", "values indices")


@dataclasses.dataclass
class Pass:
    """One pass over a sample: ``logits_TV``, what was chosen from, ``scores[(kind, layer)]`` ``[T, experts or keys]``, and how many
    of these the model takes."""

    sample: Any
    logits_TV: torch.Tensor
    scores: Choices
    taken: dict[tuple[str, int], int]

    def logprobs(self) -> torch.Tensor:
        """Of every token but the first, ``[T]``."""
        ids = torch.tensor([*self.sample.prompt_token_ids, *self.sample.token_ids])[1:]
        return self.logits_TV.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]

    def sampled(self) -> torch.Tensor:
        """Of the sampled tokens, ``[R]``."""
        return self.logprobs()[self.start:]

    def best(self) -> torch.Tensor:
        """Of this model's own best tokens in their places, ``[R]``."""
        return self.logits_TV[self.start:].float().log_softmax(-1).max(1).values

    @property
    def start(self) -> int:
        return len(self.sample.prompt_token_ids) - 1


class _Held(TorchFunctionMode):
    """While a module that chooses runs, its ``topk`` is looked at and answered with the given choice."""

    def __init__(self, chosen: Choices, experts: int) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.at: tuple[str, int] | None = None
        self.scores: Choices = {}
        self.taken: dict[tuple[str, int], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.at is None or getattr(func, "__name__", "") != "topk" or not self._decides(args[0]):
            return func(*args, **(kwargs or {}))
        self.taken[self.at] = kwargs["k"] if kwargs and "k" in kwargs else args[1]
        self.scores[self.at] = args[0].detach().reshape(-1, args[0].shape[-1]).float().cpu()
        index = self.chosen[self.at].to(args[0].device).view(*args[0].shape[:-1], -1)
        return _TopK(args[0].gather(-1, index), index)

    def _decides(self, scores: torch.Tensor) -> bool:
        """A router ranks groups of experts too; what it decides by is over all experts."""
        return self.at is not None and (self.at[0] == "index" or (scores.dim() == 2 and scores.shape[1] == self.experts))


class Held:
    """``transformers`` of a folder in fp32 and, of weights in bf16, in bf16 as well.

    Args:
        weights: what the folder's weights are rounded to.
        fp8_linear: evaluate linear layers and experts in block FP8 (:mod:`gates.third_fp8`).
        fp8_cache: round the compressed rows of latent attention as the contract says of the FP8 cache; ``transformers`` has none.
        device: where it runs. Products in fp32 are of fp32 on a GPU too: TF32 stays off, as torch has it.
    """

    def __init__(self, folder: Any, weights: torch.dtype, fp8_cache: bool = False, device: str = "cpu", fp8_linear: bool = False) -> None:
        import transformers

        from vime.latent import experts, latent

        if torch.get_float32_matmul_precision() != "highest":
            raise RuntimeError("products of fp32 are made in a smaller format in this process; a third party in fp32 is to be exact")
        self.models, self.device = {}, torch.device(device)
        # On a GPU its experts one by one: its grouped form is made for bf16. So too where their products are to be seen.
        by_one = self.device.type == "cuda" or fp8_linear
        plain = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if by_one else {})}
        for dtype in dict.fromkeys((torch.float32, weights)):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain).eval().to(self.device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.to(weights))
            if fp8_cache:
                for name, module in model.named_modules():
                    if name.endswith(".kv_a_layernorm"):
                        module.register_forward_hook(lambda m, args, out: through_fp8(out))
            self.models[dtype] = model
        self.quantising = {dtype: Fp8Linears(model) if fp8_linear else contextlib.nullcontext() for dtype, model in self.models.items()}
        config = self.models[torch.float32].config.to_dict()
        found, mla = experts(config), latent(config)
        self.experts = found.count if found else 0
        full = mla.indexer.full if mla and mla.indexer else ()
        self.full = tuple(i for i, computes in enumerate(full) if computes)

    def run(self, dtype: torch.dtype, sample: Any, chosen: Choices) -> Pass:
        """A pass over a sample's tokens but the last one, of which the engine computed nothing, with these choices."""
        model, held, handles = self.models[dtype], _Held(chosen, self.experts), []
        for name, module in model.named_modules():
            kind = "index" if name.endswith(".indexer") else "routing" if name.endswith(".mlp.gate") else ""
            if kind:
                at = (kind, int(name.split(".")[2]))
                handles += [module.register_forward_pre_hook(lambda m, args, at=at: setattr(held, "at", at)),
                            module.register_forward_hook(lambda m, args, out: setattr(held, "at", None))]
        try:
            with torch.no_grad(), self.quantising[dtype], held:
                ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids[:-1]]], device=self.device)
                logits_TV = model(ids).logits[0].cpu()
        finally:
            for handle in handles:
                handle.remove()
        if chosen.keys() != held.scores.keys():
            raise RuntimeError(f"the engine recorded the choices {sorted(chosen)}, transformers made {sorted(held.scores)}")
        return Pass(sample, logits_TV, held.scores, held.taken)


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    """What an FP8 cache leaves of compressed rows ``[..., D]``: blocks of 128, in the dtype of ``x``."""
    return left_of(x.reshape(-1, x.shape[-1]), 1).view(x.shape).to(x.dtype)


def recorded(harness: Harness, client: Any, prompts: bool = False, **options: Any) -> tuple[list[Any], Any]:
    """A sample of each of some prompts, every other one greedy, and the engine's records of what it chose for each of their
    tokens (and, with ``logits=True``, of the logits they were sampled from). ``prompts``: with log-probabilities of those, too."""
    requests = harness.requests(2 * harness.profile.prompts, tag="third")
    requests = [msgspec.structs.replace(r, temperature=float(i % 2), prompt_logprobs=prompts) for i, r in enumerate(requests)]
    client.record(True, embedding=False, final_norm=False, routing=True, **options)
    try:
        client.reset_prefix_cache()
        return client.generate(requests), client.fetch_records()
    finally:
        client.record(False)


def verdicts(harness: Harness) -> Iterator[Verdict]:
    """What unpatched ``transformers``, on the engine's device, says of the running engine, which must hold the weights of the
    checkpoint in bf16."""
    held = Held(harness.folder, torch.bfloat16, harness.config.kv_cache_dtype == "fp8_e4m3", harness.device, harness.config.fp8 == "blockwise")
    yield from judge(held, *recorded(harness, harness.session.client))


def choices(records: Any, sample: Any, full: Sequence[int]) -> Choices:
    """What the engine chose at each position of a sample: ``("routing", layer)`` and, of layers that compute it,
    ``("index", layer)``, int64 ``[T, K]``. A row that may read fewer than ``K`` keys repeats its own position."""
    row_of = {position: row for row, (request, position, _) in enumerate(records.rows) if request == sample.request_id}
    order_T = torch.tensor([row_of[p] for p in range(len(sample.prompt_token_ids) + len(sample.token_ids) - 1)])
    out = {}
    for name, tensor in records.tensors.items():
        _, layer, kind = [*name.split("."), "", ""][:3]
        if kind == "routing" or (kind == "index" and int(layer) in full):
            rows_TK = tensor[order_T].long()
            out[kind, int(layer)] = torch.where(rows_TK >= 0, rows_TK, torch.arange(len(order_T))[:, None])
    return out


def shortfall(scores_TN: torch.Tensor, chosen_TK: torch.Tensor, k: int) -> torch.Tensor:
    """How far the worst chosen one is below the last of the ``k`` best, ``[T]``; 0 where these were chosen, infinite where not as
    many were chosen as can be, or where a score is no number."""
    count_T = torch.zeros_like(scores_TN, dtype=torch.bool).scatter_(1, chosen_TK, True).sum(1)
    wanted_T = (scores_TN > _HIDDEN).sum(1).clamp(max=k)
    last_T = scores_TN.sort(1, descending=True).values.gather(1, wanted_T[:, None] - 1)[:, 0]
    short_T = (last_T - scores_TN.gather(1, chosen_TK).min(1).values).clamp(min=0)
    return torch.where((count_T == wanted_T) & ~scores_TN.isnan().any(1), short_T, float("inf"))


def judge(held: Held, samples: Sequence[Any], records: Any) -> Iterator[Verdict]:
    """Verdicts on the choices, on the log-probabilities, and on the greedy tokens of every other sample; bf16."""
    chosen = [choices(records, s, held.full) for s in samples]
    exact, own = ([held.run(dtype, s, c) for s, c in zip(samples, chosen, strict=True)] for dtype in (torch.float32, torch.bfloat16))

    def noise(at: tuple[str, int]) -> float:
        return 2 * max(float((a.scores[at] - b.scores[at])[a.scores[at] > _HIDDEN].abs().max()) for a, b in zip(exact, own, strict=True))

    yield _choices("third party, choices", chosen, exact, {at: noise(at) for at in chosen[0]})
    off = max(float((a.sampled() - b.sampled()).abs().max()) for a, b in zip(exact, own, strict=True))
    bound = f"{FACTOR * off:.3g}"
    verdict = same_logprobs(samples, [record(p.sample, p.sampled().numpy()) for p in exact], "third party, given its choices", bound,
                            ("rollout", "transformers"))
    verdict.info["its own rounding"] = off
    yield verdict
    took, best = ([record(p.sample, side(p).numpy()) for p in exact[::2]] for side in (Pass.sampled, Pass.best))
    yield same_logprobs(took, best, "third party, greedy tokens, given its choices", bound, ("chosen", "transformers' best"))


def engine_in_fp32(harness: Harness) -> Iterator[Verdict]:
    """The engine itself, in fp32 on the checkpoint's weights, beside ``transformers`` in fp32: experts and keys the same at every
    position, greedy tokens the same, and within :data:`BOUND_FP32` the logits that each token was sampled from and the
    log-probability of every token of the prompts."""
    plain = Harness(harness.profile, "cpu", "float32", kv_cache_dtype="auto")
    with plain.another_engine() as client:
        samples, records = recorded(plain, client, prompts=True, logits=True)
    held, row_of = Held(plain.folder, torch.float32), {key[:2]: row for row, key in enumerate(records.logit_rows)}
    chosen = [choices(records, s, held.full) for s in samples]
    theirs = [held.run(torch.float32, s, c) for s, c in zip(samples, chosen, strict=True)]
    yield _choices("third party, choices in fp32", chosen, theirs, dict.fromkeys(chosen[0], NEAR))
    rows = [row_of[p.sample.request_id, p.start + i] for p in theirs for i in range(len(p.sample.token_ids))]
    sides = [{"logits": records.tensors["logits"][rows], "prompts": torch.cat([torch.tensor(s.prompt_logprobs) for s in samples])[:, None]},
             {"logits": torch.cat([p.logits_TV[p.start:] for p in theirs]),
              "prompts": torch.cat([p.logprobs()[:p.start] for p in theirs])[:, None]}]
    yield layers.judge(*sides, name="third party, logits in fp32", tier=BOUND_FP32)
    other = [Place(request=p.sample.request_id, position=p.start + 1 + i, token=token) for p in theirs[::2]
             for i, token in enumerate(p.sample.token_ids) if int(p.logits_TV[p.start + i].argmax()) != token]
    of = Coverage(*[sum(len(s.token_ids) for s in samples[::2])] * 2)
    yield Verdict("third party, greedy tokens in fp32", Status.FAIL if other else Status.PASS,
                  f"{len(other)} of {of.expected} are not transformers' best" if other else "", coverage={"tokens": of},
                  first_bad=other[0] if other else None)


def _choices(name: str, chosen: Sequence[Choices], exact: Sequence[Pass], allowed: dict[tuple[str, int], float]) -> Verdict:
    rows = turned = 0
    worst: dict[str, tuple[float, float]] = {}
    first, reason = None, ""
    for kind, layer in sorted(allowed, key=lambda at: (at[1], at[0])):
        short = [shortfall(p.scores[kind, layer], c[kind, layer], p.taken[kind, layer]) for p, c in zip(exact, chosen, strict=True)]
        rows, turned = rows + sum(len(s) for s in short), turned + sum(int((s > 0).sum()) for s in short)
        most = max(range(len(short)), key=lambda i: float(short[i].max()))
        found, most_allowed = float(short[most].max()), allowed[kind, layer]
        worst[f"layers.{layer}.{kind}"] = (found, most_allowed)
        if first is None and not found <= most_allowed < float("inf"):  # so written, a rounding that is no number allows nothing
            first = Place(request=exact[most].sample.request_id, position=int(short[most].argmax()), layer=layer, module=kind)
            reason = f"what it chose is {found:.3g} below what it left out; {most_allowed:.3g} is within rounding"
    print(f"{name}: {turned} of {rows} were near ties by transformers' own scores and fell the other way")
    return Verdict(name, Status.FAIL if first else Status.PASS, reason, tier="within rounding", first_bad=first,
                   coverage={"third-party choices": Coverage(rows, rows)}, info={"turned over": turned, "below the best, allowed": worst})
