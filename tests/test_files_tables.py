"""CSV and Parquet as outputs: a journal while the run lasts, a table in the input's order at its end."""

import csv
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from support_file_runs import open_output, results, run, write_input

from hf_batchllm.errors import FilesError, OutputBusyError, OutputFileError, OutputWriteError, RunChangedError
from hf_batchllm.files.run_record import RunRecord
from hf_batchllm.files.sources import open_source, record_key
from hf_batchllm.files.tables import table_rows


@pytest.fixture
def given(tmp_path: Path) -> str:
    path = str(tmp_path / "in.jsonl")
    write_input(path, 30)
    return path


@pytest.fixture(params=["csv", "tsv", "parquet"])
def wanted(request, tmp_path: Path) -> str:
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return str(tmp_path / f"out.{request.param}")


def table(path: str) -> list[dict]:
    """What a reader of such files makes of it; nothing is None."""
    if path.endswith("parquet"):
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t" if path.endswith("tsv") else ",", strict=True)
        return [{name: cell or None for name, cell in row.items()} for row in rows]


def written(given: str, wanted: str, records: list[dict]) -> list[dict]:
    write_input(given, len(records))
    with open_source(given) as source, open_output(wanted, source=source) as output:
        output.begin(RunRecord({}, 7), np.arange(source.count), source)
        output.start({})
        raws = source.records(range(source.count))
        lines = [
            (number, json.dumps({"index": number, **record, "key": record_key(raw)}).encode())
            for number, (record, raw) in enumerate(zip(records, raws, strict=True))
        ]
        output.append(lines[::-1])
        output.finish(figures={})
    return table(wanted)


def listed(wanted: str) -> list[str]:
    return sorted(set(os.listdir(os.path.dirname(wanted))) - {"in.jsonl"})


# A run


def test_a_table_in_the_order_of_the_input(given, wanted) -> None:
    run(given, wanted, stop_after=9)
    name = os.path.basename(wanted)
    assert listed(wanted) == [f"{name}.part.jsonl", f"{name}.run.json"]
    assert run(given, wanted) == []
    assert listed(wanted) == [name, f"{name}.part.jsonl", f"{name}.run.json"]
    rows = table(wanted)
    assert [int(row["index"]) for row in rows] == list(range(30))
    assert list(rows[0]) == ["index", "text", "finish_reason", "error"]
    assert all(row["text"].split()[-2] == "é" and row["error"] is None for row in rows)


def test_what_is_complete_stays_as_it_is_and_can_be_gone_on_with(given, wanted) -> None:
    run(given, wanted, seed=7, bad=[2])
    before = {name: Path(wanted).with_name(name).read_bytes() for name in listed(wanted)}
    todo: list[set[int]] = []
    run(given, wanted, seen=todo.append)
    assert todo == [set()]
    with pytest.raises(RunChangedError, match="max_new_tokens was 50 and is 20"):
        run(given, wanted, settings={"max_new_tokens": 20, "model": {"name": "tiny"}})
    assert {name: Path(wanted).with_name(name).read_bytes() for name in listed(wanted)} == before
    os.unlink(wanted)
    run(given, wanted)
    assert Path(wanted).read_bytes() == before[os.path.basename(wanted)]
    with open(given, "a") as file:
        file.write('{"prompt": "new"}\n')
    run(given, wanted, retry_errors=True, seen=todo.append)
    assert todo[-1] == {2, 30} and [row["error"] for row in table(wanted)] == [None] * 31
    os.unlink(wanted + ".part.jsonl")
    with pytest.raises(OutputFileError, match="exists already, and no run in this format has written it"):
        run(given, wanted)
    made = Path(wanted).read_bytes()
    run(given, wanted, restart=True)
    assert Path(wanted + ".bak-1").read_bytes() == made


def test_more_than_a_finished_table_has(given, wanted) -> None:
    run(given, wanted, limit=5)
    run(given, wanted)
    assert len(table(wanted)) == 30


