"""Damaged and hostile input: always a verdict that is not green, or one clear error; never a crash."""
from __future__ import annotations

import json
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from alignment import dumps, match, records
from alignment.compare import compare_runs
from alignment.errors import InputError, KeyCollision
from alignment.records import RecordReader, RecordWriter
from alignment.verdict import Status

TENSORS = {"layers.0.output": torch.arange(12.0).reshape(3, 4), "layers.1.output": torch.ones(3, 4)}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(TENSORS, path)
    elif path.suffix == ".npz":
        np.savez(path, **{n: t.numpy() for n, t in TENSORS.items()})
    elif path.suffix == ".pt":
        torch.save(TENSORS, path)
    else:
        path.write_text(json.dumps({n: t.tolist() for n, t in TENSORS.items()}))
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    return {s: write(root / f"good{s}") for s in (".safetensors", ".npz", ".pt", ".json")}


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".json"])
def test_clean(good, suffix, tmp_path):
    twin = shutil.copy(good[suffix], tmp_path / f"twin{suffix}")
    assert compare_runs(good[suffix], twin).status is Status.PASS
    assert compare_runs(good[suffix], good[suffix]).status is Status.NOT_RUN  # a recording always agrees with itself
    if suffix != ".json":  # lists of numbers have no dtype
        assert compare_runs(twin, good[".safetensors"]).status is Status.PASS


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".json"])
@QUICK
@given(st.randoms(use_true_random=False), st.sampled_from(["cut", "flip", "insert", "random", "empty"]))
def test_damaged_files(good, tmp_path_factory, suffix, rng: random.Random, how):
    data = bytearray(good[suffix].read_bytes())
    if how == "cut":
        data = data[: rng.randrange(len(data))]
    elif how == "flip":
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "insert":
        data[rng.randrange(len(data)) : 0] = rng.randbytes(rng.randint(1, 16))
    elif how == "random":
        data = bytearray(rng.randbytes(rng.randint(0, 400)))
    else:
        data = bytearray()
    bad = tmp_path_factory.mktemp("bad") / f"bad{suffix}"
    bad.write_bytes(data)
    verdict = compare_runs(good[suffix], bad)
    same = False
    if verdict.status is Status.PASS:  # only if the damage changed nothing that is compared
        with dumps.open_dump(bad) as d:
            same = all(np.array_equal(np.asarray(dumps.as_tensor(d[n]), dtype=np.float64), t.double().numpy()) for n, t in TENSORS.items())
    assert verdict.status is not Status.PASS or same


def header(path: Path, entries: dict | str, data: bytes = bytes(64)) -> Path:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


E = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize("entries", [
    {"../x": E}, {"/etc/x": E}, {"a/../../b": E}, {"": E}, {"a\nb": E}, {"a\\b": E}, {"x" * 600: E},
    {"a": {**E, "dtype": "F31"}}, {"a": {**E, "shape": [-4]}}, {"a": {**E, "shape": [5]}}, {"a": {**E, "shape": "4"}},
    {"a": {**E, "data_offsets": [0, 10**12]}}, {"a": {**E, "data_offsets": [16, 0]}}, {"a": {**E, "data_offsets": [-16, 0]}},
    {"a": {**E, "data_offsets": [0.0, 16.0]}}, {"a": 1}, {"a": None}, [], "[]", "7", "{", '{"a": {}, "a": {}}',
    {"a": E, "b": {**E, "data_offsets": [8, 24]}}, {"a": {**E, "shape": [2**62, 4]}}, "[" * 5000, {"a": {**E, "shape": [True, 4]}},
])  # fmt: skip
def test_hostile_headers(tmp_path, entries):
    path = header(tmp_path / "x.safetensors", entries)
    with pytest.raises(InputError):
        dumps.open_dump(path)
    verdict = compare_runs(path, path)
    assert verdict.status is Status.INVALID and verdict.reason


def test_a_header_longer_than_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    assert compare_runs(path, path).status is Status.INVALID


def test_empty_is_not_run(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({}, path)
    assert compare_runs(path, path).status is Status.NOT_RUN
    save_file({"a": torch.empty(0)}, path)
    assert compare_runs(path, path).status is Status.NOT_RUN


def test_no_pickle_runs(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "boom",))

    torch.save({"a": Bomb()}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", a=np.array([Bomb()], dtype=object))
    for name in ("a.pt", "a.npz"):
        assert compare_runs(tmp_path / name, tmp_path / name).status is Status.INVALID
    assert not (tmp_path / "boom").exists()


def test_names_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as z, pytest.warns(UserWarning):
        for _ in range(2):
            with z.open("a.npy", "w") as f:
                np.save(f, np.ones(2))
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "a.pt")
    (tmp_path / "a.json").write_text('{"a": [1], "a": [2]}')
    for i in range(2):
        (tmp_path / "dir").mkdir(exist_ok=True)
        save_file({"w": torch.ones(1)}, tmp_path / "dir" / f"{i}.safetensors")
    for name in ("a.npz", "a.pt", "a.json", "dir"):
        with pytest.raises(KeyCollision):
            dumps.open_dump(tmp_path / name)
        assert compare_runs(tmp_path / name, tmp_path / name).status is Status.INVALID


