"""Results on the disk: what a run leaves wherever it dies, and who may go on with it."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from file_runs import SETTINGS, answer, results, run, write_input

from hf_batchllm.errors import (
    ConfigError,
    OutputBusyError,
    OutputFileError,
    OutputWriteError,
    RunChangedError,
)
from hf_batchllm.files import locks, syncing
from hf_batchllm.files.journal import identify
from hf_batchllm.files.outputs import open_output
from hf_batchllm.files.run_record import RunRecord
from hf_batchllm.files.sources import open_source, record_key

ROOT = Path(__file__).parents[1]
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
    write_input(path, 30)
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


# Runs that end


def test_results_are_in_the_order_of_the_input(given, wanted) -> None:
    assert run(given, wanted, seed=7) == []
    found = results(wanted)
    assert [each["index"] for each in found] == list(range(30))
    raws = Path(given).read_bytes().splitlines()
    assert [each["key"] for each in found] == [record_key(raw) for raw in raws]
    record = json.loads(Path(wanted + ".run.json").read_text())
    assert record["settings"] == SETTINGS
    assert record["seed"] == 7
    assert record["input"]["records"] == 30
    assert record["input"]["path"] == given
    assert record["figures"] == {"results": 30}
    assert record["finished"]
    assert record["process"]["pid"] == os.getpid()
    assert sorted(os.listdir(os.path.dirname(wanted))) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def test_a_second_run_has_nothing_to_do_and_changes_nothing(given, wanted) -> None:
    run(given, wanted, seed=7)
    before = {path: Path(path).read_bytes() for path in (wanted, wanted + ".run.json")}
    todo: list[set[int]] = []
    run(given, wanted, seen=todo.append)
    assert todo == [set()]
    assert {path: Path(path).read_bytes() for path in before} == before


def test_the_first_records_alone(given, wanted) -> None:
    for _ in range(2):
        with open_source(given) as source, open_output(wanted, source=source) as output:
            output.begin(RunRecord({}, 7), source, limit=5)
            todo = output.missing()
            output.append([(n, answer(n, raw)) for n, raw in zip(todo.tolist(), source.records(todo), strict=True)])
            output.finish(figures={"new": len(todo)})
        assert len(results(wanted)) == 5
        assert json.loads(Path(wanted + ".run.json").read_text())["figures"] == {"new": 5}, "of the run that did it"
    run(given, wanted, settings={})
    assert [each["index"] for each in results(wanted)] == list(range(30))
    record = json.loads(Path(wanted + ".run.json").read_text())
    assert (record["results"], record["figures"]) == (30, {"results": 30})


def test_as_they_finished(given, wanted) -> None:
    run(given, wanted, order="finished")
    found = [each["index"] for each in results(wanted)]
    assert found != sorted(found)
    assert sorted(found) == list(range(30))
    with pytest.raises(OutputFileError, match="order 'sideways'"):
        run(given, wanted, order="sideways")


def test_the_seed_is_drawn_once(given, wanted, whole) -> None:
    run(given, wanted, stop_after=9)
    seed = json.loads(Path(wanted + ".run.json").read_text())["seed"]
    run(given, wanted)
    assert {each["text"].split()[-1] for each in results(wanted)} == {str(seed)}
    other = wanted.replace("out", "other")
    run(given, other, stop_after=1)
    assert json.loads(Path(other + ".run.json").read_text())["seed"] != seed


def test_links_are_followed_and_modes_kept(given, folder) -> None:
    (folder / "far").mkdir()
    real, link = folder / "far" / "real.jsonl", folder / "out.jsonl"
    link.symlink_to(real)
    run(given, str(link), stop_after=9)
    os.chmod(real, 0o640)
    run(given, str(link))
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert len(results(str(real))) == 30
    assert sorted(os.listdir(folder / "far")) == ["real.jsonl", "real.jsonl.run.json"]


def test_an_empty_file_is_as_good_as_none_and_one_that_was_not_used_goes(given, wanted, whole) -> None:
    with open_output(wanted):
        assert os.path.exists(wanted)
    assert not os.path.exists(wanted)
    Path(wanted).touch()
    with open_output(wanted):
        pass
    assert os.path.exists(wanted), "it was there before"
    run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == whole


def test_openai_batches_are_known() -> None:
    line = {"id": "batch_req_12_0123456789ab", "custom_id": "x", "response": {"status_code": 200}, "error": None}
    assert identify(line) == (12, "0123456789ab", False)
    assert identify({**line, "response": {"status_code": 400}}) == (12, "0123456789ab", True)
    assert identify({**line, "response": None, "error": {"message": "no"}}) == (12, "0123456789ab", True)
    assert identify({**line, "id": "batch_req_x"}) is None
    assert identify({"index": 1, "key": "0123456789ab", "error": "why"}) == (1, "0123456789ab", True)
    for odd in (
        {"index": True},
        {"index": -1},
        {"index": 1.0},
        {"index": 1 << 60},
        {"key": "0123456789AB"},
        {"key": 1},
    ):
        assert identify({"index": 1, "key": "0123456789ab", **odd}) is None


# Runs that are killed


KILLED = {
    "a first run": {"run": {}},
    "one that goes on": {"before": {"stop_after": 9}, "run": {}},
    "one that begins afresh": {
        "before": {"stop_after": 9},
        "run": {"restart": True},
        "allowed": ["out.jsonl.bak-1", "out.jsonl.bak-1.run.json"],
    },
    "one that retries errors": {
        "before": {"bad": [3, 5]},
        "run": {"retry_errors": True},
        "again": {"retry_errors": True},
    },
    "one that makes a table": {"output": "out.csv", "before": {"stop_after": 15}, "run": {}},
}


def test_killed_before_any_call_that_changes_a_file_and_in_the_middle_of_any_write(folder) -> None:
    done = program("-m", "file_runs", "every", str(folder), json.dumps(KILLED))
    reports = json.loads(done.stdout or "null")
    assert reports is not None, done.stderr
    assert {name: report["wrong"] for name, report in reports.items()} == {name: [] for name in KILLED}
    assert all(report["deaths"] > 25 for report in reports.values()), reports


def test_killed_at_random_again_and_again(folder) -> None:
    done = program("-m", "file_runs", "random", str(folder), "out.jsonl", "80", "300")
    assert json.loads(done.stdout or "null") == {"deaths": 80, "wrong": []}, done.stderr


@pytest.mark.parametrize("half", [0.0, 0.5, 1.0])
def test_interrupted_on_any_line_of_an_append(given, folder, half, monkeypatch) -> None:
    """Ctrl-C comes between any two lines of Python, also behind half a write."""
    real_write = os.write

    def write(descriptor: int, data) -> int:
        if half and len(data) > 1:
            real_write(descriptor, bytes(data[: int(len(data) * half)]))
            raise KeyboardInterrupt
        return real_write(descriptor, data)

    for at in range(1, 200):
        wanted = str(folder / f"out{at}.jsonl")
        with open_source(given) as source, open_output(wanted, source=source, fsync="1000s") as output:
            output.begin(RunRecord(SETTINGS, 7), source)
            if at % 2:  # else the thread is begun by the append that is interrupted
                output.append([(0, answer(0, source.records([0])[0], seed=7))])
            lines = [(number, answer(number, raw, seed=7)) for number, raw in enumerate(source.records([1, 2]), 1)]
            count = 0

            def trace(frame, event, arg, at=at):
                nonlocal count
                if not frame.f_code.co_filename.endswith(("journal.py", "paths.py", "syncing.py")):
                    return None
                if event == "line":
                    count += 1
                    if count == at:
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "write", write)
                    output.append(lines)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.settrace(None)
            output.append([(3, answer(3, source.records([3])[0], seed=7))])
        found = Path(wanted).read_bytes()
        assert found.endswith(b"\n")
        indices = [each["index"] for each in results(wanted)]
        first = [0] * (at % 2)
        assert indices in ([*first, 3], [*first, 1, 3], [*first, 1, 2, 3])
        assert interrupted or len(indices) == 3 + at % 2
        run(given, wanted, seed=7)
        assert [each["index"] for each in results(wanted)] == list(range(30))
        if count < at:
            break
    else:
        pytest.fail("the append has no end")


# What is found at the end of a file, and in it


def half_done(given: str, wanted: str) -> list[bytes]:
    run(given, wanted, seed=7, stop_after=9)
    return Path(wanted).read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:10]], "half a line at its end is cut off"),
        (lambda lines: [*lines[:-1], lines[-1][:-1]], "half a line at its end is cut off"),
        (lambda lines: [*lines, b"\0" * 4096], "damaged by a crash"),
        (lambda lines: [*lines, b'{"index": 3, "te\0\0\0\0\n'], "damaged by a crash"),
        (lambda lines: [*lines, b"\xff\xfe\n"], "half a line"),
        (
            lambda lines: [*lines[:3], b'{"index": 3, "te\0\0\0\0xt": "a"}\n', *lines[4:]],
            "line 4 was damaged by a crash",
        ),
        (lambda lines: [b"\0" * 10 + b"\n", *lines], "line 1 was damaged by a crash"),
        (lambda lines: [*lines, lines[0], lines[1]], "2 results were there twice"),
        (lambda lines: [lines[0], b"\n", *lines[1:], b"\n\n"], ""),
        (lambda lines: [line.replace(b"\n", b"\r\n") for line in lines], ""),
        (lambda lines: [b"\xef\xbb\xbf", *lines], ""),
        (lambda lines: [lines[0][:30]], "half a line"),
        (lambda lines: [], ""),
    ],
)
def test_damage_is_repaired_and_said(given, wanted, whole, change, said) -> None:
    Path(wanted).write_bytes(b"".join(change(half_done(given, wanted))))
    notes = run(given, wanted, seed=7)
    assert [line.rstrip() for line in Path(wanted).read_bytes().split(b"\n")] == whole.split(b"\n")
    assert len(notes) == bool(said)
    assert said in "".join(notes)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:3], b"note to myself\n", *lines[3:]],
        lambda lines: [*lines[:3], lines[3][:10] + b"\n", *lines[4:]],
        lambda lines: [*lines[:3], b'{"index": 3}\n', *lines[3:]],
        lambda lines: [*lines[:3], b"[1]\n", *lines[3:]],
    ],
)
def test_a_line_that_is_not_ours_is_named_and_nothing_is_changed(given, wanted, change) -> None:
    Path(wanted).write_bytes(before := b"".join([*change(half_done(given, wanted)), b'{"half']))
    with pytest.raises(
        OutputFileError, match=r"out.jsonl, line 4: this is not a result.*Nothing was changed.*--restart"
    ):
        run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == before


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"index": 0, "text": "a", "key": "0123456789ab"}\n'])
def test_somebody_elses_file_is_left_alone(given, wanted, content) -> None:
    Path(wanted).write_bytes(content)
    with pytest.raises(OutputFileError, match="--restart"):
        run(given, wanted)
    assert Path(wanted).read_bytes() == content
    assert not os.path.exists(wanted + ".run.json")
    notes = run(given, wanted, restart=True)
    assert Path(wanted + ".bak-1").read_bytes() == content
    assert "is in " in notes[0]


def test_results_without_their_record_and_a_damaged_record(given, wanted) -> None:
    half_done(given, wanted)
    Path(wanted + ".run.json").write_text('{"settings": ')
    with pytest.raises(OutputFileError, match="is damaged"):
        run(given, wanted)
    Path(wanted + ".run.json").write_text('{"settings": []}')
    with pytest.raises(OutputFileError, match="is damaged"):
        run(given, wanted)
    os.unlink(wanted + ".run.json")
    with pytest.raises(OutputFileError, match=r"out.jsonl.run.json.*is not there: give another output, or `--restart`"):
        run(given, wanted)


# Another run than before


def test_other_settings_are_named(given, wanted) -> None:
    lines = half_done(given, wanted)
    settings = {"max_new_tokens": 20, "model": {"name": "tiny", "revision": "abc"}, "temperature": None}
    with pytest.raises(RunChangedError) as error:
        run(given, wanted, settings=settings, seed=8)
    assert error.value.differences == [
        "max_new_tokens was 50 and is 20",
        'model.revision was not set and is "abc"',
        "seed was 7 and is 8",
    ]
    assert "--restart" in str(error.value)
    assert Path(wanted).read_bytes() == b"".join(lines)
    run(given, wanted, settings={**SETTINGS, "stop": None})


def test_before_the_first_result_settings_may_change(given, wanted) -> None:
    run(given, wanted, stop_after=9)
    os.truncate(wanted, 20)
    run(given, wanted, settings={"max_new_tokens": 1})
    assert json.loads(Path(wanted + ".run.json").read_text())["settings"] == {"max_new_tokens": 1}


def test_a_changed_input_is_noticed_and_a_longer_one_is_gone_on_with(given, wanted) -> None:
    run(given, wanted, seed=7)
    lines = Path(given).read_bytes().splitlines(keepends=True)
    for _ in range(2):  # a refusal does not make the next run believe it
        Path(given).write_bytes(b"".join([*lines[:16], b'{"prompt": "other"}\n', *lines[17:]]))
        with pytest.raises(RunChangedError, match=r"line 17: this record has changed since .*out.jsonl was begun"):
            run(given, wanted)
    Path(given).write_bytes(b"".join(lines[:20]))
    with pytest.raises(RunChangedError, match=r"has 30 records or more to go by, and .*in.jsonl has only 20"):
        run(given, wanted)
    Path(given).write_bytes(b"\n".join([*lines[:29], lines[29].strip(), b'{"prompt": "new"}']))
    todo: list[set[int]] = []
    run(given, wanted, seen=todo.append)
    assert todo == [{30}], "blank lines and the end of the last line are no change"
    assert [each["index"] for each in results(wanted)] == list(range(31))


def test_restarts_keep_everything(given, wanted) -> None:
    kept = []
    for number in range(3):
        kept.append((Path(wanted).read_bytes(), Path(wanted + ".run.json").read_bytes()) if number else None)
        run(given, wanted, settings={"max_new_tokens": number}, restart=number > 0, stop_after=9)
    for number in (1, 2):
        assert Path(f"{wanted}.bak-{number}").read_bytes() == kept[number][0]
        assert Path(f"{wanted}.bak-{number}.run.json").read_bytes() == kept[number][1]
    assert len(results(wanted)) == 9


def test_a_refused_restart_changes_nothing(given, wanted) -> None:
    lines = half_done(given, wanted)
    with open_source(given) as source, open_output(wanted, source=source, restart=True):
        pass  # the model cannot be loaded, say
    assert Path(wanted).read_bytes() == b"".join(lines)
    assert not os.path.exists(wanted + ".bak-1")


def test_errors_are_done_until_they_are_retried(given, wanted, whole) -> None:
    run(given, wanted, seed=7, bad=[3, 5])
    todo: list[set[int]] = []
    run(given, wanted, seed=7, seen=todo.append)
    with open_output(wanted) as output:
        assert output.errors.tolist() == [3, 5]
    run(given, wanted, seed=7, retry_errors=True, seen=todo.append)
    assert todo == [set(), {3, 5}]
    assert Path(wanted).read_bytes() == whole


# Two runs


def test_two_processes_on_one_output(given, wanted) -> None:
    holder = """
