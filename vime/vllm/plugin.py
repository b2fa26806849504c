"""Entry point of ``vllm.general_plugins``: routes vLLM's operations to ``vime.ops`` where the environment asks for it.

vLLM loads general plugins in every process it starts. Without ``VIME_PLUGIN`` this one touches nothing, so that an
installed vime never changes an engine that did not ask for it. vLLM only logs a plugin that raises; what is really in
use is checked by :func:`vime.vllm.active.assert_active` once the model is built.
"""
from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from vime.contract import OPS
from vime.errors import VimeError
from vime.fp8 import MODES
from vime.fp8 import problem as fp8_problem

ENV = "VIME_PLUGIN"

#: What this adapter can route. A dense model has no place for ``moe``.
ROUTED = ("embedding", "linear", "norm", "rope", "activation", "attention", "moe", "logprob", "sampling")

_installed: tuple[str, ...] | None = None
_installed_fp8 = ""


class PluginError(VimeError):
    """``VIME_PLUGIN`` cannot be honoured."""


def settings(ops: Iterable[str], fp8: str = "") -> str:
    """The value of ``VIME_PLUGIN`` that switches on ``ops`` (names of :data:`vime.contract.OPS`); ``fp8``: one of
    :data:`vime.fp8.MODES`."""
    ops = check_ops(ops)
    return json.dumps({"ops": ops, "fp8": check_fp8(fp8, ops)} if fp8 else {"ops": ops})


def check_ops(ops: Iterable[str]) -> list[str]:
    """``ops`` in the order of the contract. Raises PluginError naming an unknown or unrouted one."""
    wanted = list(ops)
    unknown = [op for op in wanted if op not in OPS]
    if unknown:
        raise PluginError(f"unknown operation {', '.join(map(repr, unknown))}; known: {', '.join(OPS)}")
    missing = [op for op in wanted if op not in ROUTED]
    if missing:
        raise PluginError(f"the vLLM adapter cannot align {', '.join(missing)} yet; leave it out (it covers {', '.join(ROUTED)})")
    return [op for op in OPS if op in wanted]


def check_fp8(fp8: str, ops: Iterable[str]) -> str:
    """``fp8`` itself. Raises PluginError for an unknown mode, or one without the operation that it is a form of."""
    if fp8 not in MODES:
        raise PluginError(f"fp8 is {fp8!r}; expected {' or '.join(map(repr, MODES))}")
    if fp8 and (problem := fp8_problem(ops, experts=False)) is not None:
        raise PluginError(problem)
    return fp8


def _asked() -> dict[str, Any] | None:
    text = os.environ.get(ENV, "")
    if not text:
        return None
    try:
        asked = json.loads(text)
        return {"ops": list(asked["ops"]), "fp8": asked.get("fp8", "")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PluginError(f'{ENV} is {text!r}; expected JSON like {{"ops": ["linear", "norm"]}}') from error


def requested() -> tuple[str, ...] | None:
    """Operations that the environment asks for; None where ``VIME_PLUGIN`` is unset or empty."""
    asked = _asked()
    return None if asked is None else tuple(check_ops(asked["ops"]))


def requested_fp8() -> str:
    """The mode of FP8 that the environment asks for."""
    asked = _asked()
    return "" if asked is None else check_fp8(asked["fp8"], asked["ops"])


def installed_fp8() -> str:
    """The mode of FP8 that :func:`register` put in effect in this process."""
    return _installed_fp8


def installed() -> tuple[str, ...] | None:
    """Operations that :func:`register` routed in this process; None if it did nothing."""
    return _installed


def register() -> None:
    """Install the requested operations. Takes no argument, idempotent, a no-op without ``VIME_PLUGIN``.

    Raises:
        PluginError: the request names an unknown operation, or a second call asks for other operations than the first.
    """
    global _installed, _installed_fp8
    ops, fp8 = requested(), requested_fp8()
    if ops is None or (ops, fp8) == (_installed, _installed_fp8):
        return
    if _installed is not None:
        raise PluginError(f"{ENV} now asks for {ops} (fp8 {fp8!r}), but {_installed} (fp8 {_installed_fp8!r}) are installed in this "
                          "process; start a new process")
    for op in ops:
        for install in _installers(op):
            install()
    _installed, _installed_fp8 = ops, fp8


def _where_vllm_has_it(module: str) -> Callable[[], None]:
    """The ``install`` of a module for layers that not every release of vLLM builds from these classes. Without them nothing is
    routed, and :func:`vime.vllm.active.assert_active` names the layers of a model that needs it."""
    def install() -> None:
        found = optional(module)
        if found is not None:
            found.install()

    return install


def optional(module: str) -> Any:
    """``vime.vllm.<module>``, or None where this vLLM lacks what it imports."""
    try:
        return importlib.import_module(f"vime.vllm.{module}")
    except ImportError:
        return None


def _installers(op: str) -> list[Callable[[], None]]:
    # Imported here: vLLM itself must not be imported where the plugin is off.
    from vime.vllm import attention, layers, linear, sampler

    return {
        "embedding": [linear.install_embedding],
        "linear": [linear.install_linear],
        "norm": [layers.install_norm],
        "rope": [layers.install_rope],
        "activation": [layers.install_activation],
        "attention": [attention.install, _where_vllm_has_it("latent")],
        "moe": [_where_vllm_has_it("experts")],
        "logprob": [sampler.install],
        "sampling": [sampler.install],
    }[op]
