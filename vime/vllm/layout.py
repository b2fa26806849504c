"""Where in a vLLM model each Hugging Face tensor lies, so that what an engine holds can be read back.

vLLM fuses q, k, v and gate, up into one parameter and pads the vocabulary. Reading back through vLLM's own loader would
compare the loader with itself; here the place of a tensor is derived from the layer's declared sizes alone.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vime.vllm.protocol import UpdateFailed
from vime.weights.manifest import Manifest, TensorInfo, describe, mismatch

#: part of a Hugging Face name -> (fused part of the vLLM name, which output of it)
FUSED = {".q_proj.": (".qkv_proj.", 0), ".k_proj.": (".qkv_proj.", 1), ".v_proj.": (".qkv_proj.", 2),
         ".gate_proj.": (".gate_up_proj.", 0), ".up_proj.": (".gate_up_proj.", 1),
         ".q_a_proj.": (".fused_qkv_a_proj.", 0), ".kv_a_proj_with_mqa.": (".fused_qkv_a_proj.", 1),
         ".indexer.wk.": (".indexer.wk_weights_proj.", 0), ".indexer.weights_proj.": (".indexer.wk_weights_proj.", 1)}
#: One expert's tensor: where the stack of all experts is, and which half of the rows it takes (None: all)
EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
STACKS = {"gate": ("routed_experts.w13_weight", 0), "up": ("routed_experts.w13_weight", 1), "down": ("routed_experts.w2_weight", None)}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def converted(model: torch.nn.Module) -> str:
    """The first layer on a GPU whose kernels read something that was made of its parameters when they were loaded; nothing if
    there is none. A weight that is written into such a parameter afterwards is read back well and never used.

    Those are stock latent attention, which takes ``kv_b_proj`` apart, and stock experts of a backend with a layout of its own.
    """
    for name, module in model.named_modules():
        if any(getattr(module, made, None) is not None for made in ("W_UK_T", "W_UV", "W_K", "W_V")):
            return f"stock latent attention in {name} holds a second form of kv_b_proj: operation attention is off"
        method: Any = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "TRITON")
        if backend not in ("TRITON", "BATCHED_TRITON") and not getattr(method.process_weights_after_loading, "vime_keeps", False):
            return f"stock experts in {name} are laid out for {backend}: operation moe is off"
    return ""


class EngineWeights:
    """The weights of a built vLLM model under Hugging Face names (tensor parallel size 1)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self.vocab_size = int(model.config.vocab_size)

    def view(self, name: str) -> torch.Tensor:
        """The engine's elements of the Hugging Face tensor ``name``, as a view. Raises UpdateFailed on an unknown name."""
        if name == HEAD and self.tied:
            name = EMBED
        for part, (fused, index) in FUSED.items():
            if part in name and name.replace(part, fused) in self.parameters:
                owner, _, leaf = name.replace(part, fused).rpartition(".")
                layer: Any = self.model.get_submodule(owner)
                start = sum(layer.output_sizes[:index])
                return getattr(layer, leaf)[start:start + layer.output_sizes[index]]
        if expert := EXPERT.fullmatch(name):
            return self._expert(name, expert[1], int(expert[2]), expert[3])
        parameter = self.parameters.get(name)
        if parameter is None:
            raise UpdateFailed(f"this engine has no place for the tensor {name}")
        return parameter[:self.vocab_size] if name in (HEAD, EMBED) else parameter

    def _local(self, prefix: str, number: int) -> int:
        """The number of an expert within this rank, -1 if another rank of the engine holds it."""
        held = getattr(self.model.get_submodule(prefix + "routed_experts"), "_expert_map", None)
        return number if held is None else int(held[number]) if number < len(held) else -1

    def holds(self, name: str) -> bool:
        """Whether this rank holds the tensor; with experts spread over ranks, another may."""
        expert = EXPERT.fullmatch(name)
        return expert is None or expert[1] + "routed_experts.w2_weight" not in self.parameters or self._local(expert[1], int(expert[2])) >= 0

    def _expert(self, name: str, prefix: str, number: int, kind: str) -> torch.Tensor:
        leaf, half = STACKS[kind]
        stack = self.parameters.get(prefix + leaf)
        number = self._local(prefix, number)
        if stack is None or not 0 <= number < stack.shape[0]:
            raise UpdateFailed(f"this engine has no place for the tensor {name}")
        rows = stack.shape[1] // 2
        return stack[number] if half is None else stack[number, half * rows:(half + 1) * rows]

    def uncovered(self, names: Iterable[str]) -> list[str]:
        """Parameters of the engine of which some element belongs to none of ``names``."""
        covered: dict[int, int] = {}
        for name in {EMBED if self.tied and n == HEAD else n for n in names if self.holds(n)}:
            view = self.view(name)
            pointer = view.untyped_storage().data_ptr()
            covered[pointer] = covered.get(pointer, 0) + view.numel()
        out = []
        for name, parameter in self.parameters.items():
            expected = parameter.numel()
            if name in (HEAD, EMBED):  # rows past the vocabulary are padding
                expected = self.vocab_size * parameter.shape[1]
            if covered.get(parameter.untyped_storage().data_ptr(), 0) != expected:
                out.append(name)
        return out

    def place_problems(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors of ``shapes`` whose place in the engine has another shape, and elements of the engine that none fills."""
        out = []
        for name, shape in shapes.items():
            if not self.holds(name):
                continue
            found = tuple(self.view(name).shape)
            if found != shape:
                out.append(f"{name}: {list(shape)} in the checkpoint, {list(found)} in the engine")
        return out or [f"{name}: not filled by any tensor of the checkpoint" for name in self.uncovered(shapes)]

    def padding_problems(self) -> list[str]:
        """Vocabulary rows past the real ones must be zero: they are no part of any tensor that was sent."""
        padded = ((n, self.parameters[n][self.vocab_size:]) for n in (HEAD, EMBED) if n in self.parameters)
        return [f"{name}: padding rows past {self.vocab_size} are not zero" for name, rows in padded if bool(rows.any())]

    def describe(self, name: str) -> TensorInfo:
        """Name, dtype, shape and digest of what the engine holds for ``name``."""
        return describe(name, self.view(name))

    def problems(self, manifest: Manifest) -> list[str]:
        """Every difference between what the engine holds and ``manifest``: element for element, and nothing uncovered."""
        found = (mismatch(info, self.describe(info.name)) for info in manifest.tensors if self.holds(info.name))
        out = [problem for problem in found if problem is not None]
        out += [f"{name}: the engine has elements that no announced tensor covers" for name in self.uncovered(manifest.by_name())]
        return out + self.padding_problems()
