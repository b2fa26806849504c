"""``--check-weight-update-equal`` against loaders that go wrong, at the first, the second and the third update.

The receiver is the real one; the model is a small one with vLLM's fused layout, whose loader can be told to fail. What a
running engine does with a refusal is in ``test_update``.
"""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vime.vllm.engine import Engine
from vime.vllm.protocol import EngineError, EnginePoisoned, UpdateFailed
from vime.vllm.receiver import VimeInitInfo, VimeUpdateInfo, VimeWeightTransferEngine
from vime.weights.transports import disk

SIZE = 8


class Fused(torch.nn.Module):
    def __init__(self, *output_sizes: int):
        super().__init__()
        self.output_sizes = list(output_sizes)
        self.weight = torch.nn.Parameter(torch.zeros(sum(output_sizes), SIZE))


class Model(torch.nn.Module):
    """One layer with vLLM's names: q, k, v in one parameter, gate and up in one, a padded vocabulary, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=10, tie_word_embeddings=False)
        self.model, self.lm_head = torch.nn.Module(), torch.nn.Module()
        layer = self.model.layer = torch.nn.Module()
        layer.qkv_proj, layer.gate_up_proj, layer.o_proj = Fused(8, 4, 4), Fused(6, 6), Fused(SIZE)
        self.model.embed_tokens = torch.nn.Module()
        for owner in (self.model.embed_tokens, self.lm_head):
            owner.weight = torch.nn.Parameter(torch.zeros(16, SIZE))
        self.register_buffer("table", torch.arange(4.0))
        self.loads, self.fault, self.bad_load = 0, None, 0

    def load_weights(self, weights) -> set[str]:
        from vime.vllm.layout import EngineWeights

        self.loads += 1
        places = EngineWeights(self)
        with torch.no_grad():
            for name, tensor in weights:
                bad = self.fault if self.loads == self.bad_load else None
                if bad == "stale" and ".k_proj." in name:
                    continue
                if bad == "transposed" and ".o_proj." in name:
                    tensor = tensor.t()
                if bad == "gate for up" and ".up_proj." in name:
                    tensor = places.view(name.replace("up_proj", "gate_proj"))
                if bad == "rounded" and name == "lm_head.weight":
                    tensor = tensor.bfloat16().float()
                places.view(name).copy_(tensor)
            if self.loads == self.bad_load and self.fault == "padding":
                self.lm_head.weight[12, 3] = 1
            if self.loads == self.bad_load and self.fault == "buffer":
                self.table[2] = 0
        return set(dict(self.named_parameters())) - ({"lm_head.weight"} if self.fault == "left out" and self.loads == self.bad_load else set())


FAULTS = {"stale": r"model\.layer\.k_proj\.weight: digest", "transposed": r"model\.layer\.o_proj\.weight: digest",
          "gate for up": r"model\.layer\.up_proj\.weight: digest", "rounded": r"lm_head\.weight: digest",
          "padding": r"lm_head\.weight: padding rows past 10 are not zero", "buffer": "buffer table changed during the load",
          "left out": r"left parameters as they were, 1 problem(.|\n)*lm_head\.weight"}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = {"model.layer.q_proj.weight": 8, "model.layer.k_proj.weight": 4, "model.layer.v_proj.weight": 4, "model.layer.gate_proj.weight": 6,
            "model.layer.up_proj.weight": 6, "model.layer.o_proj.weight": SIZE, "model.embed_tokens.weight": 10, "lm_head.weight": 10}
    return {name: torch.randn(n, SIZE, generator=generator) for name, n in rows.items()}


def receiver(model: Model) -> VimeWeightTransferEngine:
    made = object.__new__(VimeWeightTransferEngine)
    made.model, made.device = model, torch.device("cpu")
    return made


def update(to, version: int, folder, check_equal: bool = True) -> dict:
    state = weights(version)
    disk.write(folder / str(version), state.items(), version)
    to.init_transfer_engine(VimeInitInfo(transport={"kind": "disk", "folder": str(folder / str(version))}))
    to.start_weight_update()
    to.receive_weights(VimeUpdateInfo(version=version, check_equal=check_equal, live=True,
                                      required={n: (t.dtype, tuple(t.shape)) for n, t in state.items()}))
    return to.report


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_loader_that_goes_wrong_is_caught_at_that_update(tmp_path, fault, at):
    model = Model()
    model.fault, model.bad_load = fault, at
    to = receiver(model)
    for version in range(1, at):
        report = update(to, version, tmp_path)
        assert report["elements"] == report["elements_compared"] == sum(t.numel() for t in weights(1).values())
    with pytest.raises(UpdateFailed, match=FAULTS[fault]):
        update(to, at, tmp_path)
    assert to.report is None


def test_it_is_the_check_that_catches(tmp_path):
    model = Model()
    model.fault, model.bad_load = "transposed", 2
    to = receiver(model)
    update(to, 1, tmp_path, check_equal=False)
    assert update(to, 2, tmp_path, check_equal=False)["elements_compared"] == 0


def test_kept_fp8_weights_are_renewed_after_the_load_and_a_stale_one_refuses(tmp_path, monkeypatch):
    """``vime.ops`` keeps none on a CPU; that it would be asked at the right time is seen here, what it does in ``tests/cuda``."""
    from vime.vllm import fp8

    model, seen = Model(), []
    there = ["layer.o_proj", "layer.down_proj", "another engine's"]
    monkeypatch.setattr(fp8.ops, "refresh_quantised", lambda device: seen.append(model.lm_head.weight[:10].detach().clone()) or there)
    monkeypatch.setattr(fp8.ops, "stale_quantised", lambda device: ["layer.o_proj"] if len(seen) == 2 else [])
    to = receiver(model)
    assert update(to, 1, tmp_path)["fp8_renewed"] == 0 and not seen
    fp8.note(model, {"layer.o_proj", "layer.down_proj"})
    assert update(to, 2, tmp_path)["fp8_renewed"] == 2 and torch.equal(*seen, weights(2)["lm_head.weight"])
    with pytest.raises(UpdateFailed, match=r"layer\.o_proj: the block-FP8 form that the kernels read is not that of the weight"):
        update(to, 3, tmp_path)
    assert to.report is None and len(seen) == 2
    there.remove("layer.down_proj")
    with pytest.raises(UpdateFailed, match=r"replaced by other parameters, which needs a restart(.|\n)*1 problem(.|\n)*layer\.down_proj: gone"):
        update(to, 4, tmp_path, check_equal=False)


class FakeEngine:
    """Sleeps and wakes; ``loses`` names a tensor that does not survive."""

    def __init__(self, model: Model, loses: str):
        self.model, self.loses = model, loses

    def sleep(self, level: int) -> None:
        self.kept = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for tensor in self.model.state_dict().values():
            tensor.zero_()

    def wake_up(self) -> None:
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(self.kept[name])
            if name == self.loses:
                tensor.view(-1)[3] += 1

    def reset_prefix_cache(self) -> bool:
        return True


def engine(loses: str = "", **config) -> Engine:
    made = object.__new__(Engine)
    made.model = Model()
    made.engine, made.ops, made.state, made.reason, made.version = FakeEngine(made.model, loses), ("linear",), "ready", "", 3
    made.config = SimpleNamespace(**{"device": "cuda", "sleep_mode": True, **config})
    made.required = {n: (t.dtype, tuple(t.shape)) for n, t in weights(1).items()}
    made._requests, made.worker = {}, SimpleNamespace(weight_transfer_engine=None)
    return made


@pytest.mark.parametrize("lost", ["lm_head.weight", "table"])
def test_after_sleep_and_wake_weights_and_buffers_are_compared(lost):
    one = engine()
    one.sleep()
    with pytest.raises(EngineError, match="cannot generate: the engine is asleep: call wake first"):
        one._require_ready("generate")
    with pytest.raises(EngineError, match="cannot update weights: the engine is asleep"):
        one.begin_update(4, True)
    one.wake()
    assert one.state == "ready"
    other = engine(loses=lost)
    other.sleep()
    with pytest.raises(EnginePoisoned, match=rf"1 problem\(s\):\s+{lost}: digest"):
        other.wake()
    with pytest.raises(EnginePoisoned, match="Send a full update"):
        other._require_ready("generate")


@pytest.mark.parametrize("broken", ["wake_up", "digests", "stale"])
def test_an_engine_whose_weights_cannot_be_read_after_waking_does_not_generate(broken, monkeypatch):
    one = engine()
    one.sleep()

    def fail(*_):
        raise RuntimeError("out of memory")

    from vime.vllm import fp8

    monkeypatch.setattr(*{"wake_up": (one.engine, "wake_up"), "digests": (one, "_everything"), "stale": (fp8, "stale")}[broken], fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        one.wake()
    with pytest.raises(EnginePoisoned, match="its weights could not be read"):
        one._require_ready("generate")


def test_an_engine_that_computes_with_a_stale_form_refuses_from_then_on(monkeypatch):
    from vime.vllm import fp8

    def kept(one: Engine, stale: list[str]) -> Engine:
        fp8.note(one.model, {"o_proj"})
        monkeypatch.setattr(fp8.ops, "stale_quantised", lambda device: stale)
        return one

    monkeypatch.setattr("vime.vllm.layout.converted", lambda model: "")
    assert kept(engine(), []).weights_digest()["tensors"]
    one = kept(engine(), ["o_proj"])
    with pytest.raises(EnginePoisoned, match=r"cannot say what it holds(.|\n)*o_proj: the block-FP8 form"):
        one.weights_digest()
    with pytest.raises(EnginePoisoned, match="o_proj"):
        one._require_ready("generate")
    assert one.weights_digest()["tensors"]  # after that, as after any failed update, it can be looked at
    other = kept(engine(), [])
    other.sleep()
    with pytest.raises(EngineError, match="cannot read the weights: the engine is asleep"):
        other.weights_digest()
    kept(other, ["o_proj"])
    with pytest.raises(EnginePoisoned, match=r"did not survive the sleep(.|\n)*o_proj"):
        other.wake()


@pytest.mark.parametrize(("config", "message"), [({"device": "cpu"}, "vLLM has no sleep mode on CPU; leave the engine awake or shut it down"),
                                                 ({"sleep_mode": False}, "was started without sleep mode; start it with --sleep-mode")])
def test_where_it_cannot_sleep_it_says_so(config, message):
    one = engine(**config)
    with pytest.raises(EngineError, match=message):
        one.sleep()
    with pytest.raises(EngineError, match="cannot wake: the engine is ready, not asleep"):
        one.wake()
    assert one.state == "ready"


def test_an_update_is_kept_on_the_host_where_the_gpu_lacks_the_room():
    from vime.vllm.receiver import _SPARE_BYTES, place

    required = {"a": (torch.bfloat16, (1024, 3)), "b": (torch.float32, (7,))}
    need = 1024 * 3 * 2 + 7 * 4 + _SPARE_BYTES
    assert place(required, need) is None and place(required, need - 1) == torch.device("cpu")
    assert place(required, None) is None and place(None, 0) is None  # a CPU; an update of whatever comes


def test_what_arrives_is_moved_to_where_it_is_kept():
    from vime.weights.manifest import manifest_of
    from vime.weights.transports.stream import Frame, StreamReceiver

    sent = weights(0)

    class Channel:
        def __init__(self):
            self.frames = [Frame(), Frame(manifest=manifest_of(sent.items(), 1))]

        def receive_frame(self):
            return self.frames.pop(0)

        def receive_bucket(self, frame):
            return iter(sent.items())

    class Receiver(StreamReceiver):
        def connect(self, store):
            return Channel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "TCPStore", lambda *a, **k: None)
        for place in (None, torch.device("meta")):
            receiver = Receiver("127.0.0.1", 1, 1.0)
            receiver.keep_on, Channel.frames = place, [Frame(), Frame(manifest=manifest_of(sent.items(), 1))]
            received, _ = receiver.receive()
            assert list(received) == list(sent) and {t.device.type for t in received.values()} == {place.type if place else "cpu"}


@pytest.mark.parametrize(("made", "message"), [
    ({"W_UV": torch.zeros(1)}, "stock latent attention in model.layer holds a second form of kv_b_proj: operation attention is off"),
    ({"quant_method": "FLASHINFER_CUTLASS"}, "stock experts in model.layer are laid out for FLASHINFER_CUTLASS: operation moe is off")])
def test_a_gpu_engine_that_computes_with_another_form_of_its_weights_is_not_read_back(made, message):
    """Read back, the parameters would be what was sent, and the kernels would go on with what was made of the old ones."""
    def method(backend, keeps):
        process = SimpleNamespace(vime_keeps=True) if keeps else (lambda layer: None)
        return SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend), process_weights_after_loading=process)

    one = engine()
    for backend, keeps in (("TRITON", False), ("FLASHINFER_CUTLASS", True)):
        one.model.model.layer.quant_method = method(backend, keeps)
        assert one._live
    for name, value in made.items():
        setattr(one.model.model.layer, name, method(value, False) if isinstance(value, str) else value)
    assert not one._live
    with pytest.raises(UpdateFailed, match=message):
        one.begin_update(4, True)
    with pytest.raises(EngineError, match=message):
        one.weights_digest()
    one.begin_update(4, False)  # the layers are then rebuilt one by one
    assert one.state == "updating"


def test_tensors_of_other_ranks_are_looked_at_in_any_dtype():
    from vime.vllm.receiver import Elsewhere

    look = Elsewhere(lambda name: name == "mine")
    mine = torch.ones(2)
    assert look.look("mine", mine) is mine
    for name, tensor in (("nan8", torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)), ("fine8", torch.ones(2).to(torch.float8_e4m3fn)),
                         ("inf", torch.tensor([float("inf"), 1.0])), ("ids", torch.arange(3))):
        assert look.look(name, tensor).is_meta
    assert look.problems == ["nan8: 1 of 2 values are NaN or infinite", "inf: 1 of 2 values are NaN or infinite"] and list(look.entries) == ["nan8", "fine8", "inf", "ids"]
