"""Files in, files out: what single lines may say without harm to the others."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_adapters import build as adapted
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchLLMError, run_file
from hf_batchllm.cli import main
from hf_batchllm.errors import FilesError, RunChangedError

SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "seed": 5, "progress": False}


@pytest.fixture(scope="module")
def generator() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), word_tokenizer(97, template=True)) as made:
        yield made


def answered(gen: BatchGenerator, folder: Path, lines: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run_file(gen, folder / "in.jsonl", folder / "out.jsonl", **{**SETTINGS, **settings})
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_values_that_transformers_has_no_words_for(tmp_path: Path, generator: BatchGenerator) -> None:
    lines = [
        {"prompt": "w5 w6"},
        {"prompt": "w5 w6", "exponential_decay_length_penalty": [1, 1.5]},  # there is no EOS
        {"prompt": "w5 w6", "exponential_decay_length_penalty": [1, 1.5], "eos_token_id": [7, 6000]},
        {"prompt": "w5 w6", "forced_eos_token_id": [6, 6000]},
        {"prompt": "w5", "forced_bos_token_id": 6000},
    ]
    good, *bad = answered(generator, tmp_path, lines)
    assert good["new_tokens"] == 4
    assert "settings that cannot be used" in bad[0]["error"]
    for each, name in zip(bad[1:], ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"), strict=True):
        assert f"`{name}` has token 6000, outside the model's vocabulary" in each["error"]


def test_a_corrected_line_runs_with_retry_errors(tmp_path: Path, generator: BatchGenerator) -> None:
    lines: list[dict[str, Any]] = [{"prompt": f"w{place}", "temperature": 1.0} for place in range(3, 9)]
    right = dict(lines[2])
    lines[2] = {"promt": "w5"}
    assert "error" in answered(generator, tmp_path, lines)[2]
    lines[2] = right
    with pytest.raises(RunChangedError, match=r"has an error for .*line 3.*`--retry-errors` runs"):
        answered(generator, tmp_path, lines)
    found = answered(generator, tmp_path, lines, retry_errors=True)
    (tmp_path / "once").mkdir()
    assert found == answered(generator, tmp_path / "once", lines)
    with pytest.raises(RunChangedError, match=r"has a result for .*line 2"):
        answered(generator, tmp_path, [lines[0], {"prompt": "w9"}, *lines[2:]], retry_errors=True)


def test_errors_are_counted_among_the_records_asked_for(tmp_path: Path, generator: BatchGenerator) -> None:
    lines = [{"prompt": "w5"}, {"prompt": "w6"}, {"prompt": None}]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for target, limits in {"out.jsonl": {3: 1, 2: 0}, "out.csv": {3: 1}}.items():
        for _ in range(2):
            for limit, errors in limits.items():
                report = run_file(generator, tmp_path / "in.jsonl", tmp_path / target, limit=limit, **SETTINGS)
                assert report.errors == errors


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_temperatures_that_are_no_numbers(tmp_path: Path, generator: BatchGenerator, value: float) -> None:
    with pytest.raises(BatchLLMError, match="`temperature` must be a number"):
        answered(generator, tmp_path, [{"prompt": "w5"}], temperature=value)


def test_a_command_without_stdout() -> None:
    """No file that is opened later is to have its number."""
    code = "import os, sys; from hf_batchllm.cli import main; main(['--version']); sys.exit(os.dup(0))"
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "{code}" <&- >&-'], capture_output=True, timeout=60)
    assert done.returncode > 2 and not done.stderr


def test_an_input_without_records(tmp_path: Path, generator: BatchGenerator) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    report = run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert "the input has no records" in str(report)


def test_an_interrupt_before_a_command_begins(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_batchllm.cli.run.run_parser", interrupted)
    assert main(["run", "in.jsonl", "out.jsonl", "--model", "m"]) == 130
    assert capsys.readouterr().err == "hf-batchllm: error: interrupted.\n"


def test_errors_of_openai_requests_are_in_their_words(tmp_path: Path, generator: BatchGenerator) -> None:
    wrong: list[dict[str, Any]] = [{"n": 2, "temperature": 0}, {"logit_bias": {"6000": 1}}]
    lines = [
        {"custom_id": str(place), "url": "/v1/completions", "body": {"prompt": "w5", **each}}
        for place, each in enumerate(wrong)
    ]
    found = answered(generator, tmp_path, lines)
    said = [each["response"]["body"]["error"]["message"] for each in found]
    assert "`n` is 2" in said[0] and "a `temperature` above 0" in said[0]
    assert "`logit_bias` has token 6000" in said[1]


def test_arguments_that_are_wrong_are_found_before_anything_runs(tmp_path: Path, generator: BatchGenerator) -> None:
    wrong: dict[str, list[dict[str, Any]]] = {
        "`order` must be": [{"order": "inptu"}],
        "`on_error` must be": [{"on_error": "skip"}],
        "`limit` must be": [{"limit": 0}, {"limit": -1}, {"limit": "5"}],
        "`window_bytes` must be": [{"window_bytes": "1MiB"}],
        "`generation_config` must be": [{"generation_config": {"max_new_tokens": 3}}],
        "has no field 'question'": [{"prompt_field": "question"}, {"template": "{question}"}],
        "have no such field": [{"keep": "question"}],
    }
    for said, each in wrong.items():
        for given in each:
            with pytest.raises(FilesError, match=said):
                answered(generator, tmp_path, [{"prompt": "w5"}], **given)
            assert not (tmp_path / "out.jsonl").exists()


def test_what_the_model_says_itself_is_a_setting_too(tmp_path: Path) -> None:
    with BatchGenerator(copy.deepcopy(adapted("lora")), word_tokenizer(97)) as gen:
        lines = [{"prompt": "w5"}]
        answered(gen, tmp_path, lines)
        assert answered(gen, tmp_path, lines)
        config = gen.model.generation_config
        config.repetition_penalty = 1.5
        with pytest.raises(RunChangedError, match=r"generation_config.repetition_penalty was not set and is 1.5"):
            answered(gen, tmp_path, lines)
        config.repetition_penalty = None
        answered(gen, tmp_path, lines)
        before = gen.model.active_adapters
        gen.model.set_adapter(next(name for name in gen.model.peft_config if name not in before))
        with pytest.raises(RunChangedError, match="active_adapters was"):
            answered(gen, tmp_path, lines)


def test_numbers_beyond_all_floats_come_out_as_null(tmp_path: Path, generator: BatchGenerator) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "w5", "id": 1e999, "mine": [{"x": -1e999, "y": "\\ud800"}]}\n')
    run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", keep="mine", **SETTINGS)
    text = (tmp_path / "out.jsonl").read_text()
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["id"] is None and found["mine"] == [{"x": None, "y": "\ud800"}]


def test_a_line_with_many_log_probabilities_costs_the_others_nothing(
    tmp_path: Path, generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    stream = generator.stream

    def watched(*given: Any, **options: Any) -> Any:
        asked.append(options.get("logprobs"))
        return stream(*given, **options)

    monkeypatch.setattr(generator, "stream", watched)
    lines = [{"prompt": "w5", "logprobs": count} for count in (0, 2, 90, 1)]
    found = answered(generator, tmp_path, lines)
    assert sorted(count or 0 for count in asked) == [2, 90]
    assert [len(each["logprobs"][0].get("top", [])) for each in found] == [0, 2, 90, 1]
