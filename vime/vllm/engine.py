"""One vLLM engine inside this process: requests in, samples out, and a state that says whether it may generate.

States: ``ready`` -> ``updating`` -> ``ready``, or ``poisoned`` after a failed update, from which only a full update leads
back; ``empty`` until the first one where the checkpoint has no tensors. ``failed`` is final: a step of vLLM raised.
Everything here runs in one thread; :mod:`vime.vllm.loop` is the only caller.
"""
from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from typing import Any

import msgspec
import torch

from vime.contract import Contract
from vime.errors import VimeError
from vime.vllm import plugin
from vime.vllm.build import engine_arguments, prepare_process
from vime.vllm.config import EngineConfig, preflight
from vime.vllm.eager import reason
from vime.vllm.protocol import EngineError, EnginePoisoned, RecordOptions, Request, Sample, UpdateFailed
from vime.vllm.samples import sample_of, sampling_params
from vime.weights.counted import is_counted
from vime.weights.manifest import Manifest, digest_of, first_problems


class Engine:
    """See the module's docstring. Raises VimeError from the constructor with a message for a person."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ops = plugin.requested() or ()
        self.fp8 = plugin.requested_fp8()
        self.required = preflight(config, self.ops, self.fp8)
        self.eager = reason(config.model, self.ops, config.data_parallel_size) if config.graph_sizes() else None
        if self.eager:
            print(self.eager, file=sys.stderr, flush=True)
            self.config = msgspec.structs.replace(config, cuda_graphs=False)
        self.state, self.reason = "ready", ""
        self.version = 0
        self._requests: dict[str, tuple[Request, bool]] = {}  # and whether its seed is used
        self._prompt_tokens = self._cached_tokens = 0
        self._counted = config.load_format == "auto" and is_counted(config.model)  # no tensors to load
        self._build()
        if self._counted:
            self.state, self.reason = "empty", f"the weights of {config.model} lie in no file; send it a full update first"

    # -- building ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        prepare_process(self.config)
        from vllm.v1.engine.llm_engine import LLMEngine

        from vime.vllm import fp8

        started = time.perf_counter()
        arguments = engine_arguments(self.config, self.ops, dummy=self._counted)
        with fp8.keeping(bool(self.fp8) and self.config.keep_fp8_weights) as kept:
            try:
                self.engine = LLMEngine.from_engine_args(arguments)
            except torch.OutOfMemoryError as error:
                raise EngineError(f"{error}" + (f"\n{fp8.WITHOUT}." if kept else "")) from error
        self.start_s = time.perf_counter() - started
        self.worker = self.engine.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self.model = self.runner.get_model()
        fp8.note(self.model, kept)
        self._check_active()
        if stale := fp8.stale(self.model, self.config.device):
            raise EngineError(first_problems("weights changed after they were loaded", stale))
        from vime.vllm.recorder import Recorder

        self.recorder = Recorder(self.model, self.runner)
        self._warm_up()
        gc.collect()
        gc.freeze()  # what is alive now lives on: later collections need not walk it

    def _warm_up(self) -> None:
        """Generate once: kernels that are built on first use are built, and fail, before the engine says it is ready."""
        from vime.ops import registry

        self.add([Request(request_id="warm-up", prompt_token_ids=[0] * 2, max_tokens=2)])
        while self.busy:
            self.step()
        self.reset_prefix_cache()
        self._prompt_tokens = self._cached_tokens = 0
        registry.reset_counters()

    def _check_active(self) -> None:
        from vime.vllm.active import assert_active

        if (plugin.installed(), plugin.installed_fp8()) != (plugin.requested(), self.fp8):
            raise EngineError(f"{plugin.ENV} asks for {plugin.requested()}, but vLLM has loaded {plugin.installed()}. vLLM logs why "
                              "a plugin failed; check that the vime package is installed with its entry points.")
        self.places = assert_active(self.model, self.ops, self.runner) if self.ops else {}
        if self._live and self.required is not None:
            # vLLM's loaders cut a tensor that is larger than its place without a word.
            from vime.vllm.layout import EngineWeights

            problems = EngineWeights(self.model).place_problems({name: shape for name, (_, shape) in self.required.items()})
            if problems:
                raise EngineError(first_problems(f"vLLM does not hold the checkpoint {self.config.model} as it is", problems))

    # -- what it is -------------------------------------------------------------------------------------------------

    def contract(self) -> Contract:
        """The contract in effect (:func:`vime.vllm.active.build_contract`)."""
        from vime.vllm.active import build_contract

        return build_contract(self.model, self.ops, list(self.runner.kv_caches))

    def info(self) -> dict[str, Any]:
        """State, versions, model, cache and aligned operations, JSON-ready."""
        import vllm

        from vime.vllm import fp8

        cache, model = self.engine.vllm_config.cache_config, self.engine.vllm_config.model_config
        return {
            "state": self.state, "reason": self.reason, "weight_version": self.version, "ops": list(self.ops),
            "places": self.places, "fp8_layers": fp8.layers(self.model) if self.fp8 else [],
            "fp8_kept": sorted(fp8.kept(self.model)), "eager": self.eager,
            "config": msgspec.to_builtins(self.config), "pid": os.getpid(), "start_s": self.start_s,
            "versions": {"vllm": vllm.__version__, "torch": str(torch.__version__)},
            "model": {"architectures": model.hf_config.architectures, "max_model_len": model.max_model_len,
                      "vocab_size": model.get_vocab_size(), "layers": len(self.model.model.layers)},
            "cache": {"block_size": cache.block_size, "num_blocks": cache.num_gpu_blocks,
                      "prefix_caching": cache.enable_prefix_caching, "dtype": str(self.runner.kv_caches[0].dtype),
                      "kv_cache_dtype": self.contract().kv_cache_dtype},
            "threads": torch.get_num_threads(),
        }

    def stats(self) -> dict[str, Any]:
        """Counts since the start: tokens of prompts, those from the prefix cache, keys seen and dropped, calls by kernel."""
        from vime.ops import registry

        layers = [m for m in self.model.modules() if hasattr(m, "keys_dropped")]
        return {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens, "running": len(self._requests),
                "keys_seen": sum(m.keys_seen for m in layers), "keys_dropped": sum(m.keys_dropped for m in layers),
                "kernels": registry.counters(), "weight_version": self.version, "state": self.state}

    # -- generating -------------------------------------------------------------------------------------------------

    def _require_ready(self, what: str) -> None:
        if self.state == "poisoned":
            raise EnginePoisoned(f"cannot {what}: the weights cannot be trusted, since an update or a check of them failed. It said: "
                                 f"{self.reason}\nSend a full update; the engine generates again once one has succeeded.")
        if self.state != "ready":
            raise EngineError(f"cannot {what}: the engine is {self.state}" + (f": {self.reason}" if self.reason else ""))

    def add(self, requests: list[Request]) -> None:
        """Accept requests, all or none. Raises EngineError naming the first bad one, EnginePoisoned after a failed update."""
        self._require_ready("generate")
        limits = self.engine.vllm_config.model_config
        seen = set(self._requests)
        for request in requests:
            problem = request.problem(limits.get_vocab_size(), limits.max_model_len)
            if problem is None and request.request_id in seen:
                problem = "another request of this name is running"
            if problem is not None:
                raise EngineError(f"request {request.request_id!r}: {problem}")
            seen.add(request.request_id)
        seeded = self._seeds_allowed(requests)
        for request in requests:
            internal = self.engine.add_request(request.request_id, {"prompt_token_ids": list(request.prompt_token_ids)},
                                               sampling_params(request, seeded))
            self._requests[request.request_id] = request, seeded
            self.recorder.name_request(internal or request.request_id, request.request_id)

    def _seeds_allowed(self, requests: list[Request]) -> bool:
        """A stock engine on CPU crashes when a seeded prompt is prefilled in chunks; vime's sampling has no such state."""
        if "sampling" in self.ops or self.config.device != "cpu":
            return True
        tokens = sum(len(r.prompt_token_ids) + 1 for r in [*requests, *(r for r, _ in self._requests.values())])
        return tokens <= self.config.max_num_batched_tokens

    @property
    def ranks(self) -> int:
        return self.config.data_parallel_size

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def fail_for_good(self, reason: str) -> EngineError:
        """Become ``failed`` for good; the error to raise."""
        self.state, self.reason = "failed", reason
        self._requests.clear()
        return EngineError(f"the engine must be restarted: {reason}")

    def step(self) -> list[Sample]:
        """Run one step; the samples that it finished. An exception leaves the engine ``failed`` for good."""
        try:
            outputs = self.engine.step()
            if not self._unfinished(outputs):
                self._drain()
        except Exception as error:
            raise self.fail_for_good(f"a step failed: {type(error).__name__}: {error}") from error
        return [self._finish(output) for output in outputs if output.finished]

    def _unfinished(self, outputs: list[Any]) -> bool:
        return len(self._requests) > sum(output.finished for output in outputs)

    def _drain(self) -> None:
        """With asynchronous scheduling a step may run past the last request: take it in, so that nothing of it is left when
        the weights change, the cache is dropped or the next request comes."""
        core = self._core
        while getattr(core, "batch_queue", None):
            self.engine.step()
        self.recorder.forget_requests()

    @property
    def _core(self) -> Any:
        client: Any = self.engine.engine_core  # vLLM's client of an engine core in this process
        return client.engine_core

    def _overlap(self, on: bool) -> None:
        """Whether the next step is scheduled before this one ends. Off, no step computes a token past the end of a request."""
        if getattr(self._core, "batch_queue", None) is not None:
            self._core.step_fn = self._core.step_with_batch_queue if on else self._core.step

    def _finish(self, output: Any) -> Sample:
        request, seeded = self._requests.pop(output.request_id)
        sample = sample_of(output, request, seeded, self.version)
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += sample.num_cached_tokens
        return sample

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests whose caller went away. An exception leaves the engine ``failed`` for good."""
        known = [r for r in request_ids if self._requests.pop(r, None) is not None]
        if not known:
            return
        try:
            self.engine.abort_request(known)
            if not self.busy:
                self._drain()
        except Exception as error:
            raise self.fail_for_good(f"a step failed after an abort: {type(error).__name__}: {error}") from error

    # -- records, cache ---------------------------------------------------------------------------------------------

    def record(self, options: RecordOptions) -> None:
        """Record layer outputs from now on, or stop. EngineError while requests run, or for a layer that is not there."""
        if self.busy:
            raise EngineError(f"{len(self._requests)} requests are running; switch recording between rollouts")
        if options.enabled:
            self.recorder.start(options)
        else:
            self.recorder.stop()
        self._overlap(not options.enabled)

    def set_chunk(self, tokens: int | None) -> None:
        """Tokens of a step from now on, at most those the engine was built for (None): how prompts are cut into chunks."""
        limit = self.config.max_num_batched_tokens
        if tokens is not None and not 1 <= tokens <= limit:
            raise EngineError(f"chunk of {tokens} tokens; expected 1 to {limit} (max_num_batched_tokens)")
        self._core.scheduler.max_num_scheduled_tokens = tokens or limit

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix. Raises EngineError where some of its blocks are in use."""
        if not self.engine.reset_prefix_cache():
            raise EngineError("the prefix cache could not be dropped: some of its blocks are still in use")

    def sleep(self) -> None:
        """Give up the GPU memory of weights and cache. Raises EngineError on a CPU, without sleep mode, or while requests run."""
        self._require_ready("sleep")
        if self.config.device == "cpu":
            raise EngineError("vLLM has no sleep mode on CPU; leave the engine awake or shut it down")
        if not self.config.sleep_mode:
            raise EngineError("this engine was started without sleep mode; start it with --sleep-mode")
        if self.busy:
            raise EngineError(f"{len(self._requests)} requests are running; sleep between rollouts")
        held = self._everything()
        self.reset_prefix_cache()  # its blocks do not survive
        self.engine.sleep(level=1)
        self.state, self.reason, self._held = "asleep", "call wake first", held

    def wake(self) -> None:
        """Wake up, and compare the weights with those before; raises EnginePoisoned if they are others."""
        from vime.vllm import fp8

        if self.state != "asleep":
            raise EngineError(f"cannot wake: the engine is {self.state}, not asleep")
        self.state, self.reason = "poisoned", "it was woken up and its weights could not be read"
        self.engine.wake_up()
        now = self._everything()
        lost = [f"{name}: digest {now.get(name)} after waking, {digest} before" for name, digest in self._held.items() if now.get(name) != digest]
        if lost := lost + fp8.stale(self.model, self.config.device):
            self.reason = first_problems("the weights did not survive the sleep", lost)
            self._require_ready("wake")
        self.state, self.reason = "ready", ""

    def _everything(self) -> dict[str, str]:
        """Digest of every parameter and buffer, in whatever form the kernels read them."""
        tensors = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        return {name: digest_of(tensor) for name, tensor in tensors if tensor.numel()}

    # -- weights ----------------------------------------------------------------------------------------------------

    def begin_update(self, version: int, check_equal: bool) -> None:
        """Refuse early what cannot be updated; from here on the engine does not generate until an update succeeds."""
        if self.state not in ("ready", "poisoned", "empty"):
            self._require_ready("update weights")
        if self.busy:
            raise UpdateFailed(f"{len(self._requests)} requests are running; weights are replaced between rollouts only")
        if check_equal and (packed := self._packed):
            raise UpdateFailed(f"this engine computes with other weights than its parameters ({packed}), so they cannot be read back; "
                               "switch that operation on, or ask for no check (check_equal=False)")
        self.state, self.reason = "updating", f"version {version} is being received"

    @property
    def _live(self) -> bool:
        return not self._packed

    @property
    def _packed(self) -> str:
        """Which layers do not compute with their weights as they came; nothing if all do."""
        from vime.vllm.active import has_experts
        from vime.vllm.layout import converted

        if self.config.device != "cpu":
            return converted(self.model)
        if "linear" not in self.ops:
            return "stock linear layers on a CPU are packed: operation linear is off"
        return "stock experts on a CPU are packed: operation moe is off" if "moe" not in self.ops and has_experts(self.model) else ""

    def run_update(self, version: int, transport: dict[str, Any], check_equal: bool) -> dict[str, Any]:
        """Receive, verify, load, read back, drop the prefix cache, become ``version``. Any failure poisons the engine."""
        try:
            rpc = self.engine.collective_rpc
            rpc("init_weight_transfer_engine", kwargs={"init_info": {"transport": transport}})
            rpc("start_weight_update")
            rpc("update_weights", kwargs={"update_info": {"version": version, "check_equal": check_equal,
                                                          "required": self.required, "live": self._live}})
            rpc("finish_weight_update")
            self.reset_prefix_cache()
        except BaseException as error:
            self.state = "poisoned"
            self.reason = str(error) if isinstance(error, VimeError) else f"{type(error).__name__}: {error}"
            if isinstance(error, Exception):
                raise UpdateFailed(self.reason) from error
            raise
        self.version, self.state, self.reason = version, "ready", ""
        return self.worker.weight_transfer_engine.report

    def weights_digest(self) -> dict[str, Any]:
        """What the engine holds now, under the names of its checkpoint, and digests of what the last update brought."""
        from vime.vllm import fp8
        from vime.vllm.layout import EngineWeights

        if packed := self._packed:
            raise EngineError(f"this engine computes with other weights than its parameters ({packed}); they cannot be read back")
        if self.state == "asleep":
            self._require_ready("read the weights")
        if self.state == "ready" and (stale := fp8.stale(self.model, self.config.device)):  # after a failed update it refuses anyway, and says what it holds
            self.state, self.reason = "poisoned", first_problems("this engine computes with other weights than its parameters", stale)
            self._require_ready("say what it holds")
        weights = EngineWeights(self.model)
        names = [name for name in self.required or weights.parameters if weights.holds(name)]
        manifest = Manifest(version=self.version, tensors=[weights.describe(name) for name in names])
        return {"version": self.version, "digest": manifest.digest(), "tensors": msgspec.to_builtins(manifest.tensors),
                "arrived": getattr(self.worker.weight_transfer_engine, "arrived", None) or {}}
