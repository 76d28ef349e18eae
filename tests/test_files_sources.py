"""Files of prompts as numbered records: every kind of file, what is odd in them, and lists larger than memory."""

import csv
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from hf_batchllm.errors import FilesError, InputFileError
from hf_batchllm.files.sources import cut, fingerprints, open_source, record_key, sharing_order

PATHS = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}  # of other processes


@pytest.fixture
def written(tmp_path: Path):
    def write(data: bytes | str, name: str = "in.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(path)

    return write


def raws(path: str, format: str | None = None) -> list[bytes]:
    with open_source(path, format) as source:
        return source.records(range(source.count))


def rows(path: str, format: str | None = None) -> list[dict]:
    return [json.loads(raw) for raw in raws(path, format)]


# JSON lines


@pytest.mark.parametrize(
    ("data", "records", "places"),
    [
        (b"", [], []),
        (b"\n \n\t\r\n", [], []),
        (b"{}", [b"{}"], [1]),
        (b"{}\n", [b"{}"], [1]),
        (b'{"a":1}\r\n{"a":2}\r\n', [b'{"a":1}', b'{"a":2}'], [1, 2]),
        (b"\xef\xbb\xbf{}\n{}", [b"{}", b"{}"], [1, 2]),
        (b"\xef\xbb\xbf\n{}", [b"{}"], [2]),
        (b"\n{1}\n\n \r\n{2}\n{3}\n\n\n{4}\n\n", [b"{1}", b"{2}", b"{3}", b"{4}"], [2, 5, 6, 9]),
        (b'{"a":\xff}\n{"b": "\xed\xa0\x80"}\n{}\n', [b'{"a":\xff}', b'{"b": "\xed\xa0\x80"}', b"{}"], [1, 2, 3]),
        (b"{}\n\0\0\0", [b"{}", b"\0\0\0"], [1, 2]),
        (b"  {1}\n\t{2}\n", [b"  {1}", b"\t{2}"], [1, 2]),
        ('{"a":"\u2028\x85"}\n{}\n'.encode(), ['{"a":"\u2028\x85"}'.encode(), b"{}"], [1, 2]),
    ],
)
def test_a_record_is_a_line_that_is_not_blank(written, data, records, places) -> None:
    with open_source(written(data)) as source:
        assert source.count == len(records)
        assert source.records(range(source.count)) == records
        assert [source.where(number) for number in range(source.count)] == [f"line {place}" for place in places]


def test_any_file_is_cut_as_splitlines_would(written) -> None:
    chance = np.random.default_rng(7)
    for round in range(20):
        pieces = [
            b" " * int(size) if kind == 0 else b"x" * int(size) + (b"\r" if kind == 1 else b"")
            for size, kind in zip(chance.integers(0, 40, 30), chance.integers(0, 4, 30), strict=True)
        ]
        data = b"\n".join(pieces) + b"\n" * int(chance.integers(0, 2))
        expected = [(at, line.rstrip(b"\r")) for at, line in enumerate(data.split(b"\n"), 1) if line.strip()]
        with open_source(written(data, f"{round}.jsonl")) as source:
            assert source.count == len(expected)
            shuffled = chance.permutation(source.count)
            assert source.records(shuffled) == [expected[number][1] for number in shuffled]
            assert [source.where(number) for number in range(source.count)] == [f"line {at}" for at, _ in expected]


def test_a_line_of_fifty_megabytes(written) -> None:
    long = b'{"prompt": "' + b"a" * 50_000_000 + b'"}'
    with open_source(written(b"{}\n" + long + b"\n{}\n")) as source:
        assert source.count == 3
        assert source.records([2, 1]) == [b"{}", long]


def test_the_key_is_of_the_record_and_not_of_the_end_of_its_line(written) -> None:
    assert raws(written(b'{"a": 1}\r\n', "a.jsonl")) == raws(written(b'{"a": 1}', "b.jsonl"))
    assert len(record_key(b"{}")) == 12
    assert record_key(b"{}") != record_key(b"{} ")


def test_what_changes_while_it_is_read_is_noticed(written) -> None:
    path = written(b'{"a": 1}\n{"a": 2}\n')
    with open_source(path) as source:
        with open(path, "ab") as file:
            file.write(b'{"a": 3}\n')
        assert source.records([1]) == [b'{"a": 2}'], "lines may be added"
        os.truncate(path, 4)
        with pytest.raises(InputFileError, match="while it was being read"):
            source.records([0, 1])
    path = written(b'{"a": 1}\n{"a": 2}\n', "other.jsonl")
    with open_source(path) as source:
        os.utime(path, ns=(1, 1))
        with pytest.raises(InputFileError, match="has changed while it was being read"):
            source.records([0])


def test_a_file_that_is_replaced_is_read_on_as_it_was(written, tmp_path) -> None:
    path = written(b'{"a": 1}\n')
    with open_source(path) as source:
        os.replace(written(b"{}\n", "new"), path)
        assert source.records([0]) == [b'{"a": 1}']


def test_a_pipe_is_read_through_a_copy(written, tmp_path) -> None:
    pipe = str(tmp_path / "pipe.jsonl")
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: Path(pipe).write_bytes(b"{}\n\n{1}\n"))
    writer.start()
    with open_source(pipe) as source:
        assert source.records([1, 0]) == [b"{1}", b"{}"]
        assert source.where(1) == "line 3"
    writer.join()


