"""A file on several processes: the same bytes as on one, by ``run_file`` and by the command."""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from support_pool import Load, process_ids, ready_pool
from support_quick_workers import quick_workers

from hf_batchllm import BatchGenerator, FileReport, GeneratorPool, merge_shards, run_file
from hf_batchllm.cli import main
from hf_batchllm.config import BatchConfig, ConfigError
from hf_batchllm.errors import FilesError

quick_workers()

pytestmark = pytest.mark.xdist_group("pool_files")


@pytest.fixture(scope="module")
def pool() -> Iterator[GeneratorPool]:
    with GeneratorPool(Load(), letter_tokenizer(97), gpus=["cpu", "cpu"]) as made:
        yield made


@pytest.fixture(scope="module")
def one() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), letter_tokenizer(97)) as made:
        yield made


def lines(count: int = 60, **settings: Any) -> list[dict[str, Any]]:
    rng = random.Random(7)
    prefixes = ["".join(rng.choices("abcdef", k=30)) for _ in range(6)]
    return [
        {"id": place, "prompt": rng.choice(prefixes) + "".join(rng.choices("ghij", k=4)), **settings}
        for place in range(count)
    ]


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.some_cases
@pytest.mark.parametrize("window", [1 << 20, 900])
def test_the_same_bytes(window: int, pool: GeneratorPool, one: BatchGenerator, tmp_path: Path) -> None:
    records = lines()
    for place, record in enumerate(records):
        record |= [
            {},
            {"temperature": 0.9},
            {"n": 2, "temperature": 1.0, "seed": place},
            {"num_beams": 2},
            {"logprobs": 1},
        ][place % 5]
    records[7]["top_p"] = 3
    records[9] = {"id": "no prompt"}
    source = written(tmp_path / "in.jsonl", records)
    reports: list[FileReport] = []
    for gen, name in ((one, "one.jsonl"), (pool, "pool.jsonl")):
        reports.append(
            run_file(gen, source, tmp_path / name, max_new_tokens=6, seed=4, window_bytes=window, progress=False)
        )
    found, wanted = ((tmp_path / name).read_text().splitlines() for name in ("pool.jsonl", "one.jsonl"))
    assert [without_logprobs(line) for line in found] == [nearly(line) for line in wanted]
    assert (reports[0].records, reports[0].errors) == (reports[1].records, reports[1].errors) == (60, 2)
    assert run_file(pool, source, tmp_path / "one.jsonl", max_new_tokens=6, seed=4, progress=False).written == 0


def without_logprobs(line: str) -> Any:
    record = json.loads(line)
    record.pop("logprobs", None)
    for answer in record.get("answers", []):
        answer.pop("logprobs", None)
    return record


def nearly(line: str) -> Any:
    """The last digits of a beam's score depend on the other prompts of a step, so on how the list is split."""
    record = without_logprobs(line)
    if "score" in record:
        record["score"] = pytest.approx(record["score"], abs=1e-5)
    return record


def test_a_run_that_was_stopped_goes_on_with_either(pool: GeneratorPool, one: BatchGenerator, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", lines())
    given: dict[str, Any] = {"max_new_tokens": 5, "temperature": 1.0, "seed": 1, "progress": False}
    run_file(one, source, tmp_path / "whole.jsonl", **given)
    run_file(pool, source, tmp_path / "parts.jsonl", limit=20, **given)
    run_file(one, source, tmp_path / "parts.jsonl", limit=40, **given)
    report = run_file(pool, source, tmp_path / "parts.jsonl", **given)
    assert report.before == 40 and report.written == 20
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "parts.jsonl").read_bytes()


def test_parts_of_a_file(pool: GeneratorPool, one: BatchGenerator, tmp_path: Path) -> None:
    """A job has a pool, or one process: the parts fit together."""
    source = written(tmp_path / "in.jsonl", lines())
    given: dict[str, Any] = {"max_new_tokens": 5, "temperature": 1.0, "progress": False}
    for gen, shard in ((pool, "1/3"), (one, "2/3"), (pool, "3/3")):
        run_file(gen, source, tmp_path / "parts.jsonl", shard=shard, **given)
    assert merge_shards(tmp_path / "parts.jsonl").written == 60
    seed = json.loads((tmp_path / "parts.jsonl.run.json").read_text())["seed"]
    run_file(one, source, tmp_path / "whole.jsonl", seed=seed, **given)
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "parts.jsonl").read_bytes()


