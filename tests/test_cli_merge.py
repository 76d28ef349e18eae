"""``hf-batchllm run --shard`` and ``hf-batchllm merge``: what they say, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support_command import raising, refused, results
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture

from hf_batchllm.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def job(written: Callable[..., str], saved: str) -> list[str]:
    """The command of a job, but for its part. The last record of the file is an error."""
    written(*({"prompt": f"w{3 + number % 3} " * 20 + f"w{number}"} for number in range(12)), {"prompt": None})
    return ["run", "in.jsonl", "out.jsonl", "--model", saved, "--max-new-tokens", "3", "--temperature", "0.9"]


def test_jobs_of_an_array_and_their_merge(job: list[str], capsys: Capture) -> None:
    assert sorted(main([*job, "--shard", f"{part}/3"]) for part in (1, 2, 3)) == [0, 0, 3]
    said = capsys.readouterr().err
    assert "out.jsonl.shard-2-of-3.jsonl: 4 results in" in said or "out.jsonl.shard-2-of-3.jsonl: 5 results in" in said
    assert "hf-batchllm: `hf-batchllm merge out.jsonl` joins the parts once all 3 are complete" in said
    assert not Path("out.jsonl").exists()
    assert main(["merge", "out.jsonl"]) == 3
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "out.jsonl: 13 results",
        "1 of 13 results is an error: see `error`",
        "the parts are not needed any more, and may be deleted: out.jsonl.shard-*-of-3.jsonl and their .run.json",
    ]
    for path in Path().glob("*shard*"):
        path.unlink()
    seed = json.loads(Path("out.jsonl.run.json").read_text())["seed"]
    assert main(job) == 3
    assert "out.jsonl: complete already, 13 results. Nothing to do" in capsys.readouterr().err
    assert main([*job[:2], "whole.jsonl", *job[3:], "--seed", str(seed)]) == 3
    assert Path("whole.jsonl").read_bytes() == Path("out.jsonl").read_bytes()


def test_missing_results(job: list[str], capsys: Capture) -> None:
    assert main([*job, "--shard", "1/2", "--limit", "12"]) == 0
    said = refused(capsys, "merge", "out.jsonl")
    assert "part 2 has not begun" in said and "`--partial` merges what is there" in said
    assert not Path("out.jsonl").exists()
    assert main(["merge", "out.jsonl", "--partial"]) == 0
    said = capsys.readouterr().err
    assert "Run these jobs again and merge again, or continue out.jsonl by a run of the whole file" in said
    assert main(job) == 3
    assert [each["index"] for each in results()] == list(range(13))
    Path("out.jsonl").write_text('{"a": 1}\n')
    assert "this is not a result of such a run" in refused(capsys, "merge", "out.jsonl", "--partial")
    assert main(["merge", "out.jsonl", "--partial", "--restart", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "") and Path("out.jsonl.bak-1").read_text() == '{"a": 1}\n'


def test_an_interrupt(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.cli.merge.merge", raising(KeyboardInterrupt()))
    assert main(["merge", "out.jsonl"]) == 130
    assert "interrupted. The same command continues, and the parts are as they were" in capsys.readouterr().err


def test_a_table(job: list[str]) -> None:
    table = [*job[:2], "out.csv", *job[3:]]
    assert sorted(main([*table, "--shard", part]) for part in ("1/2", "2/2")) == [0, 3]
    assert len(list(Path().glob("out.csv.shard-*-of-2.jsonl"))) == 2
    assert main(["merge", "out.csv"]) == 3
    lines = Path("out.csv").read_text().splitlines()
    assert len(lines) == 14 and lines[0].startswith("index,")
    assert main(table) == 3
