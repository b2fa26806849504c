"""Evidence and claims: what a file must hold, and that the page says what the files say."""
from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from alignment import evidence
from alignment.verdict import Coverage, Place, Verdict

ROOT = Path(__file__).resolve().parents[2]


def claim(status="PASS", gate="logprob", compared=3, **kwargs):
    verdict = Verdict(gate, status, tier=kwargs.pop("tier", "exact"), coverage={"tokens": Coverage(compared, 3)},
                      first_bad=Place(layer=1) if status == "FAIL" else None)
    return evidence.claim(verdict, **{"model": "m", "device": "cpu", "dtype": "bfloat16", **kwargs})


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A git folder with one commit and one good evidence file."""
    monkeypatch.delenv(evidence.COMMIT_ENV, raising=False)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.invalid", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    folder = tmp_path / "ci" / "evidence"
    folder.mkdir(parents=True)
    (folder / "good.json").write_text(evidence.text(evidence.build([claim()], repo=tmp_path)))
    return tmp_path


def test_a_good_file_holds(repo):
    assert evidence.check_folder(repo / "ci" / "evidence", repo) == []
    document = json.loads((repo / "ci" / "evidence" / "good.json").read_text())
    assert len(document["commit"]) == 40 and document["verdict"] == "PASS"
    assert evidence.main([str(repo / "ci" / "evidence")]) == 0


def set_key(path, value):
    def change(d):
        for key in path[:-1]:
            d = d[key]
        d[path[-1]] = value
    return change


@pytest.mark.parametrize(("change", "text"), [
    (set_key(["commit"], "0" * 40), "commit 0000"),
    (set_key(["commit"], None), "names no commit"),
    (set_key(["commit"], "HEAD"), "does not match"),
    (set_key(["dirty"], True), "uncommitted changes"),
    (set_key(["verdict"], "FAIL"), "its claims amount to PASS"),
    (set_key(["claims", 0, "verdict"], "GREEN"), "is not one of"),
    (set_key(["claims", 0, "coverage", "tokens", "compared"], 2), "is PASS with coverage"),
    (set_key(["claims", 0, "coverage"], {}), "is PASS with coverage"),
    (set_key(["claims", 0, "mutation"], {"planted": 2, "caught": 1}), "missed a planted fault"),
    (set_key(["claims", 0, "mutation"], {"planted": 0, "caught": 0}), "is not valid under any"),
    (set_key(["claims"], []), "non-empty"),
    (set_key(["claims", 0, "contract"], "0" * 32), "which the file does not hold"),
    (set_key(["seconds"], 0), "took 0 seconds"),
    (set_key(["seconds"], 0.0), "took 0 seconds"),
    (lambda d: d.pop("seconds"), "took 0 seconds"),
    (set_key(["extra"], 1), "Additional properties"),
    (lambda d: d.pop("hardware"), "'hardware' is a required property"),
])
def test_a_bad_file_is_named(repo, change, text):
    path = repo / "ci" / "evidence" / "good.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    found = evidence.check_folder(path.parent, repo)
    assert len(found) == 1 and found[0].startswith("good.json: ") and text in found[0]
    assert evidence.main([str(path.parent)]) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "\x00", '{"schema": 1}'])
def test_garbage_is_named(repo, content):
    (repo / "ci" / "evidence" / "bad.json").write_text(content)
    assert all(p.startswith("bad.json: ") for p in evidence.check_folder(repo / "ci" / "evidence", repo))
    with pytest.raises(ValueError, match=r"bad\.json"):
        evidence.load_folder(repo / "ci" / "evidence")


def test_build_refuses_what_the_schema_refuses():
    with pytest.raises(ValueError, match="device"):
        evidence.build([{**claim(), "device": "tpu"}])


def test_a_run_takes_time_whether_its_writer_says_so_or_not():
    assert evidence.build([claim()])["seconds"] > 0
    assert evidence.build([claim()], seconds=0.003)["seconds"] == 0.003
    assert evidence.build([claim()], seconds=12.34)["seconds"] == 12.3
    for seconds in (0, -1):
        with pytest.raises(ValueError, match="seconds"):
            evidence.build([claim()], seconds=seconds)


def test_the_repository_holds():
    """Every file that is committed as evidence is valid, and its commit exists."""
    assert evidence.check_folder(ROOT / "ci" / "evidence", ROOT if (ROOT / ".git").exists() else None) == []


def claims_page(folder: Path) -> str:
    out = folder.parent / "claims.md"
    subprocess.run([sys.executable, str(ROOT / "tools" / "claims.py"), "--evidence", str(folder), "--out", str(out),
                    "--table", str(folder.parent / "proven.json"), "--repo", str(folder.parents[1])], check=True)
    return out.read_text()


def test_claims_say_what_the_files_say(repo):
    folder = repo / "ci" / "evidence"
    document = json.loads((folder / "good.json").read_text())
    document["claims"] = [claim(), claim(gate="batch", model="low", tier="1e-6"),
                          claim(model="standin", stand_ins=["DeepEP by a stand-in"]), claim("FAIL", model="broken"),
                          claim("NOT_RUN", model="no", compared=0, refused="TP 2 is refused: no ordered reduce"),
                          claim(model="a|b<script>")]
    document["verdict"] = "FAIL"
    (folder / "good.json").write_text(json.dumps(document))
    page = claims_page(folder)
    states = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")] for line in page.splitlines() if line.startswith("| ")}
    at = f" at {document['commit'][:7]}"
    assert states["m"][6] == "proven" + at and states["low"][6] == "proven at 1e-6" + at
    assert states["standin"][6] == "stand-in" + at and "DeepEP by a stand-in" in states["standin"][7]
    assert states["broken"][6] == "not equal" + at and states["no"][6] == "refused" + at and "TP 2 is refused" in states["no"][7]
    assert states["smollm2-135m"][6] == "untested"
    table = json.loads((folder.parent / "proven.json").read_text())
    assert [row["model"] for row in table] == ["a|b<script>", "m"] and table[1]["gates"] == ["logprob"]
    assert "<script>" not in page and "a\\|b" in page


def test_a_newer_file_replaces_an_older_claim(repo):
    folder = repo / "ci" / "evidence"
    document = json.loads((folder / "good.json").read_text())
    newer = copy.deepcopy(document)
    newer.update(created="2099-01-01T00:00:00Z", claims=[claim("FAIL")], verdict="FAIL")
    (folder / "a-newer.json").write_text(json.dumps(newer))
    page = claims_page(folder)
    assert "not equal" in page.split("| model |")[1] and "| proven at" not in page


def test_what_a_newer_file_denies_is_proven_nowhere(repo):
    """Nor in the table that ``vime doctor`` shows."""
    folder = repo / "ci" / "evidence"
    document = json.loads((folder / "good.json").read_text())
    claims_page(folder)
    assert [row["gates"] for row in json.loads((folder.parent / "proven.json").read_text())] == [["logprob"]]
    document.update(created="2099-01-01T00:00:00Z", claims=[claim("FAIL")], verdict="FAIL")
    (folder / "a-newer.json").write_text(json.dumps(document))
    claims_page(folder)
    assert json.loads((folder.parent / "proven.json").read_text()) == []


@pytest.mark.parametrize(("status", "state"), [("PASS", "measured"), ("FAIL", "over budget")])
def test_a_cost_is_no_proof_of_bits(repo, status, state):
    folder = repo / "ci" / "evidence"
    document = json.loads((folder / "good.json").read_text())
    document.update(kind="bench", claims=[claim(status, gate="cost of generation", device="cuda")], verdict=status)
    document["created"] = "2026-11-30T00:26:07Z"  # of the time before a file had to name its GPU
    document["hardware"]["gpus"] = []
    (folder / "good.json").write_text(json.dumps(document))
    page = claims_page(folder)
    assert "| m | cuda (GPU not named) | bfloat16 | tp1 pp1 ep1 |" in page and f"| {state} at {document['commit'][:7]} | cost of generation |" in page
    assert json.loads((folder.parent / "proven.json").read_text()) == []


@pytest.mark.parametrize(("changed", "devices"), [
    (None, ""), ("README.md", ""), ("vime/rl/loop.py", ""), ("vime/ops/cpu/gemm.cpp", "cpu"), ("vime/ops/cuda/gemm.py", "cuda"),
    ("vime/megatron/te/norm.py", "cuda"), ("vime/vllm/layers.py", "cpu cuda"), ("vime/latent.py", "cpu cuda")])
@pytest.mark.parametrize("committed", [False, True])
def test_a_claim_says_whether_the_code_is_still_that_of_its_commit(repo, changed, devices, committed):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.invalid", "-C", str(repo)]
    for name in ("README.md", "vime/rl/loop.py", "vime/ops/cpu/gemm.cpp", "vime/ops/cuda/gemm.py", "vime/megatron/te/norm.py",
                 "vime/vllm/layers.py", "vime/latent.py"):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("as it was\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "y"], check=True)
    document = evidence.build([claim()], repo=repo)
    document["claims"].append(claim(device="cuda"))
    document["hardware"]["gpus"] = ["G"]
    (repo / "ci" / "evidence" / "good.json").write_text(json.dumps(document))
    if changed:
        (repo / changed).write_text("as it is\n")
    if committed:
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-am", "z"], check=True)
    page = claims_page(repo / "ci" / "evidence")
    at = f"at {document['commit'][:7]}"
    for device in ("cpu", "cuda"):
        said = next(line.split(" | ")[5] for line in page.splitlines() if line.startswith(f"| m | {device} "))
        assert said == f"proven {at}" + ("; kernels since changed" if device in devices else "")
    table = json.loads((repo / "ci" / "proven.json").read_text())
    assert {r["device"]: r["code"] for r in table} == {d: at + ("; kernels since changed" if d in devices else "") for d in ("cpu", "cuda")}


def test_a_commit_of_another_history_is_said(repo):
    document = json.loads((repo / "ci" / "evidence" / "good.json").read_text())
    (repo / "ci" / "evidence" / "good.json").write_text(json.dumps(document | {"commit": "0" * 40}))
    assert "| proven at 0000000, which is not in this history |" in claims_page(repo / "ci" / "evidence")
    (repo / "ci" / "evidence" / "good.json").write_text(json.dumps(document | {"commit": None}))
    assert "| proven at a commit not named |" in claims_page(repo / "ci" / "evidence")


@pytest.mark.parametrize(("changed", "dirty"), [
    ("vime/a.py", True), ("ci/step.py", True), ("scripts/run.sh", True), ("ci/evidence/old.json", False), ("docs/a.md", False)])
def test_a_script_that_measures_is_code_and_what_it_wrote_is_not(repo, changed, dirty):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.invalid", "-C", str(repo)]
    (repo / changed).parent.mkdir(parents=True, exist_ok=True)
    (repo / changed).write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "y"], check=True)
    assert evidence.commit_of(repo)[1] is False
    (repo / changed).write_text("2")
    assert evidence.commit_of(repo)[1] is dirty


def test_evidence_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A run that is killed half-way through a file leaves the one of before, and nothing beside it."""
    path, document = tmp_path / "new" / "e.json", evidence.build([claim()])
    evidence.write(path, document)
    assert json.loads(path.read_text()) == document and path.stat().st_mode & 0o777 == 0o644

    def half(self, text, **kwargs):
        self.write_bytes(text.encode()[:40])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        evidence.write(path, document | {"notes": "newer"})
    assert json.loads(path.read_text()) == document and [p.name for p in path.parent.iterdir()] == ["e.json"]


def test_what_ran_on_a_gpu_names_it():
    document = evidence.build([claim()])
    document.update(claims=[claim(device="cuda")], created="2099-01-01T00:00:00Z")
    document["hardware"]["gpus"] = []
    assert evidence.problems(document) == ["claim logprob is PASS on cuda, and the file names no GPU: it was written where torch sees none"]
    document["hardware"]["gpus"] = ["NVIDIA H200"]
    assert evidence.problems(document) == []


def test_a_writer_that_never_imported_torch_asks_it_for_the_gpu(tmp_path):
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = lambda: True\n    device_count = lambda: 1\n"
                                       "    get_device_name = 'GPU {}'.format\n")
    code = "from alignment import machine; print(machine.hardware()['gpus'], machine.hardware(gpus=True)['gpus'])"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True, check=True)
    assert done.stdout == "[] ['GPU 0']\n"


def test_the_page_is_up_to_date():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "claims.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