@pytest.mark.parametrize("first", [None, "csv"])
def test_a_run_in_one_format_and_another_one_of_the_same_name(given, tmp_path, first) -> None:
    wanted, second = str(tmp_path / "out.jsonl"), None if first else "csv"
    with open_source(given) as source, open_output(wanted, first, source=source) as output:
        output.begin(RunRecord({}), np.arange(source.count), source)
        for _ in range(2):
            with pytest.raises(OutputBusyError, match="is writing to"):
                open_output(wanted, second, source=source)
            output.start({})
    run(given, wanted, format=first, stop_after=9)
    with pytest.raises(OutputFileError, match="no run in this format has written it"):
        run(given, wanted, format=second)
    run(given, wanted, format=first)
    notes = run(given, wanted, format=second, restart=True)
    assert "is in" in notes[0] and len(open_rows(wanted, second)) == 30
    kept = f"{wanted}.bak-1{'' if second else '.part.jsonl'}"
    assert len(results(kept)) == 30


def open_rows(path: str, format: str | None) -> list[bytes]:
    with open_source(path, format) as source:
        return source.records(range(source.count))


def test_an_unfinished_one_is_gone_on_with_when_the_input_has_grown(given, wanted) -> None:
    run(given, wanted, stop_after=9)
    with open(given, "a") as file:
        file.write('{"prompt": "new"}\n')
    run(given, wanted)
    assert len(table(wanted)) == 31


def test_a_table_of_somebody_else_is_left_alone(given, wanted) -> None:
    Path(wanted).write_bytes(b"a,b\n1,2\n")
    with pytest.raises(OutputFileError, match=r"exists already, and no run in this format has written it.*--restart"):
        run(given, wanted)
    assert listed(wanted) == [os.path.basename(wanted)]
    run(given, wanted, restart=True, stop_after=3)
    assert Path(wanted + ".bak-1").read_bytes() == b"a,b\n1,2\n"
    run(given, wanted)
    assert len(table(wanted)) == 30


def test_a_journal_without_its_record(given, wanted) -> None:
    run(given, wanted, stop_after=9)
    os.unlink(wanted + ".run.json")
    with pytest.raises(OutputFileError, match=r"part.jsonl is not empty"):
        run(given, wanted)
    run(given, wanted, restart=True)
    assert len(results(wanted + ".bak-1.part.jsonl")) == 9
    assert len(table(wanted)) == 30


def test_errors_are_retried_before_the_table_is_made(given, wanted) -> None:
    run(given, wanted, bad=[2], stop_after=29, shuffle=None)
    run(given, wanted, retry_errors=True)
    assert all(row["error"] is None for row in table(wanted))


