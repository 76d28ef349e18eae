"""The results of jobs that ran a part of a file each, as one output."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from support_families import build
from support_file_lines import in_a_child, records, results, write_lines
from support_shards import COUNT, SETTINGS, again, change_record, dying, part_file, record_of, shortened
from support_shards import folder as folder  # a fixture
from support_shards import generator as generator  # a fixture
from support_shards import parts as parts  # a fixture
from support_shards import quiet as quiet  # a fixture
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, FilesError, merge_shards, run_file
from hf_batchllm.errors import OutputFileError, OutputWriteError, RunChangedError


def test_merged_results_are_those_of_one_run(generator: BatchGenerator, folder: Path) -> None:
    report = merge_shards(folder / "out.jsonl")
    assert (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert (report.records, report.before, report.written, report.errors) == (COUNT, 0, COUNT, 3)
    assert "may be deleted" in str(report) and "3 of 60 results are errors: see `error`" in str(report)
    merged, one = record_of(folder / "out.jsonl"), record_of(folder / "whole.jsonl")
    for name in ("settings", "seed", "model", "input", "results", "version", "shard"):
        assert merged[name] == one[name], name
    assert merged["finished"] and merged["figures"].keys() == one["figures"].keys()
    assert merged["figures"]["new_tokens"] == one["figures"]["new_tokens"]
    assert "Nothing to do" in str(merge_shards(folder / "out.jsonl"))
    for path in folder.glob("*shard*"):
        path.unlink()
    report = again(generator, folder)
    assert report.written == 0 and report.errors == 3 and "complete already" in str(report)


def test_greedy_parts_with_a_limit(generator: BatchGenerator, tmp_path: Path) -> None:
    lines = [{name: value for name, value in line.items() if name in ("prompt", "id")} for line in records(50)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    for part in (3, 1, 2):
        run_file(generator, source, tmp_path / "out.jsonl", shard=f"{part}/3", limit=40, **SETTINGS)
    assert merge_shards(tmp_path / "out.jsonl").written == 40
    run_file(generator, source, tmp_path / "whole.jsonl", limit=40, **SETTINGS)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    for name in ("out.jsonl", "whole.jsonl"):
        assert run_file(generator, source, tmp_path / name, limit=40, **SETTINGS).written == 0
        assert run_file(generator, source, tmp_path / name, **SETTINGS).written == 10
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_seed_of_ones_own(generator: BatchGenerator, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", records(12, bad=False))
    for part in (1, 2):
        run_file(generator, source, tmp_path / "out.jsonl", shard=f"{part}/2", temperature=2.0, seed=3, **SETTINGS)
    merge_shards(tmp_path / "out.jsonl")
    run_file(generator, source, tmp_path / "whole.jsonl", temperature=2.0, seed=3, **SETTINGS)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    again = run_file(generator, source, tmp_path / "out.jsonl", shard="1/2", temperature=2.0, **SETTINGS)
    assert again.written == 0  # a job that is started again without the seed goes on with it


def test_requests_of_openai(generator: BatchGenerator, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "w7 w8"}], "max_tokens": 4, "temperature": 1.5}
    bodies: list[Any] = [body, {**body, "n": 2}, {"messages": "hello"}, body, {**body, "seed": 3}, body]
    lines = [
        {"custom_id": f"a{number}", "method": "POST", "url": "/v1/chat/completions", "body": each}
        for number, each in enumerate(bodies)
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    for part in (1, 2, 3):
        run_file(generator, source, tmp_path / "out.jsonl", shard=f"{part}/3", **SETTINGS)
    report = merge_shards(tmp_path / "out.jsonl")
    assert report.errors == 1 and "see `response.body.error`" in str(report)
    seed = record_of(tmp_path / "out.jsonl")["seed"]
    run_file(generator, source, tmp_path / "whole.jsonl", seed=seed, **SETTINGS)

    def timeless(path: Path) -> list[dict[str, Any]]:
        found = results(path)
        for line in found:
            line["response"]["body"].pop("created", None)
        return found

    assert timeless(tmp_path / "out.jsonl") == timeless(tmp_path / "whole.jsonl")
    assert run_file(generator, source, tmp_path / "out.jsonl", **SETTINGS).written == 0


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables(generator: BatchGenerator, folder: Path, suffix: str) -> None:
    one, merged = folder / f"whole.{suffix}", folder / f"out.{suffix}"
    for part in range(1, 5):
        os.rename(part_file(folder, part), part_file(folder, part, name=merged.name))
        os.rename(f"{part_file(folder, part)}.run.json", f"{part_file(folder, part, name=merged.name)}.run.json")
    saved = part_file(folder, 3, name=merged.name).read_bytes()
    shortened(part_file(folder, 3, name=merged.name), 4)
    with pytest.raises(FilesError, match=r"part 3 has 4 of \d+ results"):
        merge_shards(merged)
    assert not merged.exists()
    again(generator, folder, name=one.name, seed=record_of(folder / "whole.jsonl")["seed"])
    read: Callable[[Path], pandas.DataFrame] = pandas.read_csv if suffix == "csv" else pandas.read_parquet
    report = merge_shards(merged, partial=True)
    assert 0 < report.left < 20 and 0 < len(set(read(merged)["index"])) == COUNT - report.left
    unfinished = Path(shutil.copytree(folder, folder.parent / "unfinished"))
    assert again(generator, unfinished, name=merged.name).written == report.left
    assert (unfinished / merged.name).read_bytes() == one.read_bytes()
    part_file(folder, 3, name=merged.name).write_bytes(saved)
    assert merge_shards(merged).written == report.left
    assert merged.read_bytes() == one.read_bytes()
    assert "complete already" in str(merge_shards(merged))
    assert again(generator, folder, name=merged.name).written == 0


def test_a_format_of_ones_own(folder: Path) -> None:
    merge_shards(folder / "out.jsonl", output_format="csv")
    assert (folder / "out.jsonl").read_text().startswith("index,id,sample")


def test_missing_results(generator: BatchGenerator, folder: Path) -> None:
    """Merged in part, continued by a run of the whole file or by more of the parts."""
    shortened(part_file(folder, 2), 5)
    size = record_of(part_file(folder, 2))["shard"]["results"]
    fourth = part_file(folder, 4).read_bytes()
    part_file(folder, 4).unlink()
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(FilesError) as caught:
        merge_shards(folder / "out.jsonl")
    assert f"part 2 has 5 of {size} results; part 4 has not begun" in str(caught.value)
    assert "Run these jobs again, and each continues; or `--partial` merges what is there" in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == before
    report = merge_shards(folder / "out.jsonl", partial=True)
    there = results(folder / "out.jsonl")
    assert report.left == COUNT - len(there) > 0
    assert f"{report.left} of 60 are missing: part 2 has 5 of {size} results; part 4 has not begun" in str(report)
    assert [each["index"] for each in there] == sorted(each["index"] for each in there)
    assert record_of(folder / "out.jsonl")["finished"] is None
    assert merge_shards(folder / "out.jsonl", partial=True).written == 0

    by_parts = Path(shutil.copytree(folder, folder.parent / "by parts"))
    part_file(by_parts, 4).write_bytes(fourth)
    again(generator, by_parts, "2/4")
    assert merge_shards(by_parts / "out.jsonl").written == report.left
    assert again(generator, folder).written == report.left
    for place in (folder, by_parts):
        assert (place / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
        assert again(generator, place).written == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"settings": {"max_new_tokens": 7}}, "max_new_tokens is 4 in part 1 and 7 in part 3"),
        ({"seed": 7}, r"seed is \d+ in part 1 and 7 in part 3"),
        ({"model": {"weights": "0", "config": "0"}}, "part 3 had other weights and another config than part 1"),
        ({"input": {"digest": "another"}}, "the input of part 3 is not that of part 1"),
        ({"shard": {"records": 50}}, "part 1 is one of 60 records, and part 3 of 50 records"),
    ],
)
def test_parts_of_different_runs(folder: Path, changes: dict[str, Any], why: str) -> None:
    path = part_file(folder, 3)
    was = record_of(path)
    change_record(
        path, **{name: {**was[name], **new} if isinstance(new, dict) else new for name, new in changes.items()}
    )
    for partial in (False, True):
        with pytest.raises(RunChangedError, match=f"its parts are of different runs: .*{why}.*with `--restart`"):
            merge_shards(folder / "out.jsonl", partial=partial)
    assert not (folder / "out.jsonl").exists()


def test_files_that_are_no_parts_of_it(folder: Path) -> None:
    def refused(why: str) -> None:
        with pytest.raises(OutputFileError, match=why):
            merge_shards(folder / "out.jsonl", partial=True)
        assert not (folder / "out.jsonl").exists()

    first, second = part_file(folder, 1), part_file(folder, 2)
    shutil.copy(first, part_file(folder, 1, of=3))
    refused(r"parts of different splits: 1 of 3 and 1-4 of 4\. Move away")
    part_file(folder, 1, of=3).unlink()
    shutil.copy(first, part_file(folder, 9))
    refused("is no part that a job has written")
    part_file(folder, 9).unlink()
    kept = record_of(second)
    change_record(second, shard={})
    refused("is of a run of the whole file, by its run record")
    change_record(second, shard={"part": 2})
    refused("is damaged")
    change_record(second, shard={**kept["shard"], "part": 3})
    refused("is of part 3 of 4, by its run record")
    Path(f"{second}.run.json").unlink()
    refused(r"which would say how they were made, is not there\..*; else move the file away$")
    Path(f"{second}.run.json").write_text(json.dumps(kept))
    lines = second.read_bytes()
    second.write_bytes(lines + first.read_bytes().splitlines(keepends=True)[0])
    refused("has a result for record .*, and so has another part")
    second.write_bytes(lines + lines.splitlines(keepends=True)[0].replace(b'"index": ', b'"index": 9'))
    refused("beyond the 60 of the parts")
    second.write_bytes(lines)
    with pytest.raises(OutputFileError, match="has no parts"):
        merge_shards(folder / "other.jsonl")
    with pytest.raises(OutputFileError, match=r"is one part: give the output that the jobs were given, .*/out\.jsonl$"):
        merge_shards(second)
    assert merge_shards(folder / "out.jsonl").written == COUNT


def test_no_results_yet(folder: Path) -> None:
    for part in range(1, 5):
        part_file(folder, part).write_bytes(b"")
    with pytest.raises(FilesError, match=r"no part has a result yet: part 1 has 0 of \d+ results; part 2"):
        merge_shards(folder / "out.jsonl", partial=True)
    for part in range(1, 5):
        Path(f"{part_file(folder, part)}.run.json").unlink()
    with pytest.raises(FilesError, match="no part of it has begun"):
        merge_shards(folder / "out.jsonl", partial=True)


def test_an_output_of_something_else(generator: BatchGenerator, folder: Path) -> None:
    target = folder / "out.jsonl"
    target.write_text("mine\nyours\n")
    with pytest.raises(OutputFileError, match="this is not a result"):
        merge_shards(target)
    shutil.copy(folder / "whole.jsonl", target)
    with pytest.raises(OutputFileError, match=r"out\.jsonl\.run\.json, which would say"):
        merge_shards(target)
    target.unlink()
    again(generator, folder, seed=1, limit=5)
    kept = target.read_bytes()
    with pytest.raises(RunChangedError, match=r"begun as another run: seed is 1 there and \d+ in the"):
        merge_shards(target)
    assert target.read_bytes() == kept
    assert merge_shards(target, restart=True).written == COUNT
    assert (folder / "out.jsonl.bak-1").read_bytes() == kept
    assert target.read_bytes() == (folder / "whole.jsonl").read_bytes()
    target.unlink()  # results of the same run are as good as those of the parts
    again(generator, folder, seed=record_of(part_file(folder, 1))["seed"], limit=5)
    assert merge_shards(target).before == 5
    assert target.read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_errors_that_were_tried_again_since(folder: Path, name: str) -> None:
    for path in list(folder.glob("out.jsonl*")) if name != "out.jsonl" else []:
        path.rename(folder / path.name.replace("out.jsonl", name, 1))
    merge_shards(folder / name)
    for part in range(1, 5):
        path = part_file(folder, part, name=name)
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        for line in lines:
            if line.pop("error", None):
                line["text"] = "good"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = merge_shards(folder / name)
    assert (report.before, report.written, report.errors) == (COUNT - 3, 3, 0)
    if name.endswith("csv"):
        table = pandas.read_csv(folder / name)
        assert sorted(set(table["index"])) == list(range(COUNT)) and table["error"].isna().all()
    else:
        assert [each["index"] for each in results(folder / name)] == list(range(COUNT))
    assert "Nothing to do" in str(merge_shards(folder / name))


def test_a_merge_that_was_broken_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, write, room = folder / "out.jsonl", os.write, [2000]

    def full(descriptor: int, data: Any) -> int:
        if not target.exists() or os.fstat(descriptor).st_ino != target.stat().st_ino:
            return write(descriptor, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        fits = min(len(data), room[0])
        room[0] -= fits
        return write(descriptor, data[:fits])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputWriteError, match="the disk is full"):
        merge_shards(target)
    monkeypatch.undo()
    assert 0 < len(results(target)) < COUNT
    report = merge_shards(target)
    assert report.before > 0 and report.left == 0
    assert target.read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_in_a_merge(folder: Path) -> None:
    """At each of its writes, and between a table and its journal: the same call ends it."""
    target = folder / "out.jsonl"
    for calls in range(1, 40):
        for path in folder.glob("out.jsonl*"):
            if "shard" not in path.name:
                path.unlink()
        left = [calls]

        def merge_and_die(left: list[int] = left) -> None:
            for name in ("write", "replace", "fsync", "ftruncate"):
                setattr(os, name, dying(getattr(os, name), left))
            merge_shards(target)

        child = in_a_child(merge_and_die)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        merge_shards(target)
        assert target.read_bytes() == (folder / "whole.jsonl").read_bytes()
        assert not list(folder.glob("*.tmp"))
        if not killed:
            assert calls > 5
            return
    raise AssertionError("a merge has no so many writes")


def test_other_weights_in_one_part(folder: Path, generator: BatchGenerator) -> None:
    changed = copy.deepcopy(build("llama"))
    with torch.no_grad():
        next(changed.parameters())[0] += 1
    with BatchGenerator(changed, word_tokenizer(97, template=True)) as other:
        shortened(part_file(folder, 2), 5)
        with pytest.raises(RunChangedError, match="with other weights"):
            again(other, folder, "2/4")
        again(other, folder, "2/4", restart=True)
    with pytest.raises(RunChangedError, match="part 2 had other weights than part 1"):
        merge_shards(folder / "out.jsonl")


def test_a_link_leads_to_the_real_output(generator: BatchGenerator, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(folder / "out.jsonl")
    assert run_file(
        generator, folder / "in.jsonl", tmp_path / "link.jsonl", shard="1/4", temperature=0.9, **SETTINGS
    ).before  # fmt: skip
    assert merge_shards(tmp_path / "link.jsonl").written == COUNT
    assert (folder / "out.jsonl").exists() and (tmp_path / "link.jsonl").is_symlink()
