"""Parts of a file that independent jobs run: the split, and the runs of parts."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_file_lines import records, results, write_lines
from support_shards import COUNT, SETTINGS, again, part_file, record_of, shortened
from support_shards import folder as folder  # a fixture
from support_shards import generator as generator  # a fixture
from support_shards import parts as parts  # a fixture
from support_shards import quiet as quiet  # a fixture

from hf_batchllm import BatchGenerator, FilesError, merge_shards, run_file
from hf_batchllm.errors import InputFileError, OutputBusyError, OutputFileError, RunChangedError
from hf_batchllm.files.shards import ANSWER_COST, Part, Shard, part_of, read_shard
from hf_batchllm.files.sources import open_source

# -- the split ---------------------------------------------------------------------------------------------------------


Spans = Callable[[list[str], int], list[list[int]]]


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Spans:
    """The numbers of each part's records, where these are prompts."""
    path = tmp_path_factory.mktemp("split") / "in.jsonl"

    def of(texts: list[str], count: int) -> list[list[int]]:
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        with open_source(path) as source:
            parts = [
                part_of(source, Shard(part, count), len(texts), lambda raw: json.loads(raw)["prompt"])
                for part in range(1, count + 1)
            ]
        return [part.numbers.tolist() for part in parts]

    return of


TEXTS = st.lists(
    st.builds(
        lambda stem, stems, own: "".join(letter * 300 for letter in stem[:stems]) + own,
        st.text("abc", min_size=4, max_size=4),
        st.integers(0, 4),
        st.text("xyz", max_size=40),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_each_record_is_in_one_part_and_parts_cost_the_same(spans: Spans, texts: list[str], count: int) -> None:
    found = spans(texts, count)
    assert sorted(number for span in found for number in span) == list(range(len(texts)))
    # What a record shares with another one is at most its text: it costs from its answer to both.
    most = [sum(len(texts[number]) + ANSWER_COST for number in span) for span in found]
    least = [len(span) * ANSWER_COST for span in found]
    ideal, largest = sum(most) / count, max(map(len, texts), default=0) + ANSWER_COST
    assert all(one <= ideal * 1.1 + largest + 2 for one in least)


def test_groups_stay_together_but_at_the_edges_of_parts(spans: Spans) -> None:
    texts = [f"{chr(97 + number % 26) * 2000}{number}" for number in range(26 * 40)]
    for count in (2, 5, 13):
        homes = [{texts[number][0] for number in span} for span in spans(texts, count)]
        assert sum(map(len, homes)) <= 26 + count - 1


def test_a_group_that_is_too_large_is_cut(spans: Spans) -> None:
    found = spans([f"{'a' * 5000}{number}" for number in range(1000)], 8)
    assert all(120 <= len(span) <= 130 for span in found)


def test_what_shares_nothing_keeps_its_order(spans: Spans) -> None:
    found = spans([f"{number:04}" * 20 for number in range(100)], 4)
    assert [number for span in found for number in span] == list(range(100))
    assert [len(span) for span in found] == [25] * 4


def test_more_parts_than_records(spans: Spans) -> None:
    found = spans(["a", "b" * 90, "c"], 7)
    assert sorted(map(len, found)) == [0, 0, 0, 0, 1, 1, 1]


def test_every_job_finds_the_same_split(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", records(80))

    def of(part: int, count: int = 80, place: Path = source) -> Part:
        with open_source(place) as opened:
            return part_of(opened, Shard(part, 3), count, lambda raw: json.loads(raw).get("prompt") or "")

    found = [of(part) for part in (1, 2, 3)]
    assert sorted(np.concatenate([part.numbers for part in found]).tolist()) == list(range(80))
    assert all(np.array_equal(part.numbers, of(part.shard.part).numbers) for part in found)
    (seed,) = {part.seed for part in found}
    elsewhere = shutil.copy(source, tmp_path / "copy.jsonl")
    assert of(2, place=Path(elsewhere)).summary() == found[1].summary()
    assert of(1, 70).seed == seed
    assert of(1, place=write_lines(tmp_path / "more.jsonl", records(81))).seed != seed


def test_how_a_part_is_write_lines() -> None:
    assert read_shard(" 02 / 8 ") == Shard(2, 8) and str(Shard(2, 8)) == "2/8"
    for text in ("2", "a/b", "2/", "/8", "-1/8", "0/8", "9/8", "0/0", "1/100001", "2/8/9", "٢/٨", 2):
        with pytest.raises(FilesError, match="counted from 1 up to 100,000, as in 2/8"):
            read_shard(text)  # type: ignore[arg-type]


# -- runs of parts -----------------------------------------------------------------------------------------------------


def test_a_part_is_written_beside_the_output(generator: BatchGenerator, folder: Path) -> None:
    assert not (folder / "out.jsonl").exists()
    there = [results(part_file(folder, part)) for part in range(1, 5)]
    whole = {each["index"]: each for each in results(folder / "whole.jsonl")}
    assert sorted(each["index"] for part in there for each in part) == list(range(COUNT))
    assert all(each == whole[each["index"]] for part in there for each in part)
    assert all(12 <= len(part) <= 18 for part in there)
    assert "Nothing to do" in str(again(generator, folder, "2/4"))


def test_a_part_that_died_continues(generator: BatchGenerator, folder: Path) -> None:
    whole = part_file(folder, 2).read_bytes()
    shortened(part_file(folder, 2), 5)
    report = again(generator, folder, "2/4")
    assert report.before == 5 and report.left == 0
    assert part_file(folder, 2).read_bytes() == whole


def test_errors_of_parts_run_again(generator: BatchGenerator, folder: Path) -> None:
    written = [again(generator, folder, f"{part}/4", retry_errors=True).written for part in range(1, 5)]
    assert sum(written) == 3
    assert merge_shards(folder / "out.jsonl").errors == 3
    assert (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_a_part_without_records_says_so(generator: BatchGenerator, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", records(3, bad=False))
    reports = [
        run_file(generator, source, tmp_path / "out.jsonl", shard=f"{part}/5", **SETTINGS) for part in range(1, 6)
    ]
    empty = [report for report in reports if not report.records]
    assert len(empty) == 2 and all(str(report).endswith(f"{report.part} has no records") for report in empty)
    assert all("nothing to do" in str(report) for report in empty)
    report = merge_shards(tmp_path / "out.jsonl")
    assert (report.records, report.written) == (3, 3)
    for report in empty:  # it would not be missed
        Path(report.path).unlink()
        Path(f"{report.path}.run.json").unlink()
    assert "complete already" in str(merge_shards(tmp_path / "out.jsonl"))


def test_one_job_to_a_part(generator: BatchGenerator, folder: Path) -> None:
    with part_file(folder, 2).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OutputBusyError, match=r"another run \(process .*\) is writing to .*shard-2-of-4"):
            again(generator, folder, "2/4")
        assert again(generator, folder, "1/4").written == 0
        with pytest.raises(OutputBusyError, match=r"is writing to .*shard-2-of-4.*: wait for it"):
            merge_shards(folder / "out.jsonl", partial=True)


def test_a_part_is_that_of_the_same_file(generator: BatchGenerator, folder: Path) -> None:
    kept = part_file(folder, 2).read_bytes()
    with pytest.raises(RunChangedError, match="max_new_tokens was 4 and is 5"):
        again(generator, folder, "2/4", max_new_tokens=5)
    with pytest.raises(RunChangedError, match=r"it was part 2 of 4 \(of 60 .*now be part 2 of 4 \(of 50 records"):
        again(generator, folder, "2/4", limit=50)
    with pytest.raises(RunChangedError, match=r"it was part 2 of 4 .*and would now be a run of the whole file"):
        run_file(
            generator, folder / "in.jsonl", part_file(folder, 2), seed=record_of(part_file(folder, 2))["seed"],
            temperature=0.9, **SETTINGS,
        )  # fmt: skip
    with (folder / "in.jsonl").open("a") as file:
        file.write('{"prompt": "w5"}\n')
    with pytest.raises(RunChangedError, match="the input has changed"):
        again(generator, folder, "2/4")
    assert part_file(folder, 2).read_bytes() == kept
    report = again(generator, folder, "2/4", restart=True)
    assert report.written and Path(f"{part_file(folder, 2)}.bak-1").read_bytes() == kept


def test_where_a_part_cannot_be_write_lines(generator: BatchGenerator, folder: Path) -> None:
    for target, error, why in (
        ("-", OutputFileError, "and - is a stream"),
        ("/dev/null", OutputFileError, "and /dev/null is a stream"),
        (folder / "in.jsonl", OutputFileError, "is the input"),
        (folder / "out.txt", OutputFileError, "does not say what it is"),
    ):
        with pytest.raises(error, match=why):
            run_file(generator, folder / "in.jsonl", target, shard="1/2", **SETTINGS)
    with pytest.raises(FilesError, match="as in 2/8"):
        again(generator, folder, "two")
    assert not list(folder.glob("*of-2*"))


def test_a_bad_record_stops_its_own_part_alone(generator: BatchGenerator, tmp_path: Path) -> None:
    lines = [{"prompt": "w5 w6"}, {"prompt": None}]
    source, why = write_lines(tmp_path / "in.jsonl", lines), []
    for part in (1, 2):
        try:
            run_file(generator, source, tmp_path / "out.jsonl", shard=f"{part}/2", on_error="raise", **SETTINGS)
        except InputFileError as error:
            why.append(str(error))
    assert len(why) == 1 and "line 2" in why[0]
    assert len(list(tmp_path.glob("out.jsonl.shard-*.jsonl"))) == 1
