"""A digest taken in pieces is that of the whole, wherever a piece ends; what no digest can be taken of, or comes twice, is refused."""
from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vime.vllm.protocol import UpdateFailed
from vime.weights.manifest import (
    Manifest,
    ManifestError,
    TensorInfo,
    arrival_problems,
    describe,
    digest_of,
    in_pieces,
    manifest_of,
)
from vime.weights.transports import Endpoint, disk, stream


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 400), piece=st.integers(1, 120), seed=st.integers(0, 99))
def test_pieces_change_no_digit(size: int, piece: int, seed: int) -> None:
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert in_pieces(flat, piece) == digest_of(flat)
    changed = flat.clone()
    changed[seed % size] ^= 1
    assert in_pieces(changed, piece) != digest_of(flat)


def test_views_have_the_digest_of_what_they_show() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    for view, plain in ((x.conj(), x.conj().resolve_conj()), (x.conj().imag, -x.imag), (torch.ones(1).expand(4), torch.ones(4))):
        assert digest_of(view) == digest_of(plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), lambda: torch.eye(3).to_sparse(),
                                  lambda: torch.empty(3, device="meta"), lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])])
def test_a_tensor_whose_bytes_are_not_all_of_it_has_no_digest(make) -> None:
    """Two quantized tensors of other scales have the same integers."""
    with pytest.raises(ManifestError, match=r"a\.weight: .* expected a plain dense one"):
        describe("a.weight", make())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64, torch.bfloat16])
def test_what_is_not_finite_is_found_in_every_format(dtype: torch.dtype) -> None:
    good, bad = torch.tensor([1.0, 2.0, 4.0]).to(dtype), torch.tensor([1.0, float("nan"), 4.0]).to(dtype)
    assert arrival_problems(manifest_of([("a", good)], 1), {"a": good}) == []
    assert arrival_problems(manifest_of([("a", bad)], 1), {"a": bad}) == ["a: 1 of 3 values are NaN or infinite"]


def test_a_name_with_a_line_break_is_not_two_names() -> None:
    def info(name: str) -> TensorInfo:
        return TensorInfo(name=name, dtype="float32", shape=(1,), digest="d")

    assert Manifest(version=1, tensors=[info("a float32 [1] d\nb")]).digest() != Manifest(version=1, tensors=[info("a"), info("b")]).digest()
    with pytest.raises(ManifestError, match=r"a has shape \[2, -1\]"):
        Manifest.from_json(b'{"version": 1, "tensors": [{"name": "a", "dtype": "int8", "shape": [2, -1], "digest": "d"}]}')


@pytest.mark.parametrize("file_bytes", [1, 1 << 20])
def test_a_folder_takes_no_name_twice(tmp_path, file_bytes) -> None:
    with pytest.raises(ManifestError, match="a comes twice in version 3"):
        disk.write(tmp_path / "w", [("a", torch.ones(2)), ("a", torch.zeros(2))], 3, file_bytes)
    assert list(tmp_path.iterdir()) == []
    disk.write(tmp_path / "w", [("a", torch.ones(2)), ("b", torch.zeros(2))], 3, file_bytes)
    save_file({"a": torch.ones(2)}, tmp_path / "w" / "model-00009.safetensors")
    with pytest.raises(UpdateFailed, match=r"a is in .*model-00009\.safetensors and in a file before it"):
        disk.DiskReceiver(folder=str(tmp_path / "w")).receive()


def test_a_full_disk_is_a_failed_update_also_where_safetensors_says_so(tmp_path) -> None:
    sender = disk.DiskSender(Endpoint(url="http://127.0.0.1:9", transport="disk", disk_dir=str(tmp_path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UpdateFailed, match=r"could not write weights to .*version-000002: .*File too large"):
            sender.send([("a", torch.ones(2000))], 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_delivers_twice_is_refused(monkeypatch) -> None:
    a = torch.ones(2)
    info = [describe("a", a)]
    frames = [stream.Frame(tensors=info), stream.Frame(tensors=info), stream.Frame(manifest=Manifest(version=1, tensors=info))]

    class Twice:
        def receive_frame(self) -> stream.Frame:
            return frames.pop(0)

        def receive_bucket(self, frame):
            yield "a", a

    class Receiver(stream.StreamReceiver):
        def connect(self, store):
            return Twice()

    monkeypatch.setattr(stream.dist, "TCPStore", lambda *args, **kwargs: None)
    with pytest.raises(UpdateFailed, match="a arrived twice"):
        Receiver("127.0.0.1", 1, 5).receive()
