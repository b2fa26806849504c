"""Files that appear whole or not at all. Standard library only."""
from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def replace(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file of another name beside ``path``, then give it this name, readable for everyone. Folders above
    are made; what fails leaves nothing behind, and the file that was there before as it was."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(handle)
    aside = Path(name)
    try:
        write(aside)
        aside.chmod(0o644)  # mkstemp gives 0600
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A text file in UTF-8."""
    replace(path, lambda aside: aside.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """One process at a time: what several would otherwise make at the same place. The file beside it, ``.NAME.lock``, stays."""
    import fcntl  # here: not on every system, and only who shares a place needs it

    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.parent / f".{place.name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
