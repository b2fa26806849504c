"""Tiny checkpoints and engines, built once for the whole folder: an engine takes seconds to start."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.models import write_tiny
from vime.vllm.launch import EngineProcess, launch_engine

SMALL = {"kv_cache_bytes": 32 << 20, "max_model_len": 512, "block_size": 32, "env": {"OMP_NUM_THREADS": "1"}}


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=3)


@pytest.fixture(scope="session")
def qwen2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, biases, and a vocabulary that vLLM has to pad."""
    return write_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", seed=2, tie_word_embeddings=True, vocab_size=330,
                      num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(scope="session")
def llama_engine(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with launch_engine(llama_dir, dtype="float32", log_path=tmp_path_factory.mktemp("log") / "llama.log", **SMALL) as engine:
        yield engine


@pytest.fixture(scope="session")
def qwen3_engine(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with launch_engine(qwen3_dir, dtype="bfloat16", log_path=tmp_path_factory.mktemp("log") / "qwen3.log", **SMALL) as engine:
        yield engine


@pytest.fixture(scope="session")
def qwen2_engine(qwen2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with launch_engine(qwen2_dir, dtype="float32", log_path=tmp_path_factory.mktemp("log") / "qwen2.log", **SMALL) as engine:
        yield engine
