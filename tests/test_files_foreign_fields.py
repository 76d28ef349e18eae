"""Fields of a line that seem to be meant as settings, and fields that are data."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_adapters import build as adapted
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchLLMError, run_file
from hf_batchllm.errors import InputFileError
from hf_batchllm.inputs.other_names import FROM_ELSEWHERE

SETTINGS: dict[str, Any] = {"max_new_tokens": 3, "seed": 5, "progress": False}


@pytest.fixture(scope="module")
def generator() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), word_tokenizer(97, template=True)) as made:
        yield made


def answered(gen: BatchGenerator, folder: Path, lines: list[Any], **settings: Any) -> list[dict[str, Any]]:
    text = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines)
    (folder / "in.jsonl").write_text(text)
    run_file(gen, folder / "in.jsonl", folder / "out.jsonl", **{**SETTINGS, **settings})
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_misspelt_and_foreign_settings_are_errors_of_their_line(tmp_path: Path, generator: BatchGenerator) -> None:
    near = {"adaptor": "adapter", "adapters": "adapter", "Adapter": "adapter", "temprature": "temperature"}
    near |= {"chat_template_kwarg": "chat_template_kwargs", "max_prompt_token": "max_prompt_tokens"}
    foreign = ("lora", "lora_request", "guided_json", "use_tqdm", "response_format", "random_seed", "max_model_len")
    lines = [{"prompt": "w5", name: "x"} for name in (*near, *foreign, "lora-request", "sampling_params")]
    found = answered(generator, tmp_path, [{"prompt": "w5"}, *lines])
    assert "error" not in found[0]
    said = dict(zip((*near, *foreign), (each["error"] for each in found[1:]), strict=False))
    for name, meant in near.items():
        assert f"`{name}` is not the name of a setting; did you mean `{meant}`?" in said[name]
    for name in foreign:
        assert f"`{name}` {FROM_ELSEWHERE[name]}" in said[name]
    assert "is called `adapter` here" in found[-2]["error"]
    assert "is called `settings` here" in found[-1]["error"]


def test_usual_names_of_data_are_data(tmp_path: Path, generator: BatchGenerator) -> None:
    names = ("id", "label", "text", "model", "config", "sample", "params", "documents", "adapted", "timeout", "device")
    (good,) = answered(generator, tmp_path, [{"prompt": "w5", **dict.fromkeys(names, "x")}])
    assert good["new_tokens"] == 3
    lines = [{"prompt": "w5", "lora": "x", "adaptor": None}]
    (kept,) = answered(generator, tmp_path, lines, keep="lora", restart=True)
    assert kept["lora"] == "x" and kept["new_tokens"] == 3
    (unread,) = answered(generator, tmp_path, lines, line_settings=False, restart=True)
    assert unread["new_tokens"] == 3


def test_results_name_the_adapter(tmp_path: Path) -> None:
    with BatchGenerator(copy.deepcopy(adapted("lora")), word_tokenizer(97)) as gen:
        name = next(iter(gen.model.peft_config))
        lines = [{"prompt": "w5", "adapter": name}, {"prompt": "w5", "adapter": name, "num_return_sequences": 2}]
        lines[1]["do_sample"] = True
        found = answered(gen, tmp_path, lines)
    assert [each["adapter"] for each in found] == [name, name]


@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity"])
def test_settings_of_a_line_are_finite(tmp_path: Path, generator: BatchGenerator, written: str) -> None:
    lines = [
        f'{{"prompt": "w5", "temperature": {written}}}',
        f'{{"prompt": "w5", "settings": {{"top_p": {written}}}}}',
        f'{{"prompt": "w5", "sequence_bias": [[[5], {written}]]}}',
        f'{{"prompt": "w5", "score_of_mine": {written}}}',
    ]
    *bad, good = answered(generator, tmp_path, lines)
    for each, name in zip(bad, ("temperature", "top_p", "sequence_bias"), strict=True):
        assert f"`{name}` must be a number, not {written}" in each["error"]
    assert good["new_tokens"] == 3
    body = f'{{"prompt": "w5", "temperature": {written}}}'
    request = f'{{"custom_id": "a", "url": "/v1/completions", "body": {body}}}'
    (refused,) = answered(generator, tmp_path, [request], restart=True)
    assert f"`temperature` must be a number, not {written}" in refused["response"]["body"]["error"]["message"]


def test_ranges_hold_in_lines_requests_and_calls(tmp_path: Path, generator: BatchGenerator) -> None:
    wrong: dict[str, Any] = {"top_p": 3, "min_p": -0.5, "top_k": -2, "repetition_penalty": 0}
    for name, value in wrong.items():
        (found,) = answered(generator, tmp_path, [{"prompt": "w5", "do_sample": True, name: value}], restart=True)
        assert f"line 1: `{name}` is {value}" in found["error"]
        with pytest.raises(BatchLLMError, match=f"`{name}` is {value}"):
            answered(generator, tmp_path, [{"prompt": "w5"}], do_sample=True, **{name: value})
    request = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "w5", "top_p": 3}}
    (refused,) = answered(generator, tmp_path, [request], restart=True)
    assert "`top_p` is 3: it is a probability" in refused["response"]["body"]["error"]["message"]


def test_a_prompt_that_all_lines_lack_comes_before_their_settings(tmp_path: Path, generator: BatchGenerator) -> None:
    lines: list[dict[str, Any]] = [{"question": "w5"}] * 5 + [{"question": "w5", "max_new_tokens": 0}]
    with pytest.raises(InputFileError, match="--prompt-field question"):
        answered(generator, tmp_path, lines)


def test_misspelt_prompts_get_a_hint(tmp_path: Path, generator: BatchGenerator) -> None:
    chat = [{"role": "user", "content": "w5"}]
    lines = [{"prompt": "w5"}, {"promt": "w5"}, {"message": chat}, {"Prompt": "w5"}]
    _, one, two, three = answered(generator, tmp_path, lines)
    assert "did you mean `prompt` by `promt`?" in one["error"]
    assert "did you mean `messages` by `message`?" in two["error"]
    assert "did you mean `prompt` by `Prompt`?" in three["error"]
    with pytest.raises(InputFileError, match="did you mean --prompt-field question"):
        answered(generator, tmp_path, [{"question": "w5"}], prompt_field="qestion", restart=True)


def test_messages_have_the_names_of_the_line(tmp_path: Path, generator: BatchGenerator) -> None:
    aliased, own = answered(
        generator, tmp_path, [{"prompt": "w5", "n": 2}, {"prompt": "w5", "num_return_sequences": 2}]
    )
    assert "`n` is 2" in aliased["error"]
    assert "`num_return_sequences` is 2" in own["error"]