def test_a_table_larger_than_files_may_be(given, wanted) -> None:
    resource = pytest.importorskip("resource")
    chance = random.Random(0)
    big = {"text": "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=400_000))}
    with open_source(given) as source, open_output(wanted, source=source) as output:
        output.begin(RunRecord({}, 7), np.arange(source.count), source)
        output.start({})
        output.append([(0, json.dumps({"index": 0, **big, "key": "0" * 12}).encode())])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(OutputWriteError, match="largest size allowed"):
                output.finish(figures={})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert listed(wanted) == sorted(os.path.basename(wanted) + tail for tail in (".part.jsonl", ".run.json"))
        output.finish(figures={})
    with open_source(wanted) as source:
        assert json.loads(source.records([0])[0])["text"] == big["text"]


# Cells


def test_a_row_for_each_sample(given, wanted) -> None:
    samples = [{"text": "a", "finish_reason": "stop", "new_tokens": 1}, {"text": "b", "finish_reason": "length"}]
    records = [
        {"id": "x", "prompt_tokens": 3, "samples": samples},
        {"id": "y", "error": "no prompt"},
    ]
    rows = written(given, wanted, records)
    assert list(rows[0]) == ["index", "id", "sample", "prompt_tokens", "text", "finish_reason", "new_tokens", "error"]
    number = int if wanted.endswith("parquet") else str
    assert [row["id"] for row in rows] == ["x", "x", "y"]
    assert [row["sample"] for row in rows] == [number(0), number(1), None]
    assert [row["text"] for row in rows] == ["a", "b", None]
    assert [row["new_tokens"] for row in rows] == [number(1), None, None]
    assert rows[2]["error"] == "no prompt"
    assert list(table_rows({"samples": []})) == [{}]


ODD = [
    'quotes "here", commas; and\ttabs',
    "lines\nand\r\nmore\rof them\n",
    " spaces ",
    "é \u2028 \U0001f600 \0 end",
    "=1+1",
    "half a pair: \ud800",
    "",
]


def test_any_text_comes_back(given, wanted) -> None:
    rows = written(given, wanted, [{"text": text} for text in ODD])
    assert [row["text"] or "" for row in rows] == [text.replace("\ud800", "\\ud800") for text in ODD]


def test_values_that_are_no_text(given, wanted) -> None:
    records = [
        {"id": 1, "token_ids": [1, 2], "score": 1, "meta": {"a": 1}, "flag": True, "nothing": None},
        {"id": "b", "token_ids": [], "score": 0.5, "meta": {"b": "x"}, "flag": None, "nothing": None},
        {"id": None, "token_ids": None, "score": None, "meta": [1], "flag": False},
    ]
    rows = written(given, wanted, records)
    if not wanted.endswith("parquet"):
        assert [row["token_ids"] for row in rows] == ["[1, 2]", "[]", None]
        assert [row["meta"] for row in rows] == ['{"a": 1}', '{"b": "x"}', "[1]"]
        assert [row["flag"] for row in rows] == ["true", None, "false"]
        assert [row["id"] for row in rows] == ["1", "b", None]
        return
    assert [row["token_ids"] for row in rows] == [[1, 2], [], None]
    assert [row["score"] for row in rows] == [1.0, 0.5, None]
    assert [row["id"] for row in rows] == ["1", "b", None], "of several kinds: JSON text"
    assert [row["meta"] for row in rows] == ['{"a": 1}', '{"b": "x"}', "[1]"]
    assert [row["flag"] for row in rows] == [True, None, False]
    assert [row["nothing"] for row in rows] == [None, None, None]


def test_types_are_those_of_the_whole_file_and_not_of_its_beginning(given, tmp_path) -> None:
    pytest.importorskip("pyarrow")
    wanted = str(tmp_path / "out.parquet")
    records = [{"text": "a"} for _ in range(2500)]
    records[2400] = {"text": "b", "late": [1], "kind": 1.5, "pair": {"x": None}}
    records[3] |= {"late": [], "kind": 1, "pair": {"x": 1, "y": []}}
    rows = written(given, wanted, records)
    assert [rows[2400][name] for name in ("late", "kind")] == [[1], 1.5]
    assert [rows[3][name] for name in ("late", "kind")] == [[], 1.0]
    assert rows[3]["pair"] == {"x": 1, "y": []}
    assert rows[4] == {"index": 4, "text": "a", "late": None, "kind": None, "pair": None, "error": None}


def test_an_empty_input_makes_a_table_without_rows(given, wanted) -> None:
    Path(given).write_bytes(b"")
    run(given, wanted)
    assert table(wanted) == []
    run(given, wanted)


def test_a_table_in_and_a_table_out(given, tmp_path, wanted) -> None:
    """What was written is read again: the text of a table as the prompts of the next run."""
    first = written(given, wanted, [{"prompt": text} for text in ODD[:5]])
    with open_source(wanted) as source:
        again = [json.loads(raw) for raw in source.records(range(source.count))]
    assert [row["prompt"] for row in again] == [row["prompt"] for row in first] == ODD[:5]
    suffix = os.path.splitext(wanted)[1]
    run(wanted, str(tmp_path / f"next{suffix}"))
    assert len(table(str(tmp_path / f"next{suffix}"))) == 5


def test_the_format_may_be_said(given, tmp_path) -> None:
    run(given, str(tmp_path / "results.txt"), format="csv")
    assert (tmp_path / "results.txt").read_text().startswith("index,text,finish_reason,error\n")
    with pytest.raises(OutputFileError, match="format 'xls'"):
        open_output(str(tmp_path / "out.csv"), "xls")


def test_parquet_without_pyarrow_is_refused_before_anything_is_run(given, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FilesError, match=r"pip install 'hf-batchllm\[files\]'"):
        open_output(str(tmp_path / "out.parquet"))
    assert os.listdir(tmp_path) == ["in.jsonl"]
