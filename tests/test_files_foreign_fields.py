"""Fields of a line that seem to be meant as settings, and fields that are data."""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_adapters import build as adapted
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchLLMError, run_file
from hf_batchllm.errors import InputFileError, OutputFileError
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
    for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):  # transformers would take all memory
        (found,) = answered(generator, tmp_path, [{"prompt": "w5", name: 10**9}], restart=True)
        assert f"line 1: `{name}` is 1,000,000,000" in found["error"]
        with pytest.raises(BatchLLMError, match=f"`{name}` is 1,000,000,000.* at most 1,000"):
            generator.generate(["w5"], **{name: 10**9})
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


def warned_of(folder: Path, lines: list[Any], **settings: Any) -> list[str]:
    made = BatchGenerator(build("llama"), word_tokenizer(97, template=True))
    with made, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        answered(made, folder, lines, **settings)
    return [str(each.message) for each in warned]


def test_idle_options_of_chats_name_their_lines(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w5"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [
        {"messages": chat, "tools": tools},
        {"prompt": "w5", "tools": tools},
        {"messages": chat, "chat_template_kwargs": {"enable_thinkin": False}},
    ]
    said = warned_of(tmp_path, lines)
    assert "`tools` is for chats, and line 2 is no chat: no effect there" in said
    assert any("`enable_thinkin` in the chat_template_kwargs of line 3 has no effect" in each for each in said)


def test_options_for_all_lines_are_not_called_idle(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [{"messages": [{"role": "user", "content": "w5"}]}, {"prompt": "w5"}]
    assert not [each for each in warned_of(tmp_path, lines, tools=tools) if "is for chats" in each]


def test_a_field_that_may_be_data_is_told_how_to_stay_data(tmp_path: Path, generator: BatchGenerator) -> None:
    hint = " (if `n` is a field of your own data: --no-line-settings)"
    lines = answered(generator, tmp_path, [{"prompt": "w5", "n": 2}, {"prompt": "w5", "n": "a"}])
    assert lines[0]["error"].startswith("line 1: `n` is 2, and greedy decoding") and lines[0]["error"].endswith(hint)
    assert lines[1]["error"] == f"line 2: `n` must be a whole number, not 'a'{hint}"


def test_an_empty_prompt_is_named_by_its_line(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(bos=True)
    (tmp_path / "in.jsonl").write_text('no json\n{"prompt": "w5"}\n{"prompt": ""}\n')
    with pytest.warns(UserWarning, match="the prompt of line 3 is an empty string"):
        run_file(BatchGenerator(build("llama"), tokenizer), tmp_path / "in.jsonl", tmp_path / "o.jsonl", **SETTINGS)


def test_renamed_results_need_their_record(tmp_path: Path, generator: BatchGenerator) -> None:
    answered(generator, tmp_path, [{"prompt": "w5"}])
    (tmp_path / "out.jsonl").rename(tmp_path / "new.jsonl")
    with pytest.raises(OutputFileError, match=r"If you renamed the results, rename their \.run\.json, too"):
        run_file(generator, tmp_path / "in.jsonl", tmp_path / "new.jsonl", **SETTINGS)


def test_seconds_are_those_of_the_whole_run_without_loading(
    tmp_path: Path, generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing, and all else beside the model, counts."""
    tokenizer = generator.tokenizer
    real = type(tokenizer).__call__

    def slow(self: Any, *given: Any, **named: Any) -> Any:
        time.sleep(0.3)
        return real(self, *given, **named)

    monkeypatch.setattr(type(tokenizer), "__call__", slow)
    (tmp_path / "in.jsonl").write_text('{"prompt": "w5"}\n')
    began = time.perf_counter()
    report = run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", **SETTINGS)
    assert 0.3 <= report.seconds <= time.perf_counter() - began
