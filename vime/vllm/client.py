"""The controller's view of an engine: plain calls over HTTP, and one clear error when the engine is gone."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from vime.contract import Contract
from vime.vllm.protocol import ERRORS, EngineDied, EngineError, RecordOptions, Request, Sample

if TYPE_CHECKING:
    from vime.vllm.records import EngineRecords

#: The engine gives a sign of life every second while it generates; this long without one means it is gone.
SILENCE_S = 20.0


class EngineClient:
    """Talks to one engine.

    Args:
        url: ``http://host:port``.
        token: bearer token, if the engine wants one.
        timeout: longest wait in seconds for a call that does not stream (a weight update is the longest).
        explain: called when the connection breaks; returns what is known of the process (exit code, end of its log).

    Every method raises EngineDied when the engine is gone, and EngineError (or a subclass named by the engine) when it
    refuses.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 600.0,
                 explain: Callable[[], str] | None = None) -> None:
        self.url = url
        self._explain = explain
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=url, headers=headers, trust_env=False,
                                  timeout=httpx.Timeout(timeout, connect=10.0))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what it is --

    def health(self) -> dict[str, Any]:
        """State, reason, weight version, pid; answered even while the engine is busy."""
        return self._call("GET", "/health")

    def info(self) -> dict[str, Any]:
        """Versions, model config, cache config, aligned operations."""
        return self._call("GET", "/info")

    def stats(self) -> dict[str, Any]:
        """Prompt tokens, tokens served from the prefix cache, calls by kernel, state."""
        return self._call("GET", "/stats")

    def contract(self) -> Contract:
        """The contract in effect in the engine."""
        return Contract.from_dict(self._call("GET", "/contract"))

    def handshake(self, contract: Contract) -> str:
        """Compare the trainer's contract with the engine's; returns the shared fingerprint.

        Raises:
            ContractMismatch: names every differing field.
        """
        theirs = self.contract()
        contract.require_equal(theirs)
        return theirs.fingerprint()

    # -- generating --

    def generate(self, requests: list[Request], on_result: Callable[[Sample], None] | None = None) -> list[Sample]:
        """Samples in the order of ``requests``; ``on_result`` is called with each as soon as it is finished."""
        names = [r.request_id for r in requests]
        if len(set(names)) != len(names):
            raise EngineError("two requests have the same request_id; samples are matched by it")
        if not requests:
            return []
        done: dict[str, Sample] = {}
        timeout = httpx.Timeout(SILENCE_S, connect=10.0)
        try:
            with self._http.stream("POST", "/generate", content=msgspec.json.encode(requests), timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    self._raise(response)
                for line in response.iter_lines():
                    self._take(line, done, on_result)
        except httpx.TransportError as error:
            raise self._died(error) from error
        missing = [n for n in names if n not in done]
        if missing:
            raise EngineDied(f"the engine at {self.url} ended the stream with {len(missing)} of {len(names)} samples missing, "
                             f"the first {missing[0]!r}")
        return [done[n] for n in names]

    def _take(self, line: str, done: dict[str, Sample], on_result: Callable[[Sample], None] | None) -> None:
        if not line.strip():
            return
        try:
            item = json.loads(line)
        except ValueError:
            raise EngineError(f"the engine at {self.url} answered a line that is not JSON: {line[:200]!r}") from None
        if not isinstance(item, dict):
            raise EngineError(f"the engine at {self.url} answered {line[:200]!r}, expected an object with a sample or an error")
        if "error" in item:
            raise ERRORS.get(item["error"], EngineError)(item["message"])
        if "sample" in item:
            sample = self._sample(item["sample"])
            done[sample.request_id] = sample
            if on_result is not None:
                on_result(sample)

    def _sample(self, found: Any) -> Sample:
        """JSON has no NaN and no infinity: the engine's come as null, and say which token they belong to."""
        try:
            return msgspec.convert(found, Sample)
        except msgspec.ValidationError as error:
            for field, tokens in (("logprobs", "token_ids"), ("prompt_logprobs", "prompt_token_ids")):
                values = found.get(field) if isinstance(found, dict) else None
                if isinstance(values, list) and None in values:
                    at, ids = values.index(None), found.get(tokens)
                    after = at + (field == "prompt_logprobs")
                    token = f" (token {ids[after]})" if isinstance(ids, list) and after < len(ids) else ""
                    raise EngineError(
                        f"{values.count(None)} of {len(values)} {field} of request {found.get('request_id')!r} are not finite (NaN or infinite), "
                        f"the first at index {at}{token}; expected finite numbers: nothing can be compared with them. Look for the first "
                        "non-finite layer output (vime gate layerwise), or for weights or scales that were not loaded") from None
            raise EngineError(f"the engine at {self.url} answered something that is no sample ({error})") from None

    # -- records --

    def record(self, enabled: bool = True, layers: list[int] | None = None, embedding: bool = True, final_norm: bool = True,
               logits: bool = False, routing: bool = False) -> None:
        """Record layer outputs from now on (``layers`` None: all), or stop."""
        options = RecordOptions(enabled=enabled, layers=layers, embedding=embedding, final_norm=final_norm, logits=logits,
                                routing=routing)
        self._call("POST", "/record", msgspec.to_builtins(options))

    def fetch_records(self) -> EngineRecords:
        """Everything recorded since recording began or the last fetch; empties the engine's store. Needs torch."""
        from vime.vllm.records import EngineRecords

        return EngineRecords.from_bytes(self._request("GET", "/records").content)

    # -- weights --

    def begin_update(self, version: int, transport: dict[str, Any], check_equal: bool = True) -> None:
        """Tell the engine where weights will come from. Until :meth:`finish_update` succeeds it refuses to generate."""
        self._call("POST", "/update/begin", {"version": version, "transport": transport, "check_equal": check_equal})

    def finish_update(self, version: int) -> dict[str, Any]:
        """Wait for the update; the engine's report. Raises UpdateFailed with the engine's reason."""
        return self._call("POST", "/update/finish", {"version": version})

    def weights_digest(self) -> dict[str, Any]:
        """Digest of every tensor as the engine holds it: version, digest, tensors (name, dtype, shape, digest)."""
        return self._call("GET", "/weights")

    # -- the rest --

    def set_chunk(self, tokens: int | None) -> None:
        """Tokens of a step from now on: longer prompts are prefilled in chunks. None restores the engine's own limit."""
        self._call("POST", "/chunk", {"tokens": tokens})

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix. EngineError where requests still use some."""
        self._call("POST", "/reset_prefix_cache")

    def sleep(self) -> None:
        """Give up the GPU memory of weights and cache until :meth:`wake`; the engine refuses to generate meanwhile."""
        self._call("POST", "/sleep")

    def wake(self) -> None:
        """Take the memory back. EnginePoisoned where the weights are not those from before."""
        self._call("POST", "/wake")

    def shutdown(self) -> None:
        """Ask the engine process to end."""
        self._call("POST", "/shutdown")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return self._request(method, path, body).json()

    def _request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body) if body is not None else self._http.request(method, path)
        except httpx.TransportError as error:
            raise self._died(error) from error
        if response.status_code != 200:
            self._raise(response)
        return response

    def _raise(self, response: httpx.Response) -> None:
        try:
            body = response.json()
            name, message = body["error"], body["message"]
        except (ValueError, KeyError, TypeError):
            raise EngineError(f"{self.url} answered {response.status_code}: {response.text[:500]}") from None
        raise ERRORS.get(name, EngineError)(message)

    def _died(self, error: Exception) -> EngineDied:
        known = self._explain() if self._explain is not None else "It was started elsewhere; look at its log."
        return EngineDied(f"the engine at {self.url} is gone ({type(error).__name__}: {error}). {known}")
