"""Results on the disk: what a run leaves wherever it dies, and who may go on with it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_file_places import COUNT, PATHS, done_again, folder_of, half_done, numbers, program
from support_file_places import folder as folder  # fixtures, as are the next three
from support_file_places import given as given
from support_file_places import wanted as wanted
from support_file_places import whole as whole
from support_file_runs import SETTINGS, answer, open_output, results, run

from hf_batchllm.errors import OutputBusyError, OutputFileError, OutputWriteError, RunChangedError
from hf_batchllm.files.journal import identify
from hf_batchllm.files.run_record import RunRecord
from hf_batchllm.files.sources import open_source, record_key

# -- runs that end -----------------------------------------------------------------------------------------------------


def test_a_run_and_a_second_one_that_has_nothing_to_do(given: str, wanted: str) -> None:
    assert run(given, wanted, seed=7) == []
    assert numbers(wanted) == list(range(COUNT))
    assert [each["key"] for each in results(wanted)] == list(map(record_key, Path(given).read_bytes().splitlines()))
    record = json.loads(Path(wanted + ".run.json").read_text())
    assert (record["settings"], record["seed"], record["figures"]) == (SETTINGS, 7, {"results": COUNT})
    assert (record["input"]["records"], record["input"]["path"]) == (COUNT, given)
    assert record["finished"] and record["process"]["pid"] == os.getpid()
    assert folder_of(wanted) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]
    before = {path: Path(path).read_bytes() for path in (wanted, wanted + ".run.json")}
    assert done_again(given, wanted) == set()
    assert {path: Path(path).read_bytes() for path in before} == before


def test_the_first_records_alone_then_all(given: str, wanted: str) -> None:
    run(given, wanted, limit=5)
    assert numbers(wanted) == list(range(5))
    assert done_again(given, wanted) == set(range(5, COUNT))
    assert numbers(wanted) == list(range(COUNT))
    assert json.loads(Path(wanted + ".run.json").read_text())["results"] == COUNT


def test_the_seed_is_drawn_once(given: str, wanted: str) -> None:
    run(given, wanted, stop_after=9)
    seed = json.loads(Path(wanted + ".run.json").read_text())["seed"]
    run(given, wanted)
    assert {each["text"].split()[-1] for each in results(wanted)} == {str(seed)}


def test_links_are_followed_and_modes_kept(given: str, folder: Path) -> None:
    (folder / "far").mkdir()
    real, link = folder / "far" / "real.jsonl", folder / "out.jsonl"
    link.symlink_to(real)
    run(given, str(link), stop_after=9)
    os.chmod(real, 0o640)
    run(given, str(link))
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert len(results(str(real))) == COUNT
    assert sorted(os.listdir(folder / "far")) == ["real.jsonl", "real.jsonl.run.json"]


def test_a_file_that_was_not_used_goes_unless_it_was_there_before(given: str, wanted: str, whole: bytes) -> None:
    with open_output(wanted):
        assert os.path.exists(wanted)
    assert not os.path.exists(wanted)
    Path(wanted).touch()
    with open_output(wanted):
        pass
    run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == whole


def test_which_lines_are_results() -> None:
    line = {"id": "batch_req_12_0123456789ab", "custom_id": "x", "response": {"status_code": 200}, "error": None}
    assert identify(line) == (12, "0123456789ab", False)
    assert identify({**line, "response": {"status_code": 400}}) == (12, "0123456789ab", True)
    assert identify({**line, "response": None, "error": {"message": "no"}}) == (12, "0123456789ab", True)
    assert identify({**line, "id": "batch_req_x"}) is None
    good = {"index": 1, "key": "0123456789ab"}
    assert identify({**good, "error": "why"}) == (1, "0123456789ab", True)
    odd_ones: list[dict[str, Any]] = [{"index": True}, {"index": -1}, {"index": 1.0}, {"index": 1 << 60}, {"key": 1}]
    for odd in (*odd_ones, {"key": "0123456789AB"}):
        assert identify({**good, **odd}) is None


# -- runs that are killed or interrupted -------------------------------------------------------------------------------


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
    "one that makes a table": {
        "output": "out.csv",
        "before": {"stop_after": 15},
        "run": {},
        "allowed": ["out.csv.part.jsonl"],
    },
    "one that retries errors of a table": {
        "output": "out.csv",
        "before": {"bad": [3, 5]},
        "run": {"retry_errors": True},
        "again": {"retry_errors": True},
        "allowed": ["out.csv.part.jsonl"],
    },
}


def test_killed_before_any_call_that_changes_a_file_and_in_the_middle_of_any_write(folder: Path) -> None:
    """In the compaction at the end, too."""
    done = program("-m", "support_file_runs", "every", str(folder), json.dumps(KILLED))
    reports = json.loads(done.stdout or "null")
    assert reports is not None, done.stderr
    assert {name: report["wrong"] for name, report in reports.items()} == {name: [] for name in KILLED}
    assert all(report["deaths"] > 15 for report in reports.values()), reports


def test_killed_at_random_again_and_again(folder: Path) -> None:
    done = program("-m", "support_file_runs", "random", str(folder), "out.jsonl", "100", "300")
    assert json.loads(done.stdout or "null") == {"deaths": 100, "wrong": []}, done.stderr


@pytest.mark.parametrize("half", [0.0, 0.5, 1.0])
def test_interrupted_on_any_line_of_an_append(
    given: str, folder: Path, whole: bytes, half: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes between any two lines of Python, also behind half a write."""
    real_write = os.write

    def write(descriptor: int, data: Any) -> int:
        if half and len(data) > 1:
            sys.settrace(None)
            real_write(descriptor, bytes(data[: int(len(data) * half)]))
            raise KeyboardInterrupt
        return real_write(descriptor, data)

    for at in range(1, 60):
        wanted, count = str(folder / f"out{at}.jsonl"), 0

        def trace(frame: Any, event: str, arg: Any, at: int = at) -> Any:
            nonlocal count
            if not frame.f_code.co_filename.endswith(("journal.py", "paths.py")):
                return None
            count += event == "line"
            if event == "line" and count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        def interrupted(number: int) -> None:
            if number == 9:
                monkeypatch.setattr(os, "write", write)
                sys.settrace(trace)

        with contextlib.suppress(KeyboardInterrupt):
            try:
                run(given, wanted, seed=7, batch=1, shuffle=None, done=interrupted)
            finally:
                sys.settrace(None)
                monkeypatch.undo()
        assert Path(wanted).read_bytes() == whole or numbers(wanted)[:10] == list(range(10))
        run(given, wanted, seed=7)
        assert Path(wanted).read_bytes() == whole