import sys
from hf_batchllm.files.outputs import open_output
from hf_batchllm.files.sources import open_source
from hf_batchllm.files.run_record import RunRecord
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

    monkeypatch.setattr("hf_batchllm.files.journal.lock", lock)
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


# Disks


def full_after(monkeypatch, size: int, number: int = errno.ENOSPC, name: str = "out.jsonl") -> None:
    """Files with this name take ``size`` bytes in all."""
    real = os.write

    def write(descriptor: int, data) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        room = size - os.fstat(descriptor).st_size
        if os.path.basename(path) != name or len(data) <= room:
            return real(descriptor, data)
        if room <= 0:
            raise OSError(number, os.strerror(number))
        return real(descriptor, bytes(data[:room]))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full. .* Make room there"),
        (errno.EDQUOT, "the quota on this disk is used up"),
        (errno.EIO, "the disk reports an error"),
        (errno.EFBIG, "largest size allowed .* Raise the limit"),
        (errno.ESTALE, "stale"),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 500, 777])
def test_a_write_that_fails_keeps_whole_lines(given, wanted, whole, number, said, size) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full_after(patch, size, number)
        with pytest.raises(
            OutputWriteError, match=rf"out.jsonl could not be written: .*{said}.*same command goes on"
        ) as error:
            run(given, wanted, seed=7)
    content = Path(wanted).read_bytes()
    assert len(content) <= size
    assert content == b"" or content.endswith(b"\n")
    assert error.value.kept == len(results(wanted))
    assert size < 300 or error.value.kept > 0
    assert isinstance(error.value, OSError) and error.value.errno == number
    run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == whole


