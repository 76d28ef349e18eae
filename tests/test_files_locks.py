"""Two runs on one output, and files that are replaced or removed meanwhile."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_file_places import PATHS, half_done
from support_file_places import folder as folder  # fixtures, as are the next three
from support_file_places import given as given
from support_file_places import wanted as wanted
from support_file_places import whole as whole
from support_file_runs import results, run

from hf_batchllm.errors import OutputBusyError, OutputWriteError
from hf_batchllm.files.store import locks


def test_two_processes_on_one_output(given, wanted) -> None:
    holder = """
import sys
from support_file_runs import open_output
from hf_batchllm.files.store.sources import open_source
from hf_batchllm.files.store.run_record import RunRecord
with open_source(sys.argv[1]) as source, open_output(sys.argv[2], source=source) as output:
    output.begin(RunRecord({}), source)
    print("ready", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", holder, given, wanted]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=PATHS) as other:
        assert other.stdout.readline() == b"ready\n"
        for restart in (False, True):
            with pytest.raises(
                OutputBusyError, match=rf"another run \(process {other.pid} on \S+, since .*\) is writing"
            ):
                run(given, wanted, restart=restart)
        link = wanted.replace("out", "link")
        os.symlink(wanted, link)
        with pytest.raises(OutputBusyError):
            run(given, link)
        other.kill()
    run(given, wanted)
    assert len(results(wanted)) == 30


def test_a_file_that_was_replaced_before_it_was_locked_is_opened_again(given, wanted, whole, monkeypatch) -> None:
    half_done(given, wanted)
    real, done = locks.lock, []

    def lock(*args) -> bool:
        if not done:
            done.append(1)
            run(given, wanted, seed=7)  # ends, and puts another file there, just before this one is locked
        return real(*args)

    monkeypatch.setattr("hf_batchllm.files.store.journal.lock", lock)
    todo: list[set[int]] = []
    run(given, wanted, seed=7, seen=todo.append)
    assert todo[-1] == set()
    assert Path(wanted).read_bytes() == whole


def test_the_file_that_takes_the_place_of_another_is_locked_before(given, wanted, monkeypatch) -> None:
    real, busy = os.replace, []

    def replace(one: str, other: str) -> None:
        real(one, other)
        if other == wanted:
            with open(wanted, "rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            busy.append(1)

    monkeypatch.setattr(os, "replace", replace)
    run(given, wanted)
    assert busy == [1]


@pytest.mark.parametrize("stop_after", [9, None])
def test_a_file_that_is_removed_while_it_is_written_to_is_made_again(given, wanted, whole, stop_after) -> None:
    notes = run(given, wanted, seed=7, stop_after=stop_after, done=lambda number: Path(wanted).unlink(missing_ok=True))
    assert "9 results" in notes[0] if stop_after else "30 results" in notes[0]
    assert run(given, wanted, seed=7) == []
    assert Path(wanted).read_bytes() == whole


def test_a_file_that_was_put_in_its_place_is_left_alone(given, wanted, folder) -> None:
    def replaced(number: int) -> None:
        (folder / "other").write_bytes(b"other")
        os.replace(folder / "other", wanted)

    with pytest.raises(
        OutputWriteError, match=r"was replaced by another file .* its own 30 results are in .*rescued-1"
    ):
        run(given, wanted, done=replaced)
    assert Path(wanted).read_bytes() == b"other"
    assert len(results(wanted + ".rescued-1")) == 30


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_said_once(given, wanted, monkeypatch, number) -> None:
    def flock(*args) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    notes = run(given, wanted)
    assert len(notes) == 1
    assert "cannot be locked" in notes[0]
    monkeypatch.setattr(locks, "fcntl", None)
    assert "no `fcntl`" in run(given, wanted)[0]
