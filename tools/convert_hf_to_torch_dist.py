"""Hugging Face folder -> Megatron ``torch_dist`` checkpoint, tensor by tensor, in one process and without a GPU.

The checkpoint loads at any tensor-, pipeline- and expert-parallel size. Megatron's model arguments may be given as in
any other launch line; what config.json already says is not needed and is ignored.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def _positive(text: str) -> int:
    """A whole number above 0. Raises argparse's error for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number above 0")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="Hugging Face folder (config.json, *.safetensors)")
    parser.add_argument("--save", type=Path, required=True, help="folder to make; the checkpoint is its subfolder release")
    parser.add_argument("--make-vocab-size-divisible-by", type=_positive, default=128, help="as in Megatron; times TP (default 128)")
    parser.add_argument("--tensor-model-parallel-size", type=_positive, default=1, help="only to pad the vocabulary as Megatron does")
    args, ignored = parser.parse_known_args(argv)

    from vime.commands.progress import TerminalProgress
    from vime.errors import exit_code_of, is_for_people
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.families import family_for
    from vime.weights.torch_dist.write import write

    if ignored:
        print(f"not needed here, ignored: {' '.join(ignored)}", file=sys.stderr)
    start = time.monotonic()
    try:
        source = HfCheckpoint(args.hf_checkpoint)
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        plan = family_for(source.config).plan(source.config, source.files, vocab_multiple=multiple)
        source.check(plan)
        with TerminalProgress() as progress:
            progress.phase("convert", len(plan.units))
            path = write(source, plan, args.save, lambda done: progress.advance(1))
    except Exception as error:
        if not is_for_people(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return exit_code_of(error)
    print(f"{path}: {len(source)} tensors ({plan.family}), {source.nbytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