# -- what is found at the end of a file, and in it ---------------------------------------------------------------------


def test_a_power_cut_at_any_byte_of_the_tail(given: str, wanted: str, whole: bytes) -> None:
    """The tail is gone, or is zeros."""
    data = b"".join(half_done(given, wanted))
    record = Path(wanted + ".run.json").read_bytes()
    for cut in range(len(data) - 190, len(data)):
        for tail in (b"", b"\0" * (len(data) - cut), b"\0" * 4096 + b"\n"):
            Path(wanted).write_bytes(data[:cut] + tail)
            Path(wanted + ".run.json").write_bytes(record)
            run(given, wanted, seed=7)
            assert Path(wanted).read_bytes() == whole, (cut, tail)


def last_counts(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b'"text": "', b'"text": "old '), *lines]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:10]], "half a line at its end is cut off"),
        (lambda lines: [*lines[:-1], lines[-1][:-1]], "half a line at its end is cut off"),
        (lambda lines: [*lines, b"\xff\xfe\n"], "half a line"),
        (lambda lines: [*lines[:3], b'{"index": 3, "te\0\0\0\0xt": "a"}\n', *lines[4:]], "line 4 damaged by a crash"),
        (lambda lines: [b"\0\n", b"\0\n", *lines], "line 1 and 1 more damaged by a crash"),
        (lambda lines: [*lines, lines[0], lines[1]], ""),
        (last_counts, ""),
        (lambda lines: [lines[0], b"\n", *lines[1:], b"\n\n"], ""),
        (lambda lines: [line.replace(b"\n", b"\r\n") for line in lines], ""),
        (lambda lines: [b"\xef\xbb\xbf", *lines], ""),
        (lambda lines: [lines[0][:30]], "half a line"),
        (lambda lines: [], ""),
    ],
)
def test_damage_is_repaired_and_said(given: str, wanted: str, whole: bytes, change: Any, said: str) -> None:
    Path(wanted).write_bytes(b"".join(change(half_done(given, wanted))))
    notes = run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == whole
    assert len(notes) == bool(said) and said in "".join(notes)


@pytest.mark.parametrize("odd", [b"note to myself\n", b'{"index": 3, \n', b'{"index": 3}\n', b"[1]\n"])
def test_a_line_that_is_not_ours_is_named_and_nothing_is_changed(given: str, wanted: str, odd: bytes) -> None:
    lines = half_done(given, wanted)
    Path(wanted).write_bytes(before := b"".join([*lines[:3], odd, *lines[3:], b'{"half']))
    with pytest.raises(OutputFileError, match=r"out.jsonl, line 4: this is not a result.*Nothing was changed"):
        run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == before


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"index": 0, "text": "a", "key": "0123456789ab"}\n'])
def test_somebody_elses_file_is_left_alone(given: str, wanted: str, content: bytes) -> None:
    Path(wanted).write_bytes(content)
    with pytest.raises(OutputFileError, match="--restart"):
        run(given, wanted)
    assert Path(wanted).read_bytes() == content and not os.path.exists(wanted + ".run.json")
    notes = run(given, wanted, restart=True)
    assert Path(wanted + ".bak-1").read_bytes() == content
    assert "is in " in notes[0]


