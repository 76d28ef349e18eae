"""``hf-batchllm run --shard`` and ``hf-batchllm merge``: what they say, and their exit codes."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support_command import raising, refused, results
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture

from hf_batchllm.cli import main

JOB = ["run", "in.jsonl", "out.jsonl", "--max-new-tokens", "3", "--temperature", "0.9", "--quiet", "--model"]


@pytest.fixture
def source(written: Callable[..., str]) -> str:
    return written(*({"prompt": f"w{3 + number % 3} " * 20 + f"w{number}"} for number in range(12)), {"prompt": None})


def job(saved: str, *more: str) -> int:
    return main([*JOB, saved, *more])


def test_jobs_of_an_array_and_their_merge(source: str, saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [part for part in [*JOB, saved] if part != "--quiet"]
    assert sorted(main([*command, "--shard", f"{part}/3"]) for part in (1, 2, 3)) == [0, 0, 3]
    said = capsys.readouterr().err
    assert "out.jsonl.shard-2-of-3.jsonl: 4 results in" in said or "out.jsonl.shard-2-of-3.jsonl: 5 results in" in said
    assert "hf-batchllm: `hf-batchllm merge out.jsonl` joins the parts once all 3 are complete" in said
    assert not Path("out.jsonl").exists()
    assert main(["merge", "out.jsonl"]) == 3
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "out.jsonl: 13 results of 3 parts",
        "1 of 13 results is an error: see `error`",
        "the parts are not needed any more, and may be deleted: out.jsonl.shard-*-of-3.jsonl and their .run.json",
    ]
    for path in Path().glob("*shard*"):
        path.unlink()
    seed = json.loads(Path("out.jsonl.run.json").read_text())["seed"]
    assert main(command) == 3
    assert "out.jsonl: complete already, 13 results. Nothing to do" in capsys.readouterr().err
    assert main(["run", "in.jsonl", "whole.jsonl", *JOB[3:], saved, "--seed", str(seed)]) == 3
    assert Path("whole.jsonl").read_bytes() == Path("out.jsonl").read_bytes()


def test_a_finished_part_needs_no_model_folder(source: str, saved: str, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "model")
    assert job(str(tmp_path / "model"), "--shard", "1/2", "--limit", "12") == 0
    shutil.rmtree(tmp_path / "model")
    assert job(str(tmp_path / "model"), "--shard", "1/2", "--limit", "12") == 0
    assert job(str(tmp_path / "model"), "--shard", "2/2", "--limit", "12") == 2


def test_a_part_without_records(written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    written({"prompt": "w5"})
    codes = [main(["run", "in.jsonl", "out.jsonl", "--model", saved, "--shard", f"{part}/2"]) for part in (1, 2)]
    assert codes == [0, 0]
    assert "part 1 of 2 has no records" in (said := capsys.readouterr().err) or "part 2 of 2 has no records" in said
    assert main(["merge", "out.jsonl", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "") and len(results()) == 1


def test_missing_results(source: str, saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    job(saved, "--shard", "1/3")
    job(saved, "--shard", "3/3")
    said = refused(capsys, "merge", "out.jsonl")
    assert "of 13 results are missing: part 2 has not begun" in said and "`--partial` merges what is there" in said
    assert not Path("out.jsonl").exists()
    assert main(["merge", "out.jsonl", "--partial"]) in (0, 3)
    said = capsys.readouterr().err
    assert "of 13 are missing: part 2 has not begun" in said
    assert "Run these jobs again and merge again, or continue out.jsonl by a run of the whole file" in said
    assert job(saved) == 3
    assert [each["index"] for each in results()] == list(range(13))
    job(saved, "--shard", "2/3")
    assert main(["merge", "out.jsonl"]) == 3
    assert "out.jsonl: complete already, 13 results. Nothing to do" in capsys.readouterr().err


def test_refusals(source: str, saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    job(saved, "--shard", "1/2")
    job(saved, "--shard", "2/2", "--seed", "8")
    assert "and 8 in part 2. Run the wrong part again" in refused(capsys, "merge", "out.jsonl")
    job(saved, "--shard", "2/2", "--restart")
    said = refused(capsys, *JOB, saved, "--shard", "1/1")
    assert "has parts of another split, as out.jsonl.shard-1-of-2.jsonl, and this is part 1 of 1" in said
    assert "move the old parts away" in said and not list(Path().glob("*of-1*"))
    shutil.copy("out.jsonl.shard-1-of-2.jsonl", "out.jsonl.shard-1-of-1.jsonl")
    assert "parts of different splits: 1 of 1 and 1-2 of 2" in refused(capsys, "merge", "out.jsonl")
    Path("out.jsonl.shard-1-of-1.jsonl").unlink()
    with open("out.jsonl.shard-2-of-2.jsonl", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "is running part 2 of 2" in refused(capsys, *JOB, saved, "--shard", "2/2")
        assert "part 2 of 2 is being written now (process" in refused(capsys, "merge", "out.jsonl")
    Path("out.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert "this is not a result of such a run" in refused(capsys, "merge", "out.jsonl")
    assert main(["merge", "out.jsonl", "--restart"]) == 3
    assert "what was in" in capsys.readouterr().err and Path("out.jsonl.bak-1").read_text() == '{"a": 1}\n{"a": 2}\n'


def test_a_merge_that_is_interrupted(
    source: str, saved: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job(saved, "--shard", "1/1") == 3
    with monkeypatch.context() as patched:
        patched.setattr("hf_batchllm.files.store.file_output.FileOutput.finish", raising(KeyboardInterrupt()))
        assert main(["merge", "out.jsonl"]) == 128 + signal.SIGINT
    assert "interrupted. The same command continues" in capsys.readouterr().err
    assert main(["merge", "out.jsonl"]) == 3
    assert len(results()) == 13


def test_a_table(source: str, saved: str) -> None:
    table = ["run", "in.jsonl", "out.csv", *JOB[3:], saved]
    for part in ("1/2", "2/2"):
        main([*table, "--shard", part])
    assert len(list(Path().glob("out.csv.shard-*-of-2.jsonl"))) == 2
    assert main(["merge", "out.csv"]) == 3
    lines = Path("out.csv").read_text().splitlines()
    assert len(lines) == 14 and lines[0].startswith("index,")
    assert main(table) == 3
