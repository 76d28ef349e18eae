"""Names that other libraries use for options: the same meaning in ``generate``, ``run_file``, files and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support_accelerated import word_tokenizer
from support_families import build

from hf_batchllm import BatchGenerator, accelerated, run_file
from hf_batchllm.errors import BatchLLMError, OptionValueError, UnsupportedOptionError
from hf_batchllm.files.settings import read_settings

FAMILY = "llama"
SAMPLED = {"do_sample": True, "seed": 3}


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build(FAMILY), word_tokenizer())


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_completion_tokens": 3, "min_tokens": 2}, {"max_new_tokens": 3, "min_new_tokens": 2}),
        ({"max_tokens": 3, "max_new_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_tokens": None, "max_new_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_new_tokens": 3, "n": 2, **SAMPLED}, {"max_new_tokens": 3, "num_return_sequences": 2, **SAMPLED}),
    ],
)
def test_an_alias_means_what_the_name_means(
    names: dict[str, Any], ours: dict[str, Any], generator: BatchGenerator
) -> None:
    prompts = ["w5 w6 w7", "w1"]
    expected = generator.generate(prompts, **ours)
    assert generator.generate(prompts, **names).token_ids == expected.token_ids
    streamed = sorted(generator.stream(prompts, **names), key=lambda each: (each.index, each.sample))
    assert [each.token_ids for each in streamed] == expected.token_ids
    without_seed = {name: value for name, value in names.items() if name not in SAMPLED}
    assert read_settings(without_seed) == read_settings({k: v for k, v in ours.items() if k not in SAMPLED})


@pytest.mark.parametrize(
    ("asked", "wanted"), [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 2}, 2), ({"logprobs": 2}, 2)]
)
def test_logprobs_are_asked_for_alike(
    asked: dict[str, Any], wanted: int, generator: BatchGenerator, tmp_path: Path
) -> None:
    (answer,) = generator.generate(["w5 w6"], max_tokens=2, **asked)
    assert answer.logprobs is not None and len(answer.logprobs[0]) in (wanted, wanted + 1)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "w5 w6"}))
    run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_tokens=2, **asked)
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert line["text"] == answer.text
    assert len(line["logprobs"][0].get("top", [])) == wanted


def test_no_logprobs_asked_for_by_false(generator: BatchGenerator) -> None:
    (answer,) = generator.generate([[5, 6]], max_tokens=1, logprobs=False, prompt_logprobs=True)
    assert answer.logprobs is None and answer.prompt_logprobs is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 3, "max_new_tokens": 4},
        {"n": 2, "num_return_sequences": 3},
        {"top_logprobs": 2},
        {"logprobs": 1, "top_logprobs": 2},
        {"logprobs": -1},
        {"top_logprobs": -1, "logprobs": True},
        {"do_sample": True, "temperature": 0},
        {"stop_sequences": ["x"]},
        {"max_gen_toks": 4},
        {"best_of": 2},
        {"presence_penalty": 0.5},
        {"stop_token_ids": 3},
        {"do_sample": True, "top_k": -1},
    ],
)
def test_what_is_refused_is_refused_everywhere_in_the_same_words(
    wrong: dict[str, Any], generator: BatchGenerator, tmp_path: Path
) -> None:
    with pytest.raises((OptionValueError, UnsupportedOptionError)) as in_python:
        generator.generate([[5, 6]], **wrong)
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6]}\n{"prompt": [5, 6], "settings": ' + json.dumps(wrong) + "}")
    run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_new_tokens=1)
    good, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert "error" not in good
    assert bad["error"] == f"line 2: {in_python.value}"
    if "top_k" not in wrong:  # which depends on the model's own config
        with pytest.raises(BatchLLMError) as of_the_run:
            run_file(generator, tmp_path / "in.jsonl", tmp_path / "other.jsonl", **wrong)
        assert str(of_the_run.value) == str(in_python.value)


NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repeat_penalty": 1.0,
    "best_of": 1,
    "n": 1,
    "ignore_eos": False,
    "use_beam_search": False,
    "logit_bias": {},
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "response_format": {"type": "text"},
    "stream": False,
    "echo": False,
    "lora_request": None,
}


def test_a_value_that_asks_for_nothing_passes_at_every_door(generator: BatchGenerator, tmp_path: Path) -> None:
    (expected,) = generator.generate(["w5 w6"], max_tokens=3)
    assert generator.generate(["w5 w6"], max_tokens=3, **NEUTRAL)[0].token_ids == expected.token_ids
    lines = [{"prompt": "w5 w6", **NEUTRAL}, {"prompt": "w5 w6", "settings": NEUTRAL}]
    body = {"model": "m", "prompt": "w5 w6", "max_tokens": 3, **NEUTRAL}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "batch.jsonl").write_text(json.dumps(request))
    (tmp_path / "in.csv").write_text("prompt,presence_penalty,best_of,ignore_eos\nw5 w6,0,1.0,False\n")
    run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_tokens=3, **NEUTRAL)
    run_file(generator, tmp_path / "in.csv", tmp_path / "table.jsonl", max_tokens=3)
    run_file(generator, tmp_path / "batch.jsonl", tmp_path / "batch_out.jsonl")
    for name in ("out.jsonl", "table.jsonl"):
        for line in (tmp_path / name).read_text().splitlines():
            assert json.loads(line).get("text") == expected.text, line
    (answer,) = map(json.loads, (tmp_path / "batch_out.jsonl").read_text().splitlines())
    assert answer["response"]["body"]["choices"][0]["text"] == expected.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", False),
        ("frequency_penalty", "0"),
        ("best_of", True),
        ("logit_bias", {3: 1.0}),
        ("response_format", {"type": "json_object"}),
        ("use_beam_search", True),
        ("stream", True),
    ],
)
def test_a_value_that_asks_for_something_is_refused(name: str, value: Any, generator: BatchGenerator) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"`{name}` is"):
        generator.generate([[5, 6]], max_tokens=1, **{name: value})


def test_an_accelerated_generate_takes_what_generate_takes() -> None:
    """A call of ``model.generate`` that transformers refuses is refused by it under ``accelerated``, too."""
    model = build(FAMILY)
    with accelerated(model), pytest.raises(ValueError, match="max_tokens"):
        model.generate(torch.tensor([[5, 6]]), max_tokens=2)
    with accelerated(model), pytest.raises(ValueError, match="presence_penalty"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, presence_penalty=0.0)


def test_end_tokens_mean_the_same_in_lines_runs_and_requests(generator: BatchGenerator, tmp_path: Path) -> None:
    def texts(source: str, lines: list[Any], **settings: Any) -> list[Any]:
        (tmp_path / source).write_text("".join(json.dumps(line) + "\n" for line in lines))
        run_file(generator, tmp_path / source, tmp_path / f"out_{source}", **settings)
        return [json.loads(line) for line in (tmp_path / f"out_{source}").read_text().splitlines()]

    free = generator.generate(["w5 w6"], max_tokens=8)[0]
    asked = {"stop_token_ids": [free.token_ids[2]]}
    (cut,) = generator.generate(["w5 w6"], max_tokens=8, **asked)
    assert len(cut.token_ids) < len(free.token_ids)
    lines = [{"prompt": "w5 w6", **asked}, {"prompt": "w5 w6", "settings": asked}, {"prompt": "w5 w6"}]
    found = texts("lines.jsonl", lines, max_tokens=8)
    assert [line["text"] for line in found] == [cut.text, cut.text, free.text]
    off = {"prompt": "w5 w6", "stop_token_ids": []}
    found = texts("run.jsonl", [{"prompt": "w5 w6"}, off], max_tokens=8, **asked)
    assert [line["text"] for line in found] == [cut.text, free.text]
    ends = {"prompt": "w5 w6", "eos_token_id": asked["stop_token_ids"]}
    found = texts("eos.jsonl", [ends, {"prompt": "w5 w6", "ignore_eos": False}], max_tokens=8, ignore_eos=True)
    assert [line["text"] for line in found] == [cut.text, free.text]

    def request(name: str, **body: Any) -> dict[str, Any]:
        body = {"prompt": "w5 w6", "max_tokens": 8, **body}
        return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}

    wrong = {"structural_tag": {}, "bad_words": ["x"], "truncate_prompt_tokens": -1, "stop_token_ids": ["x"]}
    requests = [request("a", **asked), request("b", ignore_eos=True)]
    requests += [request(name, **{name: value}) for name, value in wrong.items()]
    served, ignored, *refused = (line["response"]["body"] for line in texts("batch.jsonl", requests))
    assert served["choices"][0]["finish_reason"] == "stop"
    assert ignored["choices"][0]["text"] == free.text
    said = [each["error"]["message"] for each in refused]
    words = (
        "`structural_tag` is not supported",
        "pass --set bad_words_ids=... for the whole file",
        "`truncate_prompt_tokens` must be",
    )
    for message, each in zip(said, (*words, "`stop_token_ids` must be a list of token ids"), strict=True):
        assert each in message
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [5]}')
    with pytest.raises(BatchLLMError, match=r"it has prompt_token_ids.*: name its field with --prompt-field"):
        run_file(generator, tmp_path / "ids.jsonl", tmp_path / "no.jsonl", max_tokens=1)


def test_no_top_logprobs_ask_for_nothing(generator: BatchGenerator) -> None:
    assert generator.generate([[5, 6]], max_tokens=1, top_logprobs=0)[0].logprobs is None
