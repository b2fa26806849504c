"""Megatron ``torch_dist`` checkpoint -> Hugging Face folder, tensor by tensor, in one process and without a GPU."""
from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input-dir", type=Path, required=True, help="an iter_NNNNNNN or release folder, or their parent")
    parser.add_argument("--output-dir", type=Path, required=True, help="Hugging Face folder to make")
    parser.add_argument("--origin-hf-dir", type=Path, required=True,
                        help="the folder the training started from: config, tokenizer, names, dtypes")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing output folder")
    args = parser.parse_args(argv)
    for flag, source in (("--input-dir", args.input_dir), ("--origin-hf-dir", args.origin_hf_dir)):
        made, read = args.output_dir.resolve(), source.resolve()
        if made == read or made in read.parents or (read in made.parents and made.exists()):
            parser.error(f"--output-dir {args.output_dir} is, holds or is part of {flag} {source}, and would replace it; give a folder of its own")

    from vime.commands.progress import TerminalProgress
    from vime.errors import exit_code_of, is_for_people
    from vime.weights.torch_dist.read import TorchDist, to_hf

    start = time.monotonic()
    target = args.output_dir
    aside = target.with_name(f".{target.name}.new") if args.force and target.exists() else target
    try:
        if aside != target and aside.exists():
            shutil.rmtree(aside)  # of a run that was killed before it took its place
        checkpoint = TorchDist(args.input_dir)
        with TerminalProgress() as progress:
            progress.phase("convert", None)
            cast = to_hf(checkpoint, args.origin_hf_dir, aside, lambda done, total: progress.advance(1))
    except Exception as error:
        if not is_for_people(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return exit_code_of(error)
    if aside != target:  # the old folder goes only when the new one is whole
        shutil.rmtree(target)
        aside.rename(target)
    note = f"; {cast} tensors cast to the dtype they have in {args.origin_hf_dir}" if cast else ""
    print(f"{target} written in {time.monotonic() - start:.1f} s{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
