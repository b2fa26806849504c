"""One trainer and one engine, up for a whole gate session, and what the gates ask of them.

The two are separate processes that share no storage (:class:`vime.rl.session.Session`): a Megatron model in the ranks
of a pool, a vLLM engine behind HTTP. This module turns what each of them wrote down into what :mod:`alignment`
compares, and judges nothing.
"""
from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gates.profiles import Profile

if TYPE_CHECKING:
    import torch

    from vime.rl.batch import Trajectory
    from vime.rl.session import Session
    from vime.rl.sync import Update
    from vime.vllm.protocol import Request, Sample

#: Tokens of one scheduler step of the engine: small, so that prompts are prefilled in chunks.
CHUNK = 64


@dataclasses.dataclass
class Layers:
    """Layer outputs of one side: ``outputs[name]`` is ``[T, width]``; ``rows[t]`` = (request, position, token)."""

    outputs: dict[str, torch.Tensor]
    rows: list[tuple[str, int, int]]

    def tokens(self) -> dict[str, dict[str, list[int]]]:
        """request -> token ids and positions, for :func:`alignment.match.judge`."""
        out: dict[str, dict[str, list[int]]] = {}
        for request, position, token in self.rows:
            record = out.setdefault(request, {"token_ids": [], "positions": []})
            record["token_ids"].append(token)
            record["positions"].append(position)
        return out


def run_settings(profile: Profile, device: str) -> dict[str, Any]:
    """Fields of :class:`vime.rl.config.TrainConfig` by profile and device, beside those that a gate sets."""
    longest = profile.prompt_tokens + profile.response_tokens
    fields = {"lr": profile.lr, "max_model_len": max(256, 2 * longest), "max_num_batched_tokens": CHUNK, "kv_cache_gib": 0.25,
              **profile.train}
    if device == "cuda":  # both sides share one GPU, which NCCL refuses
        fields["update_weight_transport"] = "ipc"
    return fields


