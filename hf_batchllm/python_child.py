"""Starting Python once more: which program it is, and that it finds this library."""

from __future__ import annotations

import multiprocessing.spawn
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]  # what the library is imported from


class CannotStart(Exception):
    """No child process can be started here."""


def python_program() -> str:
    """The program that is to run a child."""
    if getattr(sys, "frozen", False):
        raise CannotStart("this program is frozen into one file, which cannot start Python")
    program = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if not program:
        raise CannotStart("Python does not know its own program (`sys.executable` is empty)")
    return program


def python_path(folders: Iterable[str]) -> str:
    """A PYTHONPATH of these folders, in which a child finds the library that this process runs."""
    found = [folder for folder in dict.fromkeys(folders) if folder]
    first = next((each for each in found if (Path(each) / __name__.partition(".")[0]).is_dir()), None)
    if first is None or Path(first).resolve() != _ROOT:
        found.insert(0, str(_ROOT))
    return os.pathsep.join(dict.fromkeys(found))
