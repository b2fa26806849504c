"""Mapping files: how somebody else's dump comes under our names. Everything in one is checked before any of it is used."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment.errors import InputError, KeyCollision
from alignment.formats import format_of
from alignment.sources import as_tensor

SCHEMA = 1
#: Seconds that all patterns of a file may take over all names; a good one takes microseconds a name.
_PATIENCE = 20.0
#: What a process of its own does with them: nothing else can stop Python's ``re`` while it goes back and forth.
_TRY = "import json, re, sys\np, n = json.load(sys.stdin)\nfor x in p:\n  c = re.compile(x)\n  for y in n: c.sub('', y)"
_KNOWN = {"schema": int, "tensors": dict, "patterns": list, "ignore": list, "dtypes": dict, "order": list}


def rename(dump: Mapping[str, Any], rules: Mapping[str, Any] | None, other: Iterable[str] = ()) -> Mapping[str, Any]:
    """A foreign dump under our names.

    ``rules`` (the mapping file) may have ``tensors`` {their name: our name}, ``patterns`` [{"match": regex, "name":
    replacement}], ``ignore`` [regex] (names that are not compared), ``dtypes`` {our name: dtype} (raw integers that
    hold another format, for example uint16 that is bfloat16), ``order`` [our names], ``schema`` 1. Two names that become
    one are a KeyCollision, a rule that fits nothing is an InputError: it was meant to do something. ``other`` are the names of
    the other side, where one file is for both: a rule has to fit one of the two.
    """
    if rules is None:
        return dump
    tensors, patterns, ignore, dtypes, order = _checked(rules)
    _bounded([*(p for p, _ in patterns), *ignore], [*dump, *other])
    _all_used(tensors, patterns, ignore, [*dump, *other])
    out: dict[str, Any] = {}
    for name in dump:
        new = _new(name, tensors, patterns, ignore)
        if new is None:
            continue
        if new in out:
            raise KeyCollision(f"the mapping gives two tensors the name {new!r}", "one tensor a name")
        out[new] = dump[name]
    ours = {*out, *(n for name in other if (n := _new(name, tensors, patterns, ignore)) is not None)}
    for what, names in (("a dtype", dtypes), ("a place in the order", order)):
        gone = next((n for n in names if n not in ours), None)
        if gone is not None:
            raise InputError(f"the mapping has {what} for {gone!r}, which is not there", "one of our names")
    for name, dtype in dtypes.items():
        if name in out:
            out[name] = _read_as(out[name], name, dtype)
    if order:
        return {**{n: out[n] for n in order if n in out}, **{n: v for n, v in out.items() if n not in set(order)}}
    from alignment.dumps import Dump

    return Dump(getattr(dump, "path", Path("dump")), out)


def _checked(rules: Any) -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]], list[re.Pattern[str]], dict[str, str], list[str]]:
    if not isinstance(rules, Mapping) or set(rules) - set(_KNOWN):
        found = sorted(set(rules) - set(_KNOWN)) if isinstance(rules, Mapping) else f"a {type(rules).__name__}"
        raise InputError(f"the mapping has {found}", "an object with only " + ", ".join(sorted(_KNOWN)))
    for key, kind in _KNOWN.items():
        if key in rules and (not isinstance(rules[key], kind) or isinstance(rules[key], bool)):
            raise InputError(f"{key!r} of the mapping is a {type(rules[key]).__name__}", f"a {'number' if kind is int else kind.__name__}")
    if rules.get("schema", SCHEMA) != SCHEMA:
        raise InputError(f"the mapping has schema {rules['schema']}", f"schema {SCHEMA}", "read it with the version that it was written for")
    tensors, dtypes, order = dict(rules.get("tensors", {})), dict(rules.get("dtypes", {})), list(rules.get("order", []))
    from alignment.dumps import check_name

    for name in (*tensors.values(), *dtypes, *order):
        check_name(name, "the mapping")
    twice = next((n for n in order if order.count(n) > 1), None)
    if twice is not None:
        raise InputError(f"the order of the mapping has {twice!r} twice", "each name once")
    odd = next((d for d in dtypes.values() if not isinstance(d, str)), None)
    if odd is not None:
        raise InputError(f"the mapping has a dtype {odd!r}", "the name of one, such as 'bfloat16'")
    patterns = rules.get("patterns", [])
    wrong = next((p for p in patterns if not isinstance(p, Mapping) or set(p) != {"match", "name"} or not all(isinstance(x, str) for x in p.values())), None)
    wrong = wrong if wrong is not None else next((p for p in rules.get("ignore", []) if not isinstance(p, str)), None)
    if wrong is not None:
        raise InputError(f"a pattern of the mapping is {str(wrong)[:80]}", "{'match': regular expression, 'name': replacement}, or text to ignore")
    try:
        return tensors, [(re.compile(p["match"]), p["name"]) for p in patterns], [re.compile(p) for p in rules.get("ignore", [])], dtypes, order
    except (re.error, RecursionError, OverflowError) as e:
        raise InputError(f"a pattern of the mapping cannot be used ({e})", "regular expressions of Python") from e


def _bounded(patterns: list[re.Pattern[str]], names: list[str]) -> None:
    """Refuse what backtracks without end, such as ``(a+)+$``."""
    if not patterns:
        return
    try:
        text = json.dumps([[p.pattern for p in patterns], names])
        subprocess.run([sys.executable, "-I", "-S", "-c", _TRY], input=text, text=True, timeout=_PATIENCE, check=True, stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired as e:
        shown = ", ".join(p.pattern for p in patterns)[:80]
        raise InputError(f"the patterns of the mapping ({shown}) are not through with {len(names)} names after {_PATIENCE:g} s",
                         "regular expressions that do not repeat a repetition") from e  # fmt: skip
    except subprocess.CalledProcessError as e:
        raise InputError(f"the patterns of the mapping cannot be tried ({e.stderr.strip()[-200:]})", "regular expressions of Python") from e


def _all_used(tensors: Mapping[str, str], patterns: list[tuple[re.Pattern[str], str]], ignore: list[re.Pattern[str]], names: list[str]) -> None:
    shown = "names of the dump: " + ", ".join(names[:6])
    unused = sorted(set(tensors) - set(names))
    if unused:
        raise InputError(f"the mapping renames {unused[0]!r}, which is not there", shown)
    for p in [*(p for p, _ in patterns), *ignore]:
        if not any(p.search(n) for n in names):
            raise InputError(f"the pattern {p.pattern!r} of the mapping fits nothing", shown)


def _new(name: str, tensors: Mapping[str, str], patterns: list[tuple[re.Pattern[str], str]], ignore: list[re.Pattern[str]]) -> str | None:
    """Our name of a tensor; None where it is ignored."""
    from alignment.dumps import check_name

    if name in tensors:
        return tensors[name]
    if any(p.search(name) for p in ignore):
        return None
    try:
        new = next((p.sub(r, name) for p, r in patterns if p.search(name)), name)
    except (re.error, IndexError) as e:
        raise InputError(f"a replacement of the mapping cannot be used for {name} ({e})", "groups that its pattern has") from e
    return check_name(new, "the mapping")


def _read_as(value: Any, name: str, dtype: str) -> torch.Tensor:
    target = format_of(dtype, name)
    if isinstance(value, np.ndarray) and value.dtype.kind == "V" and value.dtype.itemsize in (1, 2, 4, 8):  # a dtype that numpy has no name for
        value = np.ascontiguousarray(value).reshape(value.shape).view(f"u{value.dtype.itemsize}")
    raw = as_tensor(value.tensor() if hasattr(value, "tensor") else value, name)
    if raw.dtype.itemsize != target.itemsize or raw.is_complex():
        raise InputError(f"{name} has {raw.dtype.itemsize} bytes an element", f"{target.itemsize} for {dtype}")
    return raw.view(getattr(torch, target.name))