def test_a_writer_that_has_failed_stays_so(given, wanted, monkeypatch) -> None:
    with open_source(given) as source, open_output(wanted, source=source) as output:
        output.begin(RunRecord({}), source)
        full_after(monkeypatch, 300)
        with contextlib.suppress(OutputWriteError):
            output.append([(n, answer(n, b"x" * 50)) for n in range(9)])
        for act in (lambda: output.append([(9, answer(9, b"x"))]), output.finish):
            with pytest.raises(OutputWriteError, match="disk is full"):
                act()


def test_no_room_to_put_it_in_order_leaves_it_as_it_is(given, wanted, monkeypatch) -> None:
    full_after(monkeypatch, 400, name="out.jsonl.hf-batchllm.tmp")
    notes = run(given, wanted)
    assert "stay in the order in which they finished" in notes[0]
    assert sorted(each["index"] for each in results(wanted)) == list(range(30))
    assert sorted(os.listdir(os.path.dirname(wanted))) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]
    monkeypatch.undo()
    run(given, wanted)
    assert [each["index"] for each in results(wanted)] == list(range(30)), "the next run does it"


def test_a_record_that_cannot_be_written_stops_the_run_before_its_first_result(given, wanted, monkeypatch) -> None:
    full_after(monkeypatch, 10, name="out.jsonl.run.json.hf-batchllm.tmp")
    with pytest.raises(OutputWriteError, match=r"out.jsonl.run.json could not be written: the disk is full"):
        run(given, wanted)
    assert os.listdir(os.path.dirname(wanted)) == ["in.jsonl"]


