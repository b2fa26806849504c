"""Verdicts of the kind that a gate run ends with, for the tests of the report."""
from __future__ import annotations

import random

from alignment import pictures
from alignment.verdict import Cause, Coverage, Place, Verdict, combine

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m{{7*7}}\n../x"


def layers(bad_layer: int = 12, tokens: int = 48) -> Verdict:
    """30 layers, different from one layer and one token on."""
    rng = random.Random(0)
    grid = [[0 if r < bad_layer or c < 9 else rng.randint(1, 576) for c in range(tokens)] for r in range(30)]
    verdict = Verdict("layerwise", "FAIL", "1107/829440 elements differ", coverage={"layers": Coverage(30, 30)},
                      first_bad=Place(layer=bad_layer, module="mlp", request="p0-s1", position=9, token=284, index=(9, 31)),
                      causes=[Cause("rounded", "rounded through bf16 on one side", 0.0)],
                      downstream=[Place(layer=layer) for layer in range(bad_layer + 1, 30)],
                      stats={"differing": 1107, "max_abs": 0.00390625})
    return pictures.attach(verdict, pictures.heat("Layer x token", range(30), range(tokens), grid))


def logprobs(differing: bool = True) -> Verdict:
    rng = random.Random(1)
    a = [-abs(rng.gauss(0, 1.2)) for _ in range(96)]
    b = [x + (0.3 * (i % 13 == 7) if differing else 0) for i, x in enumerate(a)]
    differs = [x != y for x, y in zip(a, b, strict=True)]
    verdict = Verdict("logprob", "FAIL" if differing else "PASS", coverage={"tokens": Coverage(96, 96)},
                      first_bad=Place(request="p0-s0", position=7, token=11) if differing else None)
    return pictures.attach(verdict, pictures.series("Log-probabilities, request p0-s0", range(96),
                                                    {"rollout": a, "trainer": b}, differs))


def weights() -> Verdict:
    stages = ["source", "owner", "EP gather", "TP gather", "converted", "sent", "received", "loaded"]
    tensors = {f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight": dict.fromkeys(stages, "equal")
               for layer in range(2) for e in range(8)}
    for name in list(tensors)[2:4]:
        tensors[name] = {**tensors[name], "EP gather": "first", **dict.fromkeys(stages[3:], "downstream")}
    tensors["lm_head.weight"] = {"source": "equal", "owner": "equal", "loaded": "missing"}
    verdict = Verdict("weights", "FAIL", "experts 2, 3 hold 0, 1", coverage={"tensors": Coverage(17, 17)},
                      first_bad=Place(stage="EP gather", tensor=list(tensors)[2], expert=2, rank={"pp": 0, "ep": 1}))
    return pictures.attach(verdict, pictures.ledger("Weights, stage by stage", stages, tensors))


def run() -> Verdict:
    """A whole gate run, with every status."""
    good = Verdict("rerun", "PASS", coverage={"tokens": Coverage(4096, 4096)}, info={
        "nodeid": "gates/test_rerun.py::test_fresh_process", "cost": {"ratio": 1.12, "pairs": 5},
        "mutation": {"planted": 2, "caught": 2}, "happened": {"cache hits": 41},
        "controls": [{"name": "one ulp", "caught": True, "planted": "layer 3", "verdict": "FAIL", "first_bad": "layer 3"}],
        "contract": {"dtype": "bfloat16", "ops": {"linear": "cpu/linear/avx512-bf16@1", "norm": "cpu/norm@1"}},
        "versions": {"torch": "2.13.0+cpu", "vllm": "0.32.0", "megatron-core": "0.16.1"}, "device": "cpu"})
    invalid = Verdict("batch", "INVALID", "non-finite 3/3", coverage={"tokens": Coverage(3, 3)})
    missing = Verdict("ep8", "NOT_RUN", "7 GPU(s) visible, 8 needed")
    return combine("gates", [good, logprobs(), layers(), weights(), invalid, missing],
                   info={"mutation": {"planted": 2, "caught": 2}})
