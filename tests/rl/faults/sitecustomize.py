"""Faults for the negative controls of reproducibility, planted from outside: the product has no switch for them.

Python imports a module of this name at its start where this folder is on PYTHONPATH, which only the tests put there.
``VIME_TEST_FAULT=NAME:STEP`` names the fault and the step in which it begins. Every fault is what its real cousin
does: it draws its order from the system, from a clock, or from where objects happen to lie.
"""
from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import random
import signal
import sys
import time

NAME, _, _STEP = os.environ.get("VIME_TEST_FAULT", "").partition(":")
STEP = int(_STEP or 0)
chance = random.SystemRandom()


def another_order(items):
    """A random order that is not the given one, where there is another."""
    items = list(items)
    for _ in range(100):
        order = list(items)
        chance.shuffle(order)
        if order != items:
            return order
    return items


def unseeded_shuffle(loop):
    given = loop.problems_of_step

    def problems_of_step(problems, step, count):
        right = given(problems, step, count)
        return right if step < STEP else another_order(right)

    loop.problems_of_step = problems_of_step


def clock_seed(rollout):
    import msgspec

    given = rollout.requests_of_step

    def requests_of_step(config, text, prompts, step):
        right = given(config, text, prompts, step)
        return right if step < STEP else [msgspec.structs.replace(r, seed=time.time_ns()) for r in right]

    rollout.requests_of_step = requests_of_step


def set_order(loop):
    """The samples are gathered in a set on their way into the batch; the controller's hash seed is random."""
    given = loop.rollout

    def rollout(config, text, prompts, step, *args, **kwargs):
        batch = given(config, text, prompts, step, *args, **kwargs)
        by_name = {t.request_id: t for t in batch}
        return batch if step < STEP else [by_name[name] for name in set(by_name)]

    loop.rollout = rollout


def add_order(trainer):
    """One weight's gradient is added row by row in the order in which rows happen to be ready, as an atomic add does."""
    import torch

    given = trainer.Trainer.train_step
    calls = [0]

    def train_step(self, batch, total_tokens):
        optimizer, rows = self.optimizer, []
        calls[0] += 1
        if calls[0] - 1 < STEP:
            return given(self, batch, total_tokens)
        layer = self.model.decoder.layers[1].mlp.linear_fc2

        def keep(module, inputs, output):
            x, out = inputs[0].detach(), output[0]
            if out.requires_grad:
                out.register_hook(lambda dy: rows.append((x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))))

        hook, finish = layer.register_forward_hook(keep), optimizer.finish_gradients

        def finish_gradients():
            x, dy = (torch.cat(part).float() for part in zip(*rows, strict=True))
            layer.weight.main_grad.zero_()
            for row in another_order(range(len(x))):
                layer.weight.main_grad.add_(torch.outer(dy[row], x[row]))
            finish()

        optimizer.finish_gradients = finish_gradients
        try:
            return given(self, batch, total_tokens)
        finally:
            hook.remove()
            del optimizer.finish_gradients

    trainer.Trainer.train_step = train_step


def stale_cache(engine):
    """The prefix cache survives the update before step STEP: blocks of a prompt keep the old weights' keys and values."""
    given = engine.Engine.run_update

    def run_update(self, version, transport, check_equal):
        reset = self.engine.reset_prefix_cache
        if version >= STEP:
            self.engine.reset_prefix_cache = lambda *args, **kwargs: True
        try:
            return given(self, version, transport, check_equal)
        finally:
            self.engine.reset_prefix_cache = reset

    engine.Engine.run_update = run_update


def die_writing(writer):
    """The rank is killed in the middle of the tensors of checkpoint STEP."""
    given = writer.HfWriter.write

    def write(self, name, tensor, part=None):
        if f"step-{STEP:06d}" in str(self.folder) and len(self._seen) > 5:
            os.kill(os.getpid(), signal.SIGKILL)
        given(self, name, tensor, part)

    writer.HfWriter.write = write


FAULTS = {
    "unseeded_shuffle": ("vime.rl.loop", unseeded_shuffle), "clock_seed": ("vime.rl.rollout", clock_seed),
    "set_order": ("vime.rl.loop", set_order), "add_order": ("vime.rl.trainer", add_order),
    "stale_cache": ("vime.vllm.engine", stale_cache), "die_writing": ("vime.weights.writer", die_writing),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Plants the fault into its module when that has been imported."""

    def __init__(self, name, plant):
        self.name, self.plant = name, plant

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        given = spec.loader.exec_module

        def exec_module(module):
            given(module)
            self.plant(module)

        spec.loader.exec_module = exec_module
        return spec


if NAME:
    sys.meta_path.insert(0, _Finder(*FAULTS[NAME]))
