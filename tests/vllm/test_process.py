"""The engine process: how it fails, and what its owner then hears."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.cli.test_cli import HIDE
from tests.vllm.conftest import SMALL
from tests.vllm.models import prompts, write_tiny
from vime.contract import Contract, ContractMismatch
from vime.vllm import launch, server
from vime.vllm.client import EngineClient
from vime.vllm.launch import launch_engine
from vime.vllm.protocol import EngineDied, EngineError, EngineStartError, Request, UpdateFailed


@pytest.mark.parametrize(("spoil", "message"), [
    ("missing", "is not a folder"),
    ("no config", r"config\.json is missing"),
    ("cut", "cannot be read as safetensors"),
    ("architecture", "GPT2LMHeadModel|gpt2"),
])
def test_a_bad_model_folder_is_one_clear_message(llama_dir: Path, tmp_path: Path, spoil: str, message: str) -> None:
    folder = tmp_path / "model"
    if spoil != "missing":
        folder.mkdir()
        for path in llama_dir.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    if spoil == "no config":
        (folder / "config.json").unlink()
    if spoil == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    if spoil == "architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    started = time.monotonic()
    with pytest.raises(EngineStartError, match=message) as caught:
        launch_engine(folder, log_path=tmp_path / "log", **SMALL)
    assert "Traceback" not in str(caught.value)
    assert time.monotonic() - started < 120


@pytest.mark.parametrize(("raised", "log"), [(ZeroDivisionError("at 7:4:\ndef f(x):\n^"), True), (EngineError("too small"), False)])
def test_a_fault_that_nobody_foresaw_names_the_log_before_its_own_lines(tmp_path: Path, raised: Exception, log: bool,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object) -> None:
        raise raised

    monkeypatch.setattr(server, "Engine", fail)
    read_fd, write_fd = os.pipe()
    assert server.serve(None, "127.0.0.1", 0, write_fd) == 1  # type: ignore[arg-type]
    with pytest.raises(EngineStartError) as caught:
        launch._wait_ready(launch.EngineProcess(None, tmp_path / "engine.log"), read_fd, 5.0)  # type: ignore[arg-type]
    os.close(read_fd)
    said = f" (its log is {tmp_path / 'engine.log'}): ZeroDivisionError: at 7:4:\ndef f(x):\n^" if log else ": too small"
    assert str(caught.value) == "the engine could not start" + said


def test_too_little_memory_is_said_before_anything_is_built(llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"too little memory .* about .* GiB needed .* GiB available"):
        launch_engine(llama_dir, log_path=tmp_path / "log", kv_cache_bytes=1 << 50)


def test_an_open_port_needs_a_token(llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"refusing to listen on 0\.0\.0\.0 without a token"):
        launch_engine(llama_dir, log_path=tmp_path / "log", host="0.0.0.0", with_token=False, **SMALL)


def test_a_checkpoint_that_vllm_would_cut_is_refused(tmp_path: Path) -> None:
    """vLLM's Qwen2 has no head_dim of its own and loads the first rows of each projection without a word."""
    folder = write_tiny(tmp_path / "m", "qwen2", head_dim=32)  # hidden 64 / 4 heads = 16
    with pytest.raises(EngineStartError, match=r"q_proj\.weight: \[128, 64\] in the checkpoint, \[64, 64\] in the engine"):
        launch_engine(folder, log_path=tmp_path / "log", **SMALL)


def test_a_package_that_the_engine_lacks_is_one_message(llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]), "HIDDEN": "vllm"}
    with pytest.raises(EngineStartError, match="vllm is not installed in this Python; run") as caught:
        launch_engine(llama_dir, log_path=tmp_path / "log", **{**SMALL, "env": {**SMALL["env"], **env}})
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(("fields", "message"), [
    ({"logprobs": [-1.0, None]}, r"1 of 2 logprobs of request 'r7' are not finite .* index 1 \(token 9\)"),
    ({"logprobs": [None, None]}, r"2 of 2 logprobs of request 'r7' are not finite .* index 0 \(token 8\)"),
    ({"prompt_logprobs": [None]}, r"1 of 1 prompt_logprobs of request 'r7' are not finite .* index 0 \(token 6\)"),
    ({"token_ids": "x"}, "something that is no sample"), ({"weight_version": None}, "something that is no sample"),
])
def test_an_answer_with_numbers_that_are_none(fields, message) -> None:
    """JSON has no NaN: msgspec writes null, and the reader says which token it is of."""
    sample = {"request_id": "r7", "prompt_token_ids": [5, 6], "token_ids": [8, 9], "logprobs": [-1.0, -2.0], "finish_reason": "stop",
              "weight_version": 0, "num_cached_tokens": 0}
    done: dict = {}
    with EngineClient("http://127.0.0.1:9") as client:
        client._take(json.dumps({"sample": sample}), done, None)
        assert done["r7"].logprobs == [-1.0, -2.0]
        nan = msgspec.json.encode({"sample": {**sample, **fields}}).decode()
        with pytest.raises(EngineError, match=message):
            client._take(nan, done, None)
        for line in ("{", "[]", "null", '{"sample": 3}'):
            with pytest.raises(EngineError, match="answered"):
                client._take(line, done, None)