def test_results_without_their_record_and_a_damaged_record(given: str, wanted: str) -> None:
    half_done(given, wanted)
    for written in ('{"settings": ', '{"settings": []}', '{"settings": {}, "shard": {"part": 1}}', '{"seed": 1}'):
        Path(wanted + ".run.json").write_text(written)
        with pytest.raises(OutputFileError, match="is damaged"):
            run(given, wanted)
    os.unlink(wanted + ".run.json")
    with pytest.raises(OutputFileError, match=r"out.jsonl.run.json.*is not there.*give another output, or `--restart`"):
        run(given, wanted)


# -- another run than before -------------------------------------------------------------------------------------------


def test_other_settings_are_named(given: str, wanted: str) -> None:
    lines = half_done(given, wanted)
    settings = {"max_new_tokens": 20, "model": {"name": "tiny", "revision": "abc"}, "temperature": None}
    with pytest.raises(RunChangedError, match="--restart") as error:
        run(given, wanted, settings=settings, seed=8)
    assert sorted(error.value.differences) == [
        "max_new_tokens was 50 and is 20",
        'model.revision was not set and is "abc"',
        "seed was 7 and is 8",
    ]
    assert Path(wanted).read_bytes() == b"".join(lines)
    run(given, wanted, settings={**SETTINGS, "stop": None})


def test_before_the_first_result_settings_may_change(given: str, wanted: str) -> None:
    run(given, wanted, stop_after=9)
    os.truncate(wanted, 20)
    run(given, wanted, settings={"max_new_tokens": 1})
    assert json.loads(Path(wanted + ".run.json").read_text())["settings"] == {"max_new_tokens": 1}


def test_a_changed_input_is_noticed_and_a_longer_one_is_gone_on_with(given: str, wanted: str) -> None:
    run(given, wanted, seed=7)
    lines = Path(given).read_bytes().splitlines(keepends=True)
    for _ in range(2):  # a refusal does not make the next run believe it
        Path(given).write_bytes(b"".join([*lines[:16], b'{"prompt": "other"}\n', *lines[17:]]))
        with pytest.raises(RunChangedError, match="line 17: this record has changed since"):
            run(given, wanted)
    Path(given).write_bytes(b"".join(lines[:20]))
    with pytest.raises(RunChangedError, match=r"has a result for record 30, and .*in.jsonl has only 20"):
        run(given, wanted)
    Path(given).write_bytes(b"\n".join([*lines[:29], lines[29].strip(), b'{"prompt": "new"}']))
    assert done_again(given, wanted) == {30}, "blank lines and the end of the last line are no change"
    assert numbers(wanted) == list(range(31))


def test_restarts_keep_everything(given: str, wanted: str) -> None:
    kept: list[tuple[bytes, bytes]] = []
    for number in range(3):
        run(given, wanted, settings={"max_new_tokens": number}, restart=number > 0, stop_after=9)
        kept.append((Path(wanted).read_bytes(), Path(wanted + ".run.json").read_bytes()))
    for number in (1, 2):
        there = Path(f"{wanted}.bak-{number}").read_bytes(), Path(f"{wanted}.bak-{number}.run.json").read_bytes()
        assert there == kept[number - 1]


def test_a_refused_restart_changes_nothing(given: str, wanted: str) -> None:
    lines = half_done(given, wanted)
    with open_source(given) as source, open_output(wanted, source=source, restart=True):
        pass  # the model cannot be loaded, say
    assert Path(wanted).read_bytes() == b"".join(lines) and not os.path.exists(wanted + ".bak-1")


