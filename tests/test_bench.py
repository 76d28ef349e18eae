"""The benchmark's command line, on a model that takes no time: what it says, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build

from hf_batchllm.bench import __main__ as bench
from hf_batchllm.bench.contenders import GenerateBatch, Ours, StepSize, best_batch_size
from hf_batchllm.bench.models import SHAPES, load_model
from hf_batchllm.bench.pieces import bare_pieces
from hf_batchllm.bench.workload import Workload

SMALL = "--config tiny --requests 6 --degree 3 --shared 40 --own 5 --new 3 --runs 1 --batch-sizes 2,4".split()


@pytest.fixture(autouse=True)
def settings_of_others() -> Any:
    """The command line sets what belongs to a process."""
    from transformers.utils import logging

    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    yield
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


def test_the_workload_is_that_of_the_rfc() -> None:
    workload = Workload(requests=7, shared=20, own=4, new=2, degree=3)
    grouped = workload.grouped(1000)
    assert [len(prompt) for prompt in grouped] == [24] * 7
    for index, prompt in enumerate(grouped):
        same = [other[:20] == prompt[:20] for other in grouped]
        assert same == [other // 3 == index // 3 for other in range(7)]
    assert len({tuple(prompt[20:]) for prompt in grouped}) == 7
    shuffled = workload.prompts(1000)
    assert shuffled != grouped and sorted(shuffled) == sorted(grouped)
    assert Workload(7, 20, 4, 2, 3, shuffle=False).prompts(1000) == grouped
    assert sorted(workload.first(4).prompts(1000)) == sorted(grouped[:4])
    assert "3 prefixes of 20 tokens, each shared by 3" in str(workload)


def test_the_table_and_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert bench.main([*SMALL, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    for words in ("hf_batchllm", "model.generate, batch", "generate_batch, shuffled", "generate_batch, sorted"):
        assert words in said
    assert "same tokens as model.generate: 6 of 6 prompts" in said
    assert "ours takes" in said and "LM head where a row samples" in said
    assert max(map(len, said.splitlines())) <= 120
    figures = json.loads(path.read_text())
    assert [row["requests"] for row in figures["contenders"]] == [6] * 4
    assert all(len(row["runs"]) == 1 and row["seconds"] > 0 for row in figures["contenders"])
    assert figures["computed_tokens"] == 2 * 40 + 6 * 5 and figures["prompt_tokens"] == 6 * 45
    assert figures["same_tokens"] == [6, 6]


def test_ours_alone_and_a_setting_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--rivals", "none", "--no-pieces", "--set", "share_prefixes=false", "--sorted"]) == 0
    said = capsys.readouterr().out
    assert "0.0% saved" in said and "generate" not in said.replace("to generate", "") and "sorted" in said


def test_a_rival_on_a_part_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--rivals", "generate", "--rival-requests", "3", "--no-pieces"]) == 0
    assert "same tokens as model.generate: 3 of 3 prompts" in capsys.readouterr().out


def test_a_rival_that_fails_is_reported_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(GenerateBatch, "run", fails)
    assert bench.main([*SMALL, "--no-pieces"]) == 0
    assert "failed: RuntimeError: out of luck" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
        (["--own", "0"], "--own at least 1"),
        (["--set", "page_size"], "NAME=VALUE"),
        (["--model", "x", "--config", "tiny"], "not allowed with"),
        (["--dtype", "int8"], "invalid choice"),
        (["--rivals", "vllm"], "'vllm' is not one of generate, generate_batch, none"),
    ],
)
def test_what_it_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert words in capsys.readouterr().err


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"llama-8b, qwen3-0\.6b, tiny"):
        load_model(None, "lama", torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_shapes_can_be_made(name: str) -> None:
    assert load_model(None, name, torch.device("meta"), torch.bfloat16).config.vocab_size


def test_the_steps_are_recorded() -> None:
    model = build("llama")
    ours = Ours(model, {"max_batch_tokens": 30})
    ours.run([[5 + index] * 10 for index in range(6)], 4)
    assert sum(size.chunk_tokens for size in ours.scheduler.sizes) == 60
    assert sum(size.samples for size in ours.scheduler.sizes) == 24
    assert ours.report is not None and len(ours.scheduler.sizes) == ours.report.steps


@pytest.mark.parametrize(("family", "products_only"), [("llama", True), ("gpt2", True), ("mixtral", False)])
def test_the_bare_pieces(family: str, products_only: bool) -> None:
    model = build(family)
    before = {name: id(value) for name, value in vars(model.config).items()}
    pieces = bare_pieces(model, [StepSize(0, 12, 1), StepSize(3, 9, 4), StepSize(4, 0, 4)])
    assert pieces.products_only == products_only
    assert min(pieces.prefill, pieces.decode, pieces.head) > 0
    assert pieces.total == pieces.prefill + pieces.decode + pieces.head
    assert {name: id(value) for name, value in vars(model.config).items()} == before


def test_larger_batches_are_tried_until_they_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 1.0, 2: 1.2, 4: 2.0, 8: 5.0, 16: 1.0}
    monkeypatch.setattr(
        "hf_batchllm.bench.contenders.timed", lambda device, work: (seconds[work.__defaults__[0]], None)
    )
    best, speeds = best_batch_size(build("llama"), [[1]] * 16, 4, [16, 8, 4, 2, 1])
    assert best == 4 and list(speeds) == [1, 2, 4, 8]
