"""Megatron ``torch_dist`` checkpoint -> Hugging Face folder, tensor by tensor, in one process and without a GPU."""
from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def _or_cannot_write(what: str, then: str) -> Iterator[None]:
    """Raises CannotWrite for what the system refuses inside."""
    from vime.weights.folders import CannotWrite

    try:
        yield
    except OSError as error:
        raise CannotWrite(f"{what}: {error.strerror or error}; {then}") from error


def _remove(folder: Path) -> None:
    """What a run that was killed has left, if anything. Raises CannotWrite."""
    if folder.exists():
        with _or_cannot_write(f"cannot remove {folder}, which an earlier run left", "remove it"):
            shutil.rmtree(folder)


def _replace(target: Path, new: Path, old: Path) -> None:
    """Put the folder ``new`` in the place of ``target``, which is ``old`` for a moment and goes only when ``new`` is there.

    Raises CannotWrite: ``target`` is as it was and ``new`` is gone, unless the message says that only ``old`` stayed.
    """
    try:
        _remove(old)
        with _or_cannot_write(f"cannot replace {target}", "it is as it was, and nothing was left behind. Give another --output-dir"):
            target.rename(old)
            try:
                new.rename(target)
            except OSError:
                old.rename(target)
                raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    with _or_cannot_write(f"{target} is written and whole, but the folder that it replaced cannot be removed from {old}", "remove it"):
        shutil.rmtree(old)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input-dir", type=Path, required=True, help="an iter_NNNNNNN or release folder, or their parent")
    parser.add_argument("--output-dir", type=Path, required=True, help="Hugging Face folder to make")
    parser.add_argument("--origin-hf-dir", type=Path, required=True,
                        help="the folder the training started from: config, tokenizer, names, dtypes")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing output folder")
    args = parser.parse_args(argv)
    if args.output_dir.is_symlink() or (args.output_dir.exists() and not args.output_dir.is_dir()):
        found = "a symbolic link" if args.output_dir.is_symlink() else "no folder"
        parser.error(f"--output-dir {args.output_dir} is {found}; expected a folder, or a name that is free. Give the folder itself or another name")
    for flag, source in (("--input-dir", args.input_dir), ("--origin-hf-dir", args.origin_hf_dir)):
        made, read = args.output_dir.resolve(), source.resolve()
        if made == read or made in read.parents or (read in made.parents and made.exists()):
            parser.error(f"--output-dir {args.output_dir} is, holds or is part of {flag} {source}, and would replace it; give a folder of its own")

    from vime.commands.progress import TerminalProgress
    from vime.errors import exit_code_of, is_for_people
    from vime.weights.torch_dist.read import TorchDist, to_hf

    start = time.monotonic()
    target = args.output_dir
    whole = target.resolve()  # its own name, where the target is given as . or ends in ..
    old, new = (whole.with_name(f".{whole.name}.{end}") for end in ("old", "new"))
    try:
        if args.force and old.is_dir() and not target.exists():
            with _or_cannot_write(f"cannot move {old} back to {target}, which an earlier run was to replace", "move it"):
                old.rename(target)  # it was killed between two renames
        aside = new if args.force and target.exists() else target
        if aside == new:
            _remove(new)
        checkpoint = TorchDist(args.input_dir)
        with TerminalProgress() as progress:
            progress.phase("convert", None)
            cast = to_hf(checkpoint, args.origin_hf_dir, aside, lambda done, total: progress.advance(1))
        if aside == new:  # the old folder goes only when the new one is whole
            _replace(whole, new, old)
    except Exception as error:
        if not is_for_people(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return exit_code_of(error)
    note = f"; {cast} tensors cast to the dtype they have in {args.origin_hf_dir}" if cast else ""
    print(f"{target} written in {time.monotonic() - start:.1f} s{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