def test_token_is_required(llama_engine) -> None:
    with EngineClient(llama_engine.url) as stranger, pytest.raises(EngineError, match="wrong or missing bearer token"):
        stranger.info()


def test_handshake_names_the_differing_field(llama_engine) -> None:
    theirs = llama_engine.client.contract()
    assert llama_engine.client.handshake(theirs) == theirs.fingerprint()
    data = theirs.to_dict()
    for change, field in (({"dtype": "bfloat16"}, "dtype"), ({"ops": {**data["ops"], "norm": "stock"}}, r"ops\.norm")):
        with pytest.raises(ContractMismatch, match=rf"{field}: trainer has"):
            llama_engine.client.handshake(Contract.from_dict({**data, **change}))


@pytest.mark.parametrize(("change", "message"), [
    ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
    ({"prompt_token_ids": [320]}, r"token id outside \[0, 320\)"),
    ({"max_tokens": 600}, "exceed the engine's max_model_len 512"),
    ({"temperature": -1.0}, "temperature is -1.0, expected >= 0"),
    ({"seed": -1}, "seed is -1"),
])
def test_a_bad_request_is_named_and_nothing_runs(llama_engine, change: dict, message: str) -> None:
    good = Request(request_id="good", prompt_token_ids=[1, 2], max_tokens=1)
    bad = Request(**{"request_id": "bad", "prompt_token_ids": [1, 2], "max_tokens": 1, **change})
    with pytest.raises(EngineError, match=f"'bad': .*{message}"):
        llama_engine.client.generate([good, bad])
    assert llama_engine.client.stats()["running"] == 0


def test_results_stream_as_they_finish(llama_engine) -> None:
    requests = [Request(request_id=f"s{n}", prompt_token_ids=[1, 2, 3], max_tokens=n) for n in (40, 2)]
    seen: list[str] = []
    samples = llama_engine.client.generate(requests, on_result=lambda s: seen.append(s.request_id))
    assert seen == ["s2", "s40"] and [s.request_id for s in samples] == ["s40", "s2"]


def test_requests_of_a_caller_that_went_away_are_dropped(llama_engine) -> None:
    """And while they run, an update is refused without harm."""
    body = [{"request_id": f"g{i}", "prompt_token_ids": [1, 2, 3], "max_tokens": 500} for i in range(8)]
    headers = {"authorization": f"Bearer {llama_engine.token}"}
    with httpx.Client(base_url=llama_engine.url, headers=headers, timeout=30) as http, http.stream("POST", "/generate", json=body):
        assert llama_engine.client.stats()["running"] == 8
        with pytest.raises(UpdateFailed, match="8 requests are running; weights are replaced between rollouts only"):
            llama_engine.client.begin_update(9, {"kind": "disk", "folder": "none"})
    deadline = time.monotonic() + 20
    while llama_engine.client.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert llama_engine.client.stats()["running"] == 0
    assert llama_engine.client.generate([Request(request_id="g0", prompt_token_ids=[1], max_tokens=1)])


def test_the_engine_goes_with_its_parent(tmp_path: Path) -> None:
    child = "import os, time; from vime.vllm.server import watch_parent; watch_parent(os.getppid()); print('up', flush=True); time.sleep(120)"
    parent = (f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
              "p.stdout.readline(); print(p.pid)")
    pid = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=120).stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_stock_engine_generates_and_a_killed_one_is_noticed(llama_dir: Path, tmp_path: Path) -> None:
    with launch_engine(llama_dir, ops=(), log_path=tmp_path / "stock.log", max_num_batched_tokens=64, **SMALL) as engine:
        client = engine.client
        assert set(client.contract().ops.values()) == {"stock"}
        requests = [Request(request_id=f"k{i}", prompt_token_ids=p, max_tokens=4, seed=i) for i, p in enumerate(prompts(4))]
        samples = client.generate(requests)
        assert not any(s.seeded for s in samples)  # the seeds would have crashed it: said, not hidden
        assert client.generate(requests[:1])[0].seeded
        assert client.stats()["kernels"] == {}
        long = [Request(request_id="long", prompt_token_ids=[1, 2, 3], max_tokens=400)]
        threading.Timer(1.0, os.kill, (engine.pid, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(EngineDied, match=r"(?s)killed by signal 9.*stock\.log"):
            for _ in range(50):
                client.generate(long)
        assert time.monotonic() - started < 30
        with pytest.raises(EngineDied):
            client.stats()
