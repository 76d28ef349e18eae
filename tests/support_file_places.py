"""Where tests of files on the disk put theirs, and other processes that use them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support_file_runs import results, run, write_input

ROOT = Path(__file__).parents[1]
COUNT = 30  # records of ``given``
PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}  # of other processes


@pytest.fixture
def folder(tmp_path: Path):
    """In memory where that can be had: what waits for a disk here waits for each of some hundred runs."""
    if not os.path.isdir("/dev/shm") or not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


@pytest.fixture
def given(folder: Path) -> str:
    path = str(folder / "in.jsonl")
    write_input(path, COUNT)
    return path


@pytest.fixture
def wanted(folder: Path) -> str:
    return str(folder / "out.jsonl")


@pytest.fixture
def whole(given: str, folder: Path) -> bytes:
    """What an uninterrupted run writes."""
    path = folder / "whole.jsonl"
    run(given, str(path), seed=7)
    return path.read_bytes()


def program(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=PATHS, timeout=100, **options)


def half_done(given: str, wanted: str) -> list[bytes]:
    run(given, wanted, seed=7, stop_after=9)
    return Path(wanted).read_bytes().splitlines(keepends=True)


def numbers(wanted: str) -> list[int]:
    return [each["index"] for each in results(wanted)]


def done_again(given: str, wanted: str, **options: Any) -> set[int]:
    """What a further run still has to do."""
    todo: list[set[int]] = []
    run(given, wanted, seen=todo.append, **options)
    return todo[-1]


def folder_of(path: str) -> list[str]:
    return sorted(os.listdir(os.path.dirname(path)))
