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

ENV = "VIME_PLUGIN"

#: What this adapter can route. A dense model has no place for ``moe``.
ROUTED = ("embedding", "linear", "norm", "rope", "activation", "attention", "moe", "logprob", "sampling")

_installed: tuple[str, ...] | None = None


class PluginError(VimeError):
    """``VIME_PLUGIN`` cannot be honoured."""


def settings(ops: Iterable[str]) -> str:
    """The value of ``VIME_PLUGIN`` that switches on ``ops`` (names of :data:`vime.contract.OPS`)."""
    return json.dumps({"ops": check_ops(ops)})


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


def requested() -> tuple[str, ...] | None:
    """Operations that the environment asks for; None where ``VIME_PLUGIN`` is unset or empty."""
    text = os.environ.get(ENV, "")
    if not text:
        return None
    try:
        ops = json.loads(text)["ops"]
    except (ValueError, TypeError, KeyError) as error:
        raise PluginError(f'{ENV} is {text!r}; expected JSON like {{"ops": ["linear", "norm"]}}') from error
    return tuple(check_ops(ops))


def installed() -> tuple[str, ...] | None:
    """Operations that :func:`register` routed in this process; None if it did nothing."""
    return _installed


def register() -> None:
    """Install the requested operations. Takes no argument, idempotent, a no-op without ``VIME_PLUGIN``.

    Raises:
        PluginError: the request names an unknown operation, or a second call asks for other operations than the first.
    """
    global _installed
    ops = requested()
    if ops is None or ops == _installed:
        return
    if _installed is not None:
        raise PluginError(f"{ENV} now asks for {ops}, but {_installed} are installed in this process; start a new process")
    for op in ops:
        for install in _installers(op):
            install()
    _installed = ops


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