@pytest.mark.parametrize("how", ["pipe", "file", "file behind its first line"])
def test_stdin(written, how) -> None:
    program = """
import os, sys
import hf_batchllm.files.output
from hf_batchllm.files.sources import open_source
if len(sys.argv) > 1:
    os.read(0, 3)
with open_source("-") as source:
    print(source.name, source.summary()["path"], source.records(range(source.count)), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    data = b"{}\n{1}\n"
    if how == "pipe":
        done = subprocess.run(command, input=data, capture_output=True, env=PATHS)
    else:
        with open(written(data), "rb") as file:
            behind = ["1"] if how != "file" else []
            done = subprocess.run([*command, *behind], stdin=file, capture_output=True, env=PATHS)
    expected = [b"{1}"] if how == "file behind its first line" else [b"{}", b"{1}"]
    assert done.stdout.decode().strip() == f"stdin - {expected} False", done.stderr.decode()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("in.text", b"{}", "pass the format"),
        ("in", b"{}", "pass the format"),
        ("in.jsonl.gz", b"\x1f\x8b", "pass the format"),
        ("in.csv", b"\x1f\x8b\x08\x00", "line 1: is not UTF-8: byte 0x8b at byte 2.*zcat"),
        ("in.csv", "prompt\n".encode("utf-16"), "line 1: is not UTF-8.*iconv"),
        ("in.parquet", b"{}\n", "cannot be read as Parquet"),
        ("in.parquet", b"", "cannot be read as Parquet"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_to_do(written, name, data, said) -> None:
    with pytest.raises(InputFileError, match=said):
        open_source(written(data, name))


def test_what_is_no_file(tmp_path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    for path, said in [
        (tmp_path / "none.jsonl", "there is no such file"),
        (tmp_path / "a.jsonl", "symbolic links"),
        (tmp_path / "none.jsonl" / "x.jsonl", "no such file"),
        (str(tmp_path) + "/" + "x" * 300 + ".jsonl", "too long"),
    ]:
        with pytest.raises(InputFileError, match=said):
            open_source(path)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InputFileError, match="is a folder"):
        open_source(tmp_path / "folder.jsonl")
    with pytest.raises(InputFileError, match="format 'xml'"):
        open_source(tmp_path / "in.jsonl", "xml")


def test_no_room_for_the_copy_names_the_variable(written, monkeypatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(InputFileError, match=r"disk is full.*TMPDIR"):
        open_source(written(b"prompt\nhello\n", "in.csv"))


# Tables


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        (
            "in.csv",
            '\ufeffprompt,id,max_new_tokens\r\n"Hello, ""you""\nthere",a,50\r\n\r\nsecond,,\r\n',
            [
                {"prompt": 'Hello, "you"\nthere', "id": "a", "max_new_tokens": "50"},
                {"prompt": "second", "id": None, "max_new_tokens": None},
            ],
        ),
        ("in.tsv", "prompt\tid\nhello, you\t1\n", [{"prompt": "hello, you", "id": "1"}]),
        ("in.csv", "prompt;id\nhello, you;1\n", [{"prompt": "hello, you", "id": "1"}]),
        ("in.csv", "prompt\nhello; you\n", [{"prompt": "hello; you"}]),
        ("in.csv", ",prompt\n0,a\n", [{"column 1": "0", "prompt": "a"}]),
        ("in.csv", "prompt,id\n", []),
        ("in.csv", "", []),
        ("in.csv", "\n\nprompt\na", [{"prompt": "a"}]),
        ("in.csv", f"prompt\n{'x' * 200_000}\n", [{"prompt": "x" * 200_000}]),
        ("in.csv", 'prompt\n"a\0b"\n', [{"prompt": "a\0b"}]),
    ],
)
def test_csv_as_people_write_it(written, name, data, expected) -> None:
    before = csv.field_size_limit()
    assert rows(written(data, name)) == expected
    assert csv.field_size_limit() == before, "the limit of a cell is put back"
    with open_source(written(data, name)) as source:
        assert [source.where(number) for number in range(source.count)] == ["row 1", "row 2"][: source.count]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("in.csv", "a,b,a\n1,2,3\n", "more than one column is named 'a'"),
        ("in.csv", 'prompt\na\n"b\nc\nd\n', "the row that begins on line 3 is not CSV: unexpected end of data"),
        ("in.csv", 'a,b\n"1\n",2\n3,4,5\n', "begins on line 4 is not CSV: it has 3 cells, and there are 2 columns"),
        ("in.tsv", "a\tb\n1\n", "begins on line 2 is not CSV: it has 1 cells, and there are 2 columns"),
        ("in.csv", 'a,b\n"1"x,2\n', "begins on line 2 is not CSV: ',' expected after"),
        ("in.csv", "a,b\r1,2\r", "begins on line 1 is not CSV: new-line character"),
        ("in.csv", b"a,b\n1,2\n3,\xff\n", "line 3: is not UTF-8: byte 0xff at byte 3"),
        ("in.txt", b"a\n\nb\xff\n", "line 3: is not UTF-8: byte 0xff at byte 2"),
    ],
)
def test_a_table_or_text_that_is_not_well_formed_is_refused_with_its_row(written, name, data, said) -> None:
    before = csv.field_size_limit()
    with pytest.raises(InputFileError, match=said):
        open_source(written(data, name))
    assert csv.field_size_limit() == before


def test_parquet(tmp_path) -> None:
    pa = pytest.importorskip("pyarrow")
    import datetime
    import decimal

    import pyarrow.parquet as pq

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "x"}]
    table = pa.table(
        {
            "prompt": ["a\nb", "é", None],
            "messages": [chat, None, []],
            "max_new_tokens": [50, None, 7],
            "temperature": [0.5, float("nan"), None],
            "when": pa.array([1, None, 2_000_000_001], pa.timestamp("ns")),
            "day": [datetime.date(2026, 1, 2), None, None],
            "price": [decimal.Decimal("1.50"), decimal.Decimal("2.00"), None],
            "raw": [b"ok", b"\xff", b"/w=="],
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        }
    )
    path = str(tmp_path / "in.parquet")
    pq.write_table(table, path, row_group_size=2)
    found = rows(path)
    assert found[0] == {
        "prompt": "a\nb",
        "messages": chat,
        "max_new_tokens": 50,
        "temperature": 0.5,
        "when": "1970-01-01T00:00:00",
        "day": "2026-01-02",
        "price": 1.5,
        "raw": "ok",
        "kind": "x",
        "map": {"k": 1},
    }
    assert found[1]["temperature"] is None, "not a number is no number"
    assert (found[1]["price"], found[1]["raw"]) == (2, {"base64": "/w=="})
    assert found[2]["raw"] == "/w==", "which was text"
    assert found[2]["messages"] == []
    with open_source(path) as source:
        assert source.where(2) == "row 3"

    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path)
    with pytest.raises(InputFileError, match="more than one column is named 'a'"):
        open_source(path)
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputFileError, match="cannot be read as Parquet"):
        open_source(path)


def test_parquet_without_pyarrow_says_what_to_install(written, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FilesError, match=r"pip install 'hf-batchllm\[files\]'"):
        open_source(written(b"PAR1", "in.parquet"))


# Windows


def test_records_that_begin_alike_are_neighbours_and_families_stand_where_they_began() -> None:
    a, b, own = "A" * 300, "B" * 300, [f"{number}" * 80 for number in range(3)]
    texts = [own[0], a + "1", b + "1", own[1], a + "2", b + "2", own[2], a + "1"]
    order, shared = sharing_order(fingerprints([json.dumps({"prompt": text}).encode() for text in texts]))
    assert order.tolist() == [0, 1, 7, 4, 2, 5, 3, 6]
    assert shared.tolist() == [0, 0, 5, 2, 0, 2, 0, 0]


def test_a_list_without_sharing_keeps_its_order() -> None:
    prints = fingerprints(json.dumps({"prompt": f"{number} and so on"}).encode() for number in range(500))
    order, shared = sharing_order(prints)
    assert order.tolist() == list(range(500))
    assert not shared.any()


def test_windows_cut_no_family_but_at_their_edges(written) -> None:
    families = [f"document {number}: " + chr(97 + number) * 300 for number in range(20)]
    chance = np.random.default_rng(0)
    texts = [families[number] + f" {place}" for place, number in enumerate(chance.integers(0, 20, 400))]
    with open_source(written("".join(json.dumps({"prompt": text}) + "\n" for text in texts))) as source:
        everything = np.arange(400)
        assert [window.tolist() for window in source.windows(everything)] == [list(range(400))]
        size = 100 * (340 + 512)
        windows = list(source.windows(everything, window_bytes=size))
        assert len(windows) == 4
        assert sorted(np.concatenate(windows).tolist()) == list(range(400))
        for window in windows:
            assert sum(len(raw) + 512 for raw in source.records(window)) <= size + 340 + 512
            assert window.tolist() == sorted(window.tolist())
        homes = [{texts[number][:20] for number in window} for window in windows]
        assert sum(map(len, homes)) <= 20 + len(windows) - 1

        some = np.arange(1, 400, 3)
        windows = list(source.windows(some, window_bytes=size // 3))
        assert len(windows) > 2
        assert sorted(np.concatenate(windows).tolist()) == some.tolist()
        by_id = list(source.windows(everything, size, lambda raw: json.loads(raw)["prompt"][-1] * 64))
        assert sorted(np.concatenate(by_id).tolist()) == list(range(400))
        assert list(source.windows(np.arange(0))) == []


def test_pieces_cost_about_the_same_and_no_record_is_lost() -> None:
    chance = np.random.default_rng(1)
    for _ in range(200):
        count, pieces = int(chance.integers(1, 40)), int(chance.integers(1, 50))
        cost = chance.integers(1, 50, count)
        edges = cut(cost, pieces)
        assert (edges[0], edges[-1], len(edges)) == (0, count, pieces + 1) and (np.diff(edges) >= 0).all()
        sums = np.diff(np.concatenate([[0], np.cumsum(cost)])[edges])
        assert sums.max() <= cost.sum() / pieces + cost.max() + 1
    assert cut(np.zeros(0, dtype=np.int64), 3).tolist() == [0, 0, 0, 0]