def test_hostile_npz(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as z:
        z.writestr("../a.npy", b"x")
    assert compare_runs(tmp_path / "a.npz", tmp_path / "a.npz").status is Status.INVALID


def test_wrong_usage(tmp_path, good):
    with pytest.raises(FileNotFoundError):
        compare_runs(tmp_path / "nothing", good[".pt"])
    with pytest.raises(InputError):
        compare_runs(good[".pt"], good[".pt"], tier="loose")
    with pytest.raises(InputError):
        compare_runs(good[".pt"], good[".pt"], kind="pictures")
    (tmp_path / "a.txt").write_text("x")
    assert compare_runs(tmp_path / "a.txt", good[".pt"]).status is Status.INVALID


def test_missing_shard(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(InputError, match="copy the missing shards"):
        dumps.open_dump(tmp_path)


def record(path: Path, value: float = 0.0, **kwargs) -> Path:
    with RecordWriter(path, **kwargs) as w:
        w.add("layer", "layers.0.output", torch.arange(6.0).reshape(3, 2) + value, request="r", tokens=[5, 6, 7])
        w.add("logprobs", "logprobs", torch.arange(3.0), request="r", tokens=[5, 6, 7])
        w.add("weight", "w", torch.ones(2))
    return path


def test_records_collide(tmp_path):
    with RecordWriter(tmp_path / "a") as w:
        w.add("weight", "w", torch.ones(2))
        with pytest.raises(KeyCollision):
            w.add("weight", "w", torch.ones(2))
    with pytest.raises(KeyCollision):
        RecordWriter(tmp_path / "a")
    for name in ("../x", "/x", "a\0b", ""):
        with pytest.raises(InputError):
            RecordWriter(tmp_path / "b").add("weight", name, torch.ones(1))


@pytest.mark.parametrize(("step", "read"), [(3, 3), (np.int64(3), 3), (torch.tensor(3), 3), (None, None)])
def test_what_was_written_can_be_read(tmp_path, step, read):
    with RecordWriter(tmp_path) as w:
        w.add("weight", "w", torch.ones(2), step=step)
    assert [e.step for e in RecordReader(tmp_path)] == [read]


@pytest.mark.parametrize("key", [{"step": True}, {"step": 1.0}, {"step": torch.tensor(1.5)}, {"step": "1"}, {"request": 7}])
def test_what_could_not_be_read_is_refused_when_it_is_recorded(tmp_path, key):
    with pytest.raises(InputError, match=r"w: (step|request) .* of type"):
        RecordWriter(tmp_path).add("weight", "w", torch.ones(2), **key)


@pytest.mark.parametrize("field", ["tensor", "name", "kind", "request", "step"])
@pytest.mark.parametrize("bad", [[1], {"a": 1}, True, 1.5])
def test_an_entry_of_another_form_is_no_record(tmp_path, field, bad):
    with RecordWriter(tmp_path) as w:
        w.add("layer", "layers.0.output", torch.ones(2, 3), request="r", step=1, tokens=[4, 5])
    index = next(tmp_path.glob("*.index.json"))
    document = json.loads(index.read_text())
    document["entries"][0][field] = bad
    index.write_text(json.dumps(document))
    with pytest.raises(InputError):
        list(RecordReader(tmp_path))


def test_a_failed_run_writes_nothing(tmp_path):
    with pytest.raises(RuntimeError), RecordWriter(tmp_path / "a") as w:
        w.add("weight", "w", torch.ones(2))
        raise RuntimeError
    assert not (tmp_path / "a").exists()


def test_replicas_that_disagree_are_invalid(tmp_path):
    record(tmp_path / "a", 0.0, rank={"tp": 0}, world=2)
    record(tmp_path / "a", 1.0, rank={"tp": 1}, world=2)
    v = compare_runs(tmp_path / "a", tmp_path / "a")
    assert v.status is Status.INVALID and "tp0" in v.reason and "tp1" in v.reason


def test_a_rank_that_is_missing(tmp_path):
    record(tmp_path / "a", rank={"tp": 0}, world=2)
    v = compare_runs(tmp_path / "a", tmp_path / "a")
    assert v.status is Status.INVALID and "1 of 2 ranks" in v.reason


def test_kernels_and_contract_are_facts(tmp_path):
    record(tmp_path / "a", contract="x", kernels={"linear": "v1", "only here": 1})
    record(tmp_path / "b", contract="x", kernels={"linear": "v2"})
    v = compare_runs(tmp_path / "a", tmp_path / "b")
    assert v.status is Status.FAIL and "linear" in v.cause
    record(tmp_path / "c", contract="x", kernels={"linear": "v1"})
    assert compare_runs(tmp_path / "a", tmp_path / "c").status is Status.PASS


@pytest.mark.parametrize("edit", [
    lambda i: i.update(schema=99), lambda i: i.update(rank={"xp": 1}), lambda i: i.update(rank={"tp": 3}), lambda i: i.pop("entries"),
    lambda i: i.update(data="../../etc/passwd"), lambda i: i.update(bytes=1), lambda i: i["entries"].append(dict(i["entries"][0], tensor="no")),
    lambda i: i["entries"][0].update(name="../x"), lambda i: i["entries"].append(7), lambda i: i["entries"][0].update(kind="virus"),
    lambda i: i.update(data="gone.safetensors"),
])  # fmt: skip
def test_edited_index(tmp_path, edit):
    path = record(tmp_path / "a")
    index = next(path.glob("*.index.json"))
    content = json.loads(index.read_text())
    edit(content)
    index.write_text(json.dumps(content))
    with pytest.raises(InputError):
        RecordReader(path)
    assert compare_runs(path, path).status is Status.INVALID


@QUICK
@given(st.binary(max_size=200))
def test_random_index(tmp_path_factory, data):
    path = record(tmp_path_factory.mktemp("r") / "a")
    next(path.glob("*.index.json")).write_bytes(data)
    assert compare_runs(path, path).status is Status.INVALID


def test_rank_count_does_not_matter_to_tokens(tmp_path):
    record(tmp_path / "a")
    for tp in range(2):
        record(tmp_path / "b", rank={"tp": tp}, world=2)
    assert compare_runs(tmp_path / "a", tmp_path / "b").status is Status.PASS
    for cp in range(2):  # positions spread over ranks
        with RecordWriter(tmp_path / "c", rank={"cp": cp}, world=2) as w:
            rows = [0, 2] if cp == 0 else [1]
            w.add("layer", "layers.0.output", torch.arange(6.0).reshape(3, 2)[rows], request="r", tokens=[5 + r for r in rows], positions=rows)
            w.add("logprobs", "logprobs", torch.arange(3.0)[rows], request="r", tokens=[5 + r for r in rows], positions=rows)
            w.add("weight", "w", torch.ones(2))
    assert compare_runs(tmp_path / "a", tmp_path / "c").status is Status.PASS


def test_mapping_file(tmp_path):
    theirs = {"h.0.out": torch.ones(2, 2), "h.1.out": torch.ones(2, 2).bfloat16().view(torch.int16), "junk": torch.zeros(1)}
    ours = {"layers.0.output": torch.ones(2, 2), "layers.1.output": torch.ones(2, 2).bfloat16()}
    save_file(theirs, tmp_path / "t.safetensors")
    save_file(ours, tmp_path / "o.safetensors")
    rules = {"patterns": [{"match": r"^h\.(\d+)\.out$", "name": r"layers.\1.output"}], "ignore": ["^junk$"], "dtypes": {"layers.1.output": "bfloat16"}}
    pair = (tmp_path / "t.safetensors", tmp_path / "o.safetensors")
    assert compare_runs(*pair, rules_a=rules).status is Status.PASS
    assert compare_runs(*pair).status is Status.INVALID  # names that do not meet are no agreement
    for wrong in ({"tensors": {"nothing": "x"}}, {"patterns": [{"match": "(", "name": ""}]}, {"patterns": [{"match": "^h.*", "name": "x"}]},
                  {"unknown": 1}, {"dtypes": {"no": "bfloat16"}}, {"tensors": {"junk": "../x"}}, 7):  # fmt: skip
        assert compare_runs(*pair, rules_a=wrong).status is Status.INVALID


@QUICK
@given(st.lists(st.integers(-5, 99), max_size=12), st.lists(st.integers(-5, 99), max_size=12))
def test_any_two_token_lists(a, b):
    v = match.judge(a, b)
    assert (v.status is Status.PASS) == (a == b and len(a) > 0)


def test_is_records(tmp_path):
    assert not records.is_records(tmp_path)
