"""Results on the disk: what a run leaves wherever it dies, and who may go on with it."""

import json
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from support_file_places import folder as folder  # fixtures, as are the next three
from support_file_places import given as given
from support_file_places import half_done, program
from support_file_places import wanted as wanted
from support_file_places import whole as whole
from support_file_runs import SETTINGS, answer, open_output, results, run, write_input

from hf_batchllm.errors import OutputFileError, RunChangedError
from hf_batchllm.files.records.result_layout import identify
from hf_batchllm.files.store.run_record import RunRecord
from hf_batchllm.files.store.sources import open_source, record_key

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
    done = program("-m", "support_file_runs", "every", str(folder), json.dumps(KILLED))
    reports = json.loads(done.stdout or "null")
    assert reports is not None, done.stderr
    assert {name: report["wrong"] for name, report in reports.items()} == {name: [] for name in KILLED}
    assert all(report["deaths"] > 25 for report in reports.values()), reports


def test_killed_at_random_again_and_again(folder) -> None:
    done = program("-m", "support_file_runs", "random", str(folder), "out.jsonl", "80", "300")
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
                if not frame.f_code.co_filename.endswith(("journal.py", "journal_index.py", "paths.py", "syncing.py")):
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
    with pytest.raises(OutputFileError, match=r"out.jsonl.run.json.*is not there.*give another output, or `--restart`"):
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
    with pytest.raises(RunChangedError, match=r"has a result for record 30, and .*in.jsonl has only 20"):
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