class Harness:
    """See the module's docstring. A context manager.

    Args:
        profile: what to run.
        device, dtype: ``"cpu"`` or ``"cuda"``; ``"bfloat16"`` or ``"float32"``.
        ops: operations that are aligned on both sides: None for all, ``()`` for none (vime off).
        changes: further fields of :class:`vime.rl.config.TrainConfig`.
    """

    def __init__(self, profile: Profile, device: str, dtype: str, *, ops: tuple[str, ...] | None = None, **changes: Any) -> None:
        from vime.rl.config import TrainConfig, read_hf_config

        self.profile, self.device, self.dtype = profile, device, dtype
        self.folder = profile.checkpoint()
        self.vocab = int(read_hf_config(self.folder)["vocab_size"])
        self.config = TrainConfig(hf_checkpoint=str(self.folder), dtype=dtype, device=device, ops=ops,
                                  **{**run_settings(profile, device), **changes})
        self.version = 0
        self.unsent = False  # the trainer took a step that the engine has not got
        self.session: Session
        self._logs = tempfile.mkdtemp(prefix="vime-gates-")
        self._tidy = weakref.finalize(self, shutil.rmtree, self._logs, ignore_errors=True)
        self._starts = 0
        self._digests: dict[str, str] = {}

    def __enter__(self) -> Harness:
        from vime.rl.session import Session

        self._starts += 1
        self.session = Session(self.config, self.logs / str(self._starts))
        try:
            self.session.__enter__()
        except Exception:
            if any(self.logs.rglob("*.log")):
                self._tidy.detach()  # the error may name one
            raise
        self.version, self.unsent, self._digests = 0, False, {}
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    @property
    def logs(self) -> Path:
        """Folder with the logs of both sides, a subfolder a start; it goes with this object, and stays where a start failed."""
        return Path(self._logs)

    def restart(self) -> None:
        """Fresh processes on both sides, with the weights of the checkpoint."""
        self.session.__exit__(None, None, None)
        self.__enter__()

    def pristine(self) -> None:
        """Make sure both sides hold the weights of the checkpoint."""
        if self.version or self.unsent:
            self.restart()

    def in_step(self) -> None:
        """Make sure both sides hold the same weights, whichever gate trained last."""
        if self.unsent:
            self.update()

    # --- input --------------------------------------------------------------------------------------------------

    def requests(self, prompts: int, samples: int = 1, *, tag: str = "r", temperature: float = 1.0) -> list[Request]:
        """``prompts`` prompts of different lengths with ``samples`` samples each, every one with its own seed.

        Names are ``<tag><prompt>.<sample>``. The tokens of a prompt depend on its number only, not on ``tag``.
        """
        from vime.rl.seeds import sample_seed
        from vime.vllm.protocol import Request

        out = []
        for p in range(prompts):
            draw = random.Random(p)
            length = 3 + (self.profile.prompt_tokens - 3) * (p + 1) // prompts
            ids = [draw.randrange(self.vocab) for _ in range(length)]
            out += [Request(request_id=f"{tag}{p}.{s}", prompt_token_ids=ids, max_tokens=self.profile.response_tokens,
                            temperature=temperature, seed=sample_seed(self.config.seed, str(p), s)) for s in range(samples)]
        return out

    # --- the engine ---------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], *, cold: bool = True) -> list[Sample]:
        """Samples in the order of ``requests``; ``cold`` drops the prefix cache first."""
        if cold:
            self.session.client.reset_prefix_cache()
        return self.session.client.generate(list(requests))

    @contextlib.contextmanager
    def another_engine(self, **options: Any) -> Iterator[Any]:
        """A second engine on the same checkpoint with other options (chunk size, block size): its client."""
        from vime.rl.config import engine_env
        from vime.rl.sync import fill
        from vime.vllm.launch import launch_engine
        from vime.vllm.plugin import ROUTED

        config = self.config
        settings = {"max_num_batched_tokens": CHUNK, "max_model_len": config.max_model_len,
                    "kv_cache_bytes": int(config.kv_cache_gib * 2**30), "kv_cache_dtype": config.kv_cache_dtype,
                    "cuda_graphs": not config.enforce_eager, "keep_fp8_weights": config.vllm_keep_fp8_weights, **options}
        with launch_engine(config.hf_checkpoint, device=config.device, dtype=config.dtype, env=engine_env(config),
                           ops=ROUTED if config.ops is None else config.ops, fp8=config.fp8, **settings) as engine:
            if engine.client.health()["state"] == "empty":  # its weights lie in no file
                fill(config, self.session.pool, engine.client, (engine.url, engine.token))
            yield engine.client

    def engine_layers(self, requests: Sequence[Request], client: Any = None) -> tuple[list[Sample], Layers]:
        """Sample with the recorder on, from a cold cache, so that every position is computed and recorded; on the session's
        engine, or on that of ``client``."""
        client = client or self.session.client
        client.record(True, embedding=False)
        try:
            client.reset_prefix_cache()
            samples = client.generate(list(requests))
            records = client.fetch_records()
        finally:
            client.record(False)
        names = sorted((n for n in records.tensors if n.startswith("layers.")), key=lambda n: int(n.split(".")[1]))
        outputs = {name: records.tensors[name] for name in [*names, "final_norm"]}
        return samples, Layers(outputs, list(records.rows))

    # --- the trainer --------------------------------------------------------------------------------------------

    def logprobs(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """The trainer's log-probabilities of exactly the sampled tokens, as records."""
        batch = [self._trajectory(s) for s in samples]
        return [record(s, lp) for s, lp in zip(samples, self.session.pool.logprobs(batch), strict=True)]

    def trainer_layers(self, samples: Sequence[Sample]) -> Layers:
        """Layer outputs of every token that both sides compute: all but the terminal position of each request, whose
        token was sampled last and is never fed to the engine."""
        import torch

        from vime.rl.packing import split_among

        batch = [self._trajectory(s) for s in samples]
        pool = self.session.pool
        parts = pool.record_layers(batch)
        names: list[str] = []
        rows: list[tuple[str, int, int]] = []
        keep: list[torch.Tensor] = []
        for share, part in zip(split_among(len(batch), pool.world_size), parts, strict=True):
            last = torch.tensor([len(batch[i].token_ids) - 1 for i in share])
            keep.append(part.position_T < last[part.sequence_T])
            rows += [(batch[share[s]].request_id, p, t) for s, p, t, k in zip(
                part.sequence_T.tolist(), part.position_T.tolist(), part.token_T.tolist(), keep[-1].tolist(), strict=True) if k]
            names = [n for n in part.outputs if n != "logits"]
        outputs = {n: torch.cat([part.outputs[n].cpu()[k] for part, k in zip(parts, keep, strict=True)]) for n in names}
        return Layers(outputs, rows)

    @contextlib.contextmanager
    def flipped(self, name: str, index: int = 0, bit: int = 0) -> Iterator[None]:
        """One bit of one weight of the trainer flipped (Megatron's name), and flipped back at the end."""
        self.session.pool.ranks.call("flip_bit", name, index, bit)
        try:
            yield
        finally:
            self.session.pool.ranks.call("flip_bit", name, index, bit)

    # --- a step of the loop -------------------------------------------------------------------------------------

    def train(self, samples: Sequence[Sample], group: int) -> Any:
        """One optimizer step on the samples, in groups of ``group``. Rewards vary within each group by construction.

        Returns the statistics of rank 0, with what every rank counted (``ratio_off``) and found (``without_gradient``).
        """
        from vime.rl.advantage import grpo_advantages, varied_groups

        rewards = [[float((i + g) % 2) for i in range(group)] for g in range(len(samples) // group)]
        batch = [self._trajectory(s) for s in samples]
        for t, advantage, old in zip(batch, [a for g in grpo_advantages(rewards) for a in g],
                                     self.session.pool.logprobs(batch), strict=True):
            t.advantage, t.old_logprobs = advantage, old
        self.unsent = True
        with self.session.trainer_alone():
            stats = self.session.pool.train_step(batch)
        self.varied = varied_groups(rewards)
        return dataclasses.replace(stats[0], ratio_off=sum(s.ratio_off for s in stats),
                                   without_gradient=sorted({name for s in stats for name in s.without_gradient}))

    def update(self) -> Update:
        """The trainer's weights into the running engine, as the next version."""
        from vime.rl.sync import update_weights

        before = self._digests or self.engine_digests()
        done = update_weights(self.config, self.session.pool, self.session.client, self.session.engine_address,
                              self.version + 1, before)
        self.version, self.unsent, self._digests = done.version, False, done.trainer
        return done

    def engine_digests(self) -> dict[str, str]:
        """HF name -> digest, of what the engine holds."""
        return {t["name"]: t["digest"] for t in self.session.client.weights_digest()["tensors"]}

    def trainer_digests(self) -> dict[str, str]:
        """HF name -> digest, of what the trainer holds."""
        return self.session.pool.named_weights_digest()

    # --- what ran -----------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Model, contract, versions and kernels, for the report and the evidence."""
        from alignment import machine

        contract = self.session.pool.contract()
        return {
            "model": self.profile.name, "dtype": self.dtype, "topology": self.profile.topology,
            "contract": {"fingerprint": contract.fingerprint(), **contract.to_dict()}, "versions": machine.versions(),
            "hardware": machine.hardware(),
            "kernels": {"engine": self.session.client.stats()["kernels"], "trainer": self.session.pool.counters()},
        }

    def _trajectory(self, sample: Sample) -> Trajectory:
        import numpy as np

        from vime.rl.batch import Trajectory

        prompt, _, index = sample.request_id.rpartition(".")
        return Trajectory(sample.request_id, prompt, int(index), sample.prompt_token_ids + sample.token_ids,
                          len(sample.prompt_token_ids), np.array(sample.logprobs, dtype=np.float32), sample.weight_version)


def record(sample: Sample, logprobs: Any = None) -> dict[str, Any]:
    """A sample as :mod:`alignment` reads it; ``logprobs`` (fp32 ``[R]``) replaces the engine's own."""
    import numpy as np

    values = np.array(sample.logprobs, dtype=np.float32) if logprobs is None else logprobs
    return {"request_id": sample.request_id, "prompt_token_ids": sample.prompt_token_ids, "token_ids": sample.token_ids,
            "logprobs": values}