def test_chats_are_text_alone(pool: GeneratorPool, tmp_path: Path) -> None:
    part = {"type": "image", "image": "a.png"}
    source = written(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": [part]}]}, {"prompt": "ab"}])
    with pytest.raises(FilesError, match="images are not supported on several GPUs"):
        run_file(pool, source, tmp_path / "out.jsonl", image_folder=tmp_path)
    assert run_file(pool, source, tmp_path / "out.jsonl", max_new_tokens=2, progress=False).errors == 1
    assert "only text is supported" in (tmp_path / "out.jsonl").read_text().splitlines()[0]


def test_warnings_name_lines(pool: GeneratorPool, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"prompt": "ab"}, {"prompt": "abcdef" * 9}])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run_file(pool, source, tmp_path / "out.jsonl", max_new_tokens=2, max_prompt_tokens=5, progress=False)
    assert any("line 2" in str(each.message) for each in heard), [str(each.message) for each in heard]


def test_the_bar_is_that_of_the_file(pool: GeneratorPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in.jsonl", lines())
    run_file(pool, source, tmp_path / "out.jsonl", max_new_tokens=2, progress=True)
    assert "60 / 60 done" in capsys.readouterr().err


# -- the command -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(folder / "tiny")
    letter_tokenizer(97).save_pretrained(folder / "tiny")
    written(folder / "in.jsonl", lines(temperature=1.0))
    return folder


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(folder / "in.jsonl"), "--model", str(folder / "tiny"), "--max-new-tokens", "6", "--seed", "2"]
    for name, more in (("one.jsonl", ["--device", "cpu"]), ("pool.jsonl", ["--gpus", "cpu,cpu"])):
        assert main(["run", given[0], str(folder / name), *given[1:], *more]) == 0
    assert (folder / "one.jsonl").read_bytes() == (folder / "pool.jsonl").read_bytes()
    assert "60 results" in capsys.readouterr().err


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--gpus", "99"], "torch finds"),
        (["--gpus", "0,x"], "`gpus`"),
        (["--gpus", "-1"], "gpus"),
        (["--gpus", "cpu,cpu", "--device", "cpu"], "not allowed with argument --gpus"),
        (["--gpus", "cpu,cpu", "--set", "constraints=[1]"], "constraints"),
        (["--data-parallel-size", "2"], "unrecognized arguments"),
    ],
)
def test_what_the_command_refuses(more: list[str], why: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run", str(folder / "in.jsonl"), str(folder / "none.jsonl"), "--model", str(folder / "tiny"), *more]
    assert main(given) == 2
    assert why in capsys.readouterr().err
    assert not (folder / "none.jsonl").exists()


def test_a_worker_that_is_killed_costs_no_line(one: BatchGenerator, tmp_path: Path) -> None:
    """And the user is told."""
    source = written(tmp_path / "in.jsonl", lines(400, temperature=1.0))
    slow = Load(slow={0: 0.01, 1: 0.01})
    with ready_pool(slow, tokenizer=letter_tokenizer(97)) as pool:
        run_file(pool, source, tmp_path / "warm.jsonl", max_new_tokens=2, seed=2, limit=8, progress=False)
        os.kill(process_ids(pool)[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match="SIGKILL"):
            run_file(pool, source, tmp_path / "pool.jsonl", max_new_tokens=20, seed=2, progress=False)
    run_file(one, source, tmp_path / "one.jsonl", max_new_tokens=20, seed=2, progress=False)
    assert (tmp_path / "pool.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_names_from_elsewhere_lead_here() -> None:
    with pytest.raises(ConfigError, match=r"GeneratorPool\(model, gpus=N\)"):
        BatchConfig(data_parallel_size=2)  # type: ignore[call-arg]
