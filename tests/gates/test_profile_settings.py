"""Profiles with settings of their own: ``NAME:key=value``."""
from __future__ import annotations

from pathlib import Path

import pytest

from gates import dryrun
from gates.harness import run_settings
from gates.profiles import UnknownProfile, absolute, find
from gates.runner import GateUsageError, run


def test_settings_reach_the_run_and_stay_in_the_name() -> None:
    plain, found = find("qwen2.5-0.5b"), find("qwen2.5-0.5b:transformer_impl=transformer_engine,response_tokens=64,lr=0.5,recompute=true")
    assert found.name == "qwen2.5-0.5b:transformer_impl=transformer_engine,response_tokens=64,lr=0.5,recompute=true"
    assert (found.response_tokens, found.prompts, found.lr) == (64, plain.prompts, 0.5)
    settings = run_settings(found, "cuda")
    assert settings["transformer_impl"] == "transformer_engine" and settings["recompute"] is True and settings["lr"] == 0.5
    assert "transformer_impl" not in run_settings(plain, "cuda") and plain.train == find("qwen2.5-0.5b").train


def test_a_folder_takes_them_too_and_may_have_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert find(str(folder)).name == "a:b"
    assert find(f"{folder}:updates=5").updates == 5


def test_a_folder_whose_name_looks_like_settings_is_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run:lr=0.1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert find(str(folder)).name == "run:lr=0.1" and find(str(folder)).lr == find("smollm2-135m").lr
    assert find(f"{folder}:updates=5").updates == 5
    monkeypatch.chdir(tmp_path)
    assert find("run:lr=0.1").name == "run:lr=0.1" and absolute(":lr=1") == ":lr=1"  # settings of nothing
    assert absolute("run:lr=0.1") == str(folder) and absolute("run:lr=0.1:updates=5") == f"{folder}:updates=5"


def test_a_relative_folder_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute("model:updates=5") == f"{tmp_path}/model:updates=5"
    assert absolute("dense-tiny") == "dense-tiny"


def test_an_empty_name_is_no_default_and_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for call in (lambda: find(""), lambda: dryrun.run("logprob", "")):
        with pytest.raises(UnknownProfile, match="the name of the profile is empty"):
            call()
    with pytest.raises(GateUsageError, match="the name of the profile is empty"):
        run(["rerun"], profile="", device="cuda", output=-3)


@pytest.mark.parametrize(("settings", "said"), [
    ("ops=", "sets nothing that a profile has"), ("check_weight_update_equal=false", "sets nothing that a profile has"),
    ("dtype=float32", "sets nothing that a profile has"), ("updates=3,updates=4", "sets it twice"), ("updates=two", "is no int"),
    ("recompute=yes", "expected true or false"), ("updates=0", "more than 0"), ("lr=nan", "more than 0"), ("updates=3,", "sets nothing"),
])
def test_what_a_profile_does_not_set_is_refused(settings: str, said: str) -> None:
    with pytest.raises(UnknownProfile, match=said):
        find(f"dense-tiny:{settings}")
