"""The engine process: ``python -m vime.vllm.server --model DIR``.

vLLM runs in the main thread, HTTP in another; commands cross over in one queue, so the engine is never touched by two
threads. Listens on 127.0.0.1 unless told otherwise, and beyond it only with a bearer token. A generation is answered as a
stream of JSON lines: a sample as soon as it is finished, and a sign of life every second.
"""
from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import msgspec
import typer

from vime.errors import is_for_people, plain
from vime.vllm.config import EngineConfig
from vime.vllm.engine import Engine
from vime.vllm.loop import Loop
from vime.vllm.protocol import EngineError, RecordOptions, Request, Sample

HEARTBEAT_S = 1.0
TOKEN_ENV = "VIME_ENGINE_TOKEN"
_json = msgspec.json.Encoder()


def build_app(loop: Loop, token: str | None) -> Any:
    """The HTTP surface. Errors are JSON ``{"error": class name, "message": text}``."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    engine = loop.engine
    updates: dict[int, concurrent.futures.Future[Any]] = {}

    async def call(function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(loop.submit(function))

    def failure(error: Exception) -> Response:
        name = type(error).__name__ if is_for_people(error) else "EngineError"
        text = str(error) if is_for_people(error) else f"{type(error).__name__}: {error}"
        if not is_for_people(error):
            traceback.print_exception(error)
        return JSONResponse({"error": name, "message": text}, status_code=409 if is_for_people(error) else 500)

    def route(path: str, handler: Callable[[Any], Any], method: str) -> Route:
        async def guarded(request: Any) -> Response:
            if token is not None and not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {token}"):
                return JSONResponse({"error": "EngineError", "message": "wrong or missing bearer token"}, status_code=401)
            try:
                result = await handler(request)
                return result if isinstance(result, Response) else Response(_json.encode(result), media_type="application/json")
            except Exception as error:
                return failure(error)

        return Route(path, guarded, methods=[method])

    async def health(request: Any) -> Any:
        return {"state": engine.state, "reason": engine.reason, "weight_version": engine.version, "pid": os.getpid()}

    async def generate(request: Any) -> Any:
        try:
            requests = msgspec.json.decode(await request.body(), type=list[Request])
        except msgspec.MsgspecError as error:
            raise EngineError(f"not a list of requests: {error}") from error
        here = asyncio.get_running_loop()
        results: asyncio.Queue[Sample | Exception] = asyncio.Queue()

        def deliver(item: Sample | Exception) -> None:
            here.call_soon_threadsafe(results.put_nowait, item)

        waiting = set[str]()

        def start() -> None:
            loop.start_requests(requests, deliver)
            waiting.update(r.request_id for r in requests)

        def leave() -> None:
            """After :func:`start`, in the same thread: forget what has not been answered."""
            if waiting:
                loop.drop_requests(sorted(waiting), deliver)

        try:
            await call(start)
        except asyncio.CancelledError:
            loop.submit(leave)
            raise
        return Streamed(_stream(waiting, results), leave)

    class Streamed(StreamingResponse):
        """Calls ``leave`` however it ends: the stream of a caller who has gone before its first byte is never begun, so that nothing
        in the stream itself would be run."""

        def __init__(self, content: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
            super().__init__(content, media_type="application/x-ndjson")
            self.leave = leave

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                loop.submit(self.leave)

    async def begin_update(request: Any) -> Any:
        body = json.loads(await request.body())
        version, check_equal, transport = int(body["version"]), bool(body["check_equal"]), body["transport"]
        await call(lambda: engine.begin_update(version, check_equal))
        # Not awaited: the sender starts to stream once this is answered.
        updates[version] = loop.submit(lambda: engine.run_update(version, transport, check_equal))
        return {"version": version}

    async def finish_update(request: Any) -> Any:
        version = int(json.loads(await request.body())["version"])
        future = updates.pop(version, None)
        if future is None:
            raise EngineError(f"no update to version {version} was begun")
        return await asyncio.wrap_future(future)

    async def record(request: Any) -> Any:
        options = msgspec.json.decode(await request.body(), type=RecordOptions)
        return await call(lambda: engine.record(options))

    async def chunk(request: Any) -> Any:
        tokens = json.loads(await request.body())["tokens"]
        return await call(lambda: engine.set_chunk(tokens))

    async def records(request: Any) -> Any:
        return Response(await call(engine.recorder.dump), media_type="application/octet-stream")

    async def shutdown(request: Any) -> Any:
        loop.submit(loop.stop)
        return {}

    def plain(function: Callable[[], Any]) -> Callable[[Any], Any]:
        async def handler(request: Any) -> Any:
            return await call(function)

        return handler

    return Starlette(routes=[
        route("/health", health, "GET"), route("/info", plain(engine.info), "GET"),
        route("/contract", plain(lambda: engine.contract().to_dict()), "GET"), route("/stats", plain(engine.stats), "GET"),
        route("/weights", plain(engine.weights_digest), "GET"), route("/records", records, "GET"),
        route("/generate", generate, "POST"), route("/record", record, "POST"),
        route("/update/begin", begin_update, "POST"), route("/update/finish", finish_update, "POST"),
        route("/chunk", chunk, "POST"),
        route("/reset_prefix_cache", plain(engine.reset_prefix_cache), "POST"),
        route("/sleep", plain(engine.sleep), "POST"), route("/wake", plain(engine.wake), "POST"),
        route("/shutdown", shutdown, "POST"),
    ])


async def _stream(waiting: set[str], results: asyncio.Queue[Any]) -> AsyncIterator[bytes]:
    """A line for each of ``waiting``, which loses what was answered; an error ends it."""
    while waiting:
        try:
            item = await asyncio.wait_for(results.get(), HEARTBEAT_S)
        except TimeoutError:
            yield _json.encode({"alive": len(waiting)}) + b"\n"
            continue
        if isinstance(item, Exception):
            yield _json.encode({"error": type(item).__name__, "message": str(item)}) + b"\n"
            return
        waiting.discard(item.request_id)
        yield _json.encode({"sample": item}) + b"\n"


def watch_parent(parent: int) -> None:
    """End this process when ``parent`` ends.

    Polled, and not ``PR_SET_PDEATHSIG``: that signal is sent when the *thread* that started us ends, and engines are
    started from worker threads.
    """
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(3)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _say(ready_fd: int | None, message: dict[str, Any]) -> None:
    if ready_fd is None:
        print(json.dumps(message), flush=True)
        return
    with os.fdopen(ready_fd, "w") as pipe:
        pipe.write(json.dumps(message) + "\n")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise EngineError(f"cannot listen on {host}, port {port}: {error.strerror}; take another --port (0: a free one) or --host") from None


def _give_up(ready_fd: int | None, text: str, unforeseen: bool = False) -> int:
    """The exit code, after the reason was said to whoever started this process. ``unforeseen``: no message of ours, so that the
    traceback in the log helps."""
    _say(ready_fd, {"error": text, "unforeseen": unforeseen})
    print(text, file=sys.stderr)
    return 1


def serve(config: EngineConfig, host: str, port: int, ready_fd: int | None) -> int:
    """Build the engine, announce address or error, serve until told to stop. Returns the exit code."""
    import uvicorn

    token = os.environ.get(TOKEN_ENV) or None
    try:
        if token is None and host not in ("127.0.0.1", "localhost", "::1"):
            raise EngineError(f"refusing to listen on {host} without a token: anyone who reaches it could replace the weights. "
                              f"Set {TOKEN_ENV}, or listen on 127.0.0.1.")
        listener = _listen(host, port)
        engine = Engine(config)
    except MemoryError:
        return _give_up(ready_fd, "there was not enough memory to build the engine; give it more (ulimit -v, the container's limit), or use a "
                                  "smaller KV cache, bfloat16 or a smaller model")
    except Exception as raised:
        error = plain(raised)
        if is_for_people(error):
            return _give_up(ready_fd, str(error))
        traceback.print_exc()
        return _give_up(ready_fd, f"{type(error).__name__}: {error}", unforeseen=True)
    loop = Loop(engine)
    server = uvicorn.Server(uvicorn.Config(build_app(loop, token), log_level="warning", access_log=False))
    threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True, name="http").start()
    _say(ready_fd, {"url": f"http://{host}:{listener.getsockname()[1]}", "pid": os.getpid()})
    loop.run()
    time.sleep(0.2)  # let the answer to the last request leave
    return 0


def main(
    model: Annotated[str, typer.Option(help="Hugging Face checkpoint folder.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    host: Annotated[str, typer.Option(help=f"Address to listen on; beyond 127.0.0.1 only with {TOKEN_ENV} set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus response.")] = None,
    kv_cache_bytes: Annotated[int | None, typer.Option(help="Size of the KV cache; on CPU 512 MiB unless given.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of GPU memory for weights and cache.")] = 0.5,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step; longer prompts are prefilled in chunks.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV cache block.")] = 32,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the model's), or fp8_e4m3 (latent attention).")] = "auto",
    data_parallel_size: Annotated[int, typer.Option(help="Ranks of this engine, over which experts are spread.")] = 1,
    data_parallel_rank: Annotated[int, typer.Option(help="Which of them this process is.")] = 0,
    data_parallel_port: Annotated[int, typer.Option(help="Port on this machine where they meet.")] = 0,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of equal prefixes.")] = True,
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights that an update replaces.")] = "auto",
    sleep_mode: Annotated[bool, typer.Option(help="Allow sleep and wake (GPU).")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Capture whole steps in CUDA graphs (GPU).")] = True,
    async_scheduling: Annotated[bool, typer.Option(help="Prepare the next step while one runs (GPU).")] = True,
    keep_fp8_weights: Annotated[bool, typer.Option(help="Keep block-FP8 weights quantised: faster, half of their memory more (GPU).")] = True,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """One vLLM engine behind HTTP. Which operations are aligned comes from the environment variable VIME_PLUGIN."""
    if parent is not None:
        watch_parent(parent)
    config = EngineConfig(
        model=model, dtype=dtype, device=device, max_model_len=max_model_len, kv_cache_bytes=kv_cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization, max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs, block_size=block_size, prefix_caching=prefix_caching, load_format=load_format,
        sleep_mode=sleep_mode, cuda_graphs=cuda_graphs, async_scheduling=async_scheduling, kv_cache_dtype=kv_cache_dtype,
        data_parallel_size=data_parallel_size, data_parallel_rank=data_parallel_rank, data_parallel_port=data_parallel_port,
        keep_fp8_weights=keep_fp8_weights)
    code = serve(config, host, port, ready_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's teardown may hang; nothing is left to save


if __name__ == "__main__":
    typer.run(main)