def test_a_restart_that_fails_leaves_the_earlier_run(
    given: str, wanted: str, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(given, wanted, seed=7)
    for error in (OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()):

        def fails(*_: Any, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("shutil.copyfile", fails)
            with pytest.raises((OutputFileError, KeyboardInterrupt)):
                run(given, wanted, restart=True)
    assert done_again(given, wanted) == set() and Path(wanted).read_bytes() == whole


def test_a_restart_keeps_an_output_that_was_moved_aside_meanwhile(given: str, wanted: str, whole: bytes) -> None:
    run(given, wanted, seed=7)
    Path(wanted + ".bak-1.run.json").write_text("of an older run")
    with open_source(given) as source, open_output(wanted, source=source, restart=True) as output:
        output.begin(RunRecord(SETTINGS, 7, input=source.summary()), np.arange(COUNT), source)
        os.rename(wanted, wanted + ".mine")
        output.start({})
        output.append([(0, answer(0, source.records([0])[0]))])
    assert Path(wanted + ".mine").read_bytes() == whole and numbers(wanted) == [0]
    run(given, wanted, restart=True)
    assert Path(wanted + ".bak-1.run.json").read_text() == "of an older run"
    assert os.path.exists(wanted + ".bak-2")


def test_results_of_another_model_are_not_merged_though_none_is_missing(given: str, wanted: str) -> None:
    with open_source(given) as source:
        asked, every = RunRecord(SETTINGS, 7, input=source.summary()), np.arange(COUNT)
        with open_output(wanted, source=source) as output:
            output.begin(asked, every, source)
            output.start({"weights": "1"})
            output.append([(number, answer(number, raw)) for number, raw in source.read(every)])
            output.finish(figures={})
        for weights in ("1", "2"):
            with open_output(wanted, records=COUNT) as output:
                parts = replace(asked, model={"weights": weights})
                if weights == "1":
                    output.begin(parts, every)
                else:
                    with pytest.raises(RunChangedError, match="it had other weights"):
                        output.begin(parts, every)


def test_corrected_records_run_again_though_their_retry_was_stopped(given: str, wanted: str) -> None:
    run(given, wanted, seed=7, bad=[3, 5])
    lines = Path(given).read_bytes().splitlines(keepends=True)
    for number in (3, 5):
        lines[number] = b'{"prompt": "corrected %d"}\n' % number
    Path(given).write_bytes(b"".join(lines))
    assert done_again(given, wanted, seed=7, retry_errors=True, stop_after=1) == {3, 5}
    assert len(done_again(given, wanted, seed=7)) == 1
    assert [each["key"] for each in results(wanted)] == [record_key(line.strip()) for line in lines]
    run(given, wanted, restart=True, seed=7, bad=[COUNT - 1])
    Path(given).write_bytes(b"".join(lines[:-1]))
    assert done_again(given, wanted, seed=7, retry_errors=True) == set(), "an error beyond the input's end is no result"


def test_errors_are_done_until_they_are_retried(given: str, wanted: str, whole: bytes) -> None:
    run(given, wanted, seed=7, bad=[3, 5])
    assert done_again(given, wanted, seed=7) == set()
    assert done_again(given, wanted, seed=7, retry_errors=True, stop_after=1) == {3, 5}
    assert len(done_again(given, wanted, seed=7, retry_errors=True)) == 1
    assert Path(wanted).read_bytes() == whole


# -- two runs on one output --------------------------------------------------------------------------------------------


HOLDER = """
import sys
from support_file_runs import open_output, open_source, np, RunRecord
with open_source(sys.argv[1]) as source, open_output(sys.argv[2], source=source) as output:
    output.begin(RunRecord({}, input=source.summary()), np.arange(30), source)
    output.start({})
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_two_processes_on_one_output(given: str, wanted: str) -> None:
    command = [sys.executable, "-c", HOLDER, given, wanted]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=PATHS) as other:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        os.symlink(wanted, link := wanted.replace("out", "link"))
        for path, restart in ((wanted, False), (wanted, True), (link, False)):
            said = rf"another run \(process {other.pid} on \S+, since .*\) is writing"
            with pytest.raises(OutputBusyError, match=said):
                run(given, path, restart=restart)
        other.kill()
    run(given, wanted)
    assert len(results(wanted)) == COUNT


def test_a_file_that_was_replaced_before_it_was_locked_is_opened_again(
    given: str, wanted: str, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(given, wanted)
    real, done = fcntl.flock, []

    def flock(*asked: Any) -> None:
        if not done:
            done.append(1)
            run(given, wanted, seed=7)  # ends, and puts another file there, just before this one is locked
        real(*asked)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert done_again(given, wanted, seed=7) == set()
    assert Path(wanted).read_bytes() == whole


def test_the_file_that_takes_the_place_of_another_is_locked_before(
    given: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_file_that_is_removed_or_replaced_while_it_is_written_to(given: str, wanted: str, whole: bytes) -> None:
    run(given, wanted, seed=7, done=lambda number: Path(wanted).unlink(missing_ok=True))
    assert Path(wanted).read_bytes() == whole, "the last step makes it again"

    def replaced(number: int) -> None:
        Path(wanted).unlink(missing_ok=True)
        Path(wanted).write_bytes(b"other")

    with pytest.raises(OutputWriteError, match=r"replaced by another file .* its own 30 results are in .*rescued"):
        run(given, wanted, seed=7, restart=True, done=replaced)
    assert Path(wanted).read_bytes() == b"other" and Path(f"{wanted}.rescued").read_bytes() == whole


def test_a_file_system_without_locks_is_said_once(given: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*asked: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    (note,) = run(given, wanted)
    assert "cannot be locked" in note