def test_a_full_disk_and_a_limit_on_files_for_real(folder) -> None:
    """In a mount of its own where the system lets us, and with `ulimit -f`."""
    script = """
import resource, signal, sys
from file_runs import run, write_input
from hf_batchllm.errors import OutputWriteError
place, limit = sys.argv[1], int(sys.argv[2])
write_input(place + "/in.jsonl", 900)
try:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    run(place + "/in.jsonl", place + "/small/out.jsonl", seed=7)
except OutputWriteError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    data = open(place + "/small/out.jsonl", "rb").read()
    assert data.endswith(b"\\n") and data.count(b"\\n") == error.kept > 100, (len(data), error.kept)
    print(error)
"""
    (folder / "small").mkdir()
    limited = program("-c", script, str(folder), "60000")
    assert "largest size allowed" in limited.stdout, limited.stderr
    mounted = f"mount -t tmpfs -o size=64k none {folder}/small && exec {sys.executable} -c '{script}' {folder} 0"
    with contextlib.suppress(FileNotFoundError):
        full = subprocess.run(
            ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted], capture_output=True, text=True, env=PATHS
        )
        if "Traceback" in full.stderr or full.returncode == 0:
            assert "the disk is full" in full.stdout, full.stderr


def syncs(monkeypatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return seen


@pytest.mark.parametrize(("policy", "times"), [("always", 3), ("never", 0), ("1000s", 0), (1000, 0)])
def test_how_often_results_are_brought_to_the_disk(given, wanted, monkeypatch, policy, times) -> None:
    with open_source(given) as source, open_output(wanted, source=source, fsync=policy) as output:
        output.begin(RunRecord({}), source)
        seen = syncs(monkeypatch)
        for number in range(3):
            output.append([(number, answer(number, b"x"))])
        assert seen.count(wanted) == times
    assert (wanted in seen) == (policy != "never"), "at the end too"


def test_results_that_come_seldom_reach_the_disk_in_time(given, wanted, monkeypatch) -> None:
    with open_source(given) as source, open_output(wanted, source=source, fsync="0.01s") as output:
        output.begin(RunRecord({}), source)
        seen = syncs(monkeypatch)
        for count in (1, 2):
            output.append([(count, answer(count, b"x"))])
            for _ in range(1000):
                if seen.count(wanted) >= count:
                    break
                time.sleep(0.005)
            assert seen.count(wanted) == count, "without another append"


def test_a_disk_that_fails_in_the_background_is_told_with_the_next_result(given, wanted, monkeypatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with open_source(given) as source, open_output(wanted, source=source, fsync="0.001s") as output:
        output.begin(RunRecord({}), source)
        monkeypatch.setattr(os, "fsync", fsync)

        def appended(number: int) -> None:
            output.append([(number, answer(number, b"x"))])
            time.sleep(0.01)

        with pytest.raises(OutputWriteError, match="the disk reports an error"):
            list(map(appended, range(30)))


def test_a_file_system_that_cannot_sync_is_none_the_worse(given, wanted, monkeypatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    run(given, wanted, fsync="always")
    assert len(results(wanted)) == 30


@pytest.mark.parametrize("policy", ["sometimes", "", "5m", -1, True, None])
def test_other_policies_are_refused(wanted, policy) -> None:
    with pytest.raises(ConfigError, match="`always`, `never`, or seconds"):
        open_output(wanted, fsync=policy)
    assert syncing.seconds_of("2.5") == 2.5
    assert not os.path.exists(wanted)


# Places that cannot be written to


def test_places_that_cannot_be(given, folder) -> None:
    (folder / "place.jsonl").mkdir()
    (folder / "in2.jsonl").symlink_to(given)
    os.link(given, folder / "in3.jsonl")
    (folder / "circle.jsonl").symlink_to(folder / "circle.jsonl")
    before = Path(given).read_bytes()
    for path, said in [
        (folder / "place.jsonl", "is a folder"),
        (folder / "none" / "out.jsonl", "there is no folder"),
        (given, "is the input"),
        (folder / "in2.jsonl", "is the input"),
        (folder / "in3.jsonl", "is the input"),
        (folder / "circle.jsonl", "circle"),
        (folder / "out.txt", "pass the format"),
        (folder / "out.jsonl.gz", "results cannot be added to a compressed file: leave .gz away"),
        (folder / ("x" * 300 + ".jsonl"), "too long"),
    ]:
        with open_source(given) as source, pytest.raises(OutputFileError, match=said):
            open_output(path, source=source)
    journal = folder / "in.csv.part.jsonl"
    journal.write_bytes(before)
    with open_source(str(journal)) as source, pytest.raises(OutputFileError, match="is the input"):
        open_output(folder / "in.csv", source=source)
    assert Path(given).read_bytes() == before
    assert journal.read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="there are no other users")
def test_read_only_places_are_refused_before_anything_else(given, folder) -> None:
    os.chmod(folder, 0o755)
    (folder / "shut").mkdir(mode=0o555)
    (folder / "shut.jsonl").touch(mode=0o444)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "open" / "shut.jsonl").touch()
    (folder / "open" / "shut.jsonl").chmod(0o444)
    script = """
import sys
from hf_batchllm.errors import OutputFileError
from hf_batchllm.files.outputs import open_output
for path in sys.argv[1:]:
    try:
        open_output(path)
    except OutputFileError as error:
        print(error)
"""
    places = [str(folder / "shut" / "out.jsonl"), str(folder / "open" / "shut.jsonl"), "/proc/out.jsonl"]
    code = f"import os\nos.geteuid() or os.setresuid(65534, 65534, 65534)\n{script}"
    # What is imported is found before the user is changed.
    code = "import numpy, hf_batchllm.files.outputs\n" + code
    done = program("-c", code, *places)
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    assert all("cannot be written to" in each for each in said), said


# Streams


def stream(target: str, **options) -> subprocess.Popen:
    script = """
import sys, time
from file_runs import run
from hf_batchllm.errors import FilesError
try:
    run(sys.argv[1], sys.argv[2], batch=1, seed=7, fsync="always")
except FilesError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(1)
"""
    return subprocess.Popen([sys.executable, "-c", script, target[0], target[1]], env=PATHS, **options)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_stdout(given, folder, name) -> None:
    expected = [answer(number, raw, seed=7) for number, raw in enumerate(Path(given).read_bytes().splitlines())]
    for to_file in (False, True):
        with open(folder / "redirected", "w+b") as file:
            file.write(b"before\n")
            file.flush()
            with stream((given, name), stdout=file if to_file else subprocess.PIPE, stderr=subprocess.PIPE) as process:
                out, err = process.communicate()
            assert process.returncode == 0, err
            if to_file:
                file.seek(0)
                out = file.read().removeprefix(b"before\n")
        assert sorted(out.splitlines()) == sorted(expected)
    assert sorted(os.listdir(folder)) == ["in.jsonl", "redirected"], "no run record beside a stream"


def test_what_is_read_is_not_written_to_through_a_descriptor_either(given) -> None:
    before = Path(given).read_bytes()
    with open(given, "r+b") as file:
        for target in ("-", f"/dev/fd/{file.fileno()}"):
            with stream((given, target), stdout=file, stderr=subprocess.PIPE, pass_fds=[file.fileno()]) as process:
                said = process.stderr.read().decode()
            assert "is the input" in said
    with open(given, "rb") as file, stream(("-", given), stdin=file, stderr=subprocess.PIPE) as process:
        assert b"stdin is the input" in process.stderr.read()
    assert Path(given).read_bytes() == before


def test_a_closed_pipe_and_a_full_device(given) -> None:
    write_input(given, 3000)
    with stream((given, "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1
    assert said.startswith(
        "OutputWriteError stdout cannot be written to any more: whoever was reading it has closed it"
    )
    assert said.count("\n") == 1
    if os.path.exists("/dev/full"):
        with pytest.raises(OutputWriteError, match=r"/dev/full.*the disk is full. 0 results were written"):
            run(given, "/dev/full")
    run(given, "/dev/null")


def test_other_pipes_take_lines_too(given, folder) -> None:
    pipe = str(folder / "pipe.jsonl")
    os.mkfifo(pipe)
    with stream((given, pipe), stderr=subprocess.PIPE):
        found = Path(pipe).read_bytes()
    assert found.count(b"\n") == 30
    with pytest.raises(OutputFileError, match="takes JSON lines"):
        open_output("-", "csv")


def test_a_pipe_that_does_not_wait(given) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    write_input(given, 3000)
    with stream((given, f"/dev/fd/{writer}"), pass_fds=[writer], stderr=subprocess.PIPE) as process:
        os.close(writer)
        time.sleep(0.3)
        with open(reader, "rb") as file:
            assert file.read().count(b"\n") == 3000
    assert process.returncode == 0


# Many


def test_many_results_are_read_again_and_put_in_order(folder) -> None:
    given, wanted = str(folder / "in.jsonl"), str(folder / "out.jsonl")
    write_input(given, 20_000)
    run(given, wanted, batch=1000, stop_after=15_000, fsync="never")
    with open_output(wanted) as output:
        assert len(output) == 15_000
    run(given, wanted, batch=1000, fsync="never")
    assert [each["index"] for each in results(wanted)] == list(range(20_000))


def test_a_result_must_be_one_line(given, wanted) -> None:
    with open_source(given) as source, open_output(wanted, source=source) as output:
        output.begin(RunRecord({}), source)
        with pytest.raises(ValueError, match="one line"):
            output.append([(0, b"{}\n")])
        output.append([])
        assert np.array_equal(output.missing(), np.arange(30))
        assert np.array_equal(output.missing(5), np.arange(5))
