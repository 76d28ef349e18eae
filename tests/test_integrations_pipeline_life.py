"""``pipeline("batch-text-generation")``: what it says of wrong inputs, and what it leaves behind."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from support_accelerated import TEXTS, word_tokenizer
from support_families import REFUSED, build
from support_letter_tokenizers import letter_tokenizer
from support_pipelines import CHATS, GREEDY, Texts, made
from support_pipelines import pipe as pipe  # fixtures
from support_pipelines import stock as stock
from transformers import GenerationConfig, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_batchllm import (
    BatchConfig,
    BatchGenerator,
    ConfigError,
    GenerationInterrupted,
    GeneratorBusyError,
    PromptError,
    PromptsTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_batchllm.integrations.pipeline import BatchTextGenerationPipeline
from hf_batchllm.model.runner import ModelRunner

# -- what is wrong, in the user's words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "prompts is an int"),
        (None, "prompts is None"),
        (b"w5", "decode them first"),
        ({"text": TEXTS}, "pass its value for 'text'"),
        (torch.tensor([1, 2]), "BatchGenerator"),
        ([5, 6], "BatchGenerator"),
        (datasets.Dataset.from_dict({"text": TEXTS}), r"prompts\['text'\]"),
        (pd.DataFrame({"text": TEXTS}), r"prompts\['text'\]"),
    ],
)
def test_what_is_no_list_of_prompts(pipe: Any, given: Any, says: str) -> None:
    with pytest.raises(PromptsTypeError, match=says):
        pipe(given)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (3, "is an int; a prompt is a string or a chat"),
        (None, "is None"),
        (float("nan"), "is NaN"),
        ({"text": "w5"}, "pass its value for 'text'"),
        ([5, 6], "BatchGenerator"),
        ([], "is a list"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ("", "no BOS token to begin from"),
        ("w5 \ud800", "half a character"),
        ([{"role": "assistant", "tool_calls": []}], "transformers' pipelines do not take"),
    ],
)
def test_bad_prompts_are_named_by_their_places(stock: Any, pipe: Any, bad: Any, says: str) -> None:
    given = ["w5", "w6", bad, "w7"]
    for inputs in (given, iter(given)):
        with pytest.raises(PromptError, match=says) as caught:
            list(pipe(inputs, **GREEDY))
        assert list(caught.value.problems) == [2]
    good = [stock(text, **GREEDY) for text in ("w5", "w6", "w7")]
    for inputs in (given, iter(given)):
        got = list(pipe(inputs, on_error="record", **GREEDY))
        assert got[:2] + got[3:] == good
        assert [set(record) for record in got[2]] == [{"generated_text", "error"}]
        assert got[2][0]["generated_text"] is None
    call = {"num_return_sequences": 2, "return_tensors": True, "seed": 1, "max_new_tokens": 2}
    records = pipe(given, on_error="record", **call)[2]
    assert [record["generated_token_ids"] for record in records] == [None, None]


def test_rows_of_a_dataset_are_looked_at_too(stock: Any, pipe: Any) -> None:
    with pytest.raises(PromptError, match="prompt 1 is a dict; pass its value for 'text'"):
        list(pipe(Texts(["w5", {"text": "w6"}])))
    assert list(pipe(Texts(CHATS), **GREEDY)) == stock(CHATS, **GREEDY)
    assert pipe(KeyDataset([], "text")) == []
    assert pipe([3, None], on_error="record", **GREEDY)[1][0]["error"].startswith("is None")


def test_an_iterator_that_fails_says_at_which_prompt(pipe: Any) -> None:
    def failing() -> Iterator[str]:
        yield from TEXTS
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        list(pipe(failing()))
    assert "prompt 3" in caught.value.__notes__[0]


def test_several_bad_prompts_come_together(pipe: Any) -> None:
    pipe.tokenizer = letter_tokenizer()
    with pytest.raises(PromptError) as caught:
        pipe([CHATS[0], "ab", 3], **GREEDY)
    assert list(caught.value.problems) == [0, 2]
    assert "the tokenizer has no chat template" in caught.value.problems[0]
    assert isinstance(caught.value.__cause__, ValueError)  # what the tokenizer said


def test_misspelt_and_misplaced_options(pipe: Any) -> None:
    with pytest.raises(ConfigError, match="`kv_memroy` is not a field of BatchConfig; did you mean `kv_memory`"):
        made("batch-text-generation", kv_memroy="2GiB")
    with pytest.raises(ConfigError, match="`kv_memory` must be a size"):
        made("batch-text-generation", kv_memory="2 potatoes")
    with pytest.raises(ConfigError, match="`batch_config` must be a BatchConfig, not a dict"):
        made("batch-text-generation", batch_config={"page_size": 8})
    with pytest.raises(UnsupportedOptionError, match="did you mean `max_new_tokens`"):
        made("batch-text-generation", max_new_tokenz=3)
    with pytest.raises(UnsupportedOptionError, match="did you mean `max_new_tokens`"):
        pipe(TEXTS, max_new_tokenz=3)
    for name, near in (("return_full_texts", "return_full_text"), ("tokenizer_kwargs", "tokenizer_encode_kwargs")):
        with pytest.raises(UnsupportedOptionError, match=f"`{name}` is not an option of .*did you mean `{near}`"):
            made("batch-text-generation", **{name: True})
        with pytest.raises(UnsupportedOptionError, match=f"`{name}` is not an option of .*did you mean `{near}`"):
            pipe(TEXTS, **{name: True})
    with pytest.raises(ConfigError, match="did you mean `kv_memory`"):
        pipe(TEXTS, kv_memroy="2GiB")
    for config, says in (([GenerationConfig()] * 3, "a pipeline takes one"), ({"max_new_tokens": 3}, "not a dict")):
        with pytest.raises(UnsupportedOptionError, match=f"`generation_config` .*{says}"):
            made("batch-text-generation", generation_config=config)
        with pytest.raises(UnsupportedOptionError, match=f"`generation_config` .*{says}"):
            pipe(TEXTS, generation_config=config)
    with pytest.raises(ConfigError, match="`page_size` is set when the pipeline is made"):
        pipe(TEXTS, page_size=8)
    with pytest.raises(UnsupportedOptionError, match="`trust_remote_code`"):
        pipe(TEXTS, trust_remote_code=True)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(UnsupportedOptionError, match=f"`{name}` has no place"):
            pipe(TEXTS, **{name: 1})
    with pytest.raises(UnsupportedOptionError, match="`output_scores`"):
        pipe(TEXTS, return_dict_in_generate=True, output_scores=True)


def test_a_model_that_is_not_supported_is_refused_when_the_pipeline_is_made() -> None:
    with pytest.raises(UnsupportedModelError):
        made("batch-text-generation", model=REFUSED["falcon"]())


# -- its life --------------------------------------------------------------------------------------------------


def test_settings_are_those_of_a_batch_generator() -> None:
    pipe = made("batch-text-generation", batch_config=BatchConfig(page_size=8), kv_memory="2MiB", seed=3)
    assert pipe.task == "batch-text-generation"
    pipe(TEXTS, max_new_tokens=2)
    assert pipe.last_report.kv_memory <= 2 << 20
    assert pipe.last_report.seed == 3
    assert BatchTextGenerationPipeline(pipe.model, pipe.tokenizer, device="cpu").task == "batch-text-generation"


def test_closed_it_says_so() -> None:
    pipe = made("batch-text-generation", keep_prefixes=1)
    with pipe:
        pipe(TEXTS, **GREEDY)
    for call in (lambda: pipe(TEXTS), lambda: pipe.plan(TEXTS)):
        with pytest.raises(GeneratorBusyError, match="this pipeline is closed"):
            call()


def test_a_broken_off_iterator_leaves_everything_usable(stock: Any, pipe: Any) -> None:
    expected = stock(TEXTS, **GREEDY)
    for _ in pipe(iter(TEXTS), **GREEDY):
        break
    assert pipe(TEXTS, **GREEDY) == expected
    results = pipe(iter(TEXTS), **GREEDY)
    assert next(results) == expected[0]
    with pytest.raises(GeneratorBusyError, match="a stream is still open"):
        pipe(TEXTS, **GREEDY)
    assert stock(TEXTS[0], **GREEDY) == expected[0]  # between two steps the model is its owner's
    results.close()
    assert list(results) == []
    assert pipe(TEXTS, **GREEDY) == expected
    dataset = pipe(Texts(TEXTS), **GREEDY)
    for _ in dataset:
        break
    assert list(dataset) == expected


def test_an_interrupt_hands_out_what_had_finished(stock: Any, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = ModelRunner.step, itertools.count()

    def interrupted(self: ModelRunner, *args: Any) -> Any:
        if next(steps) == 4:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(ModelRunner, "step", interrupted)
    configs = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=list(range(20)), pad_token_id=0)
    with pytest.raises(GenerationInterrupted) as caught:
        pipe(TEXTS, generation_config=configs)
    monkeypatch.undo()
    result = caught.value.result
    assert 0 < len(result) < 3
    assert "BatchGenerator" not in caught.value._render_traceback_()[1]
    assert pipe(TEXTS, generation_config=configs) == stock(TEXTS, generation_config=configs)
    whole = BatchGenerator(pipe.model, pipe.tokenizer).generate(TEXTS, configs)
    assert all(row == whole[row.index] for row in result)  # with its text


def test_an_interrupt_while_texts_are_made(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipe, "postprocess", interrupted)
    with pytest.raises(GenerationInterrupted) as caught:
        pipe(TEXTS, **GREEDY)
    assert len(caught.value.result.texts) == 3 and all(caught.value.result.texts)
    where = caught.value._render_traceback_()[1]  # shown in a notebook
    assert "sys.last_value.result" in where and "BatchGenerator" not in where


def test_what_is_saved_is_what_the_stock_pipeline_saves(stock: Any, pipe: Any, tmp_path: Path) -> None:
    pipe(TEXTS, **GREEDY)
    for name, each in (("stock", stock), ("ours", pipe)):
        each.save_pretrained(tmp_path / name)
    files = {name: {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("stock", "ours")}
    assert files["ours"] == files["stock"]
    assert "custom_pipelines" not in json.loads(files["ours"]["config.json"])
    assert not hasattr(pipe.model.config, "custom_pipelines")
    saved = pipeline("batch-text-generation", model=str(tmp_path / "ours"), device="cpu")
    assert saved(TEXTS, **GREEDY) == stock(TEXTS, **GREEDY)


def test_copies_and_another_model(stock: Any, pipe: Any) -> None:
    expected = stock(TEXTS, **GREEDY)
    for each in (copy.copy(pipe), copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert each(TEXTS, **GREEDY) == expected
    pipe.model = build("llama")
    assert pipe(TEXTS, **GREEDY) == made("text-generation", model=build("llama"))(TEXTS, **GREEDY) != expected
    assert sorted(vars(pipe.model)) == sorted(vars(build("llama")))


def test_postprocess_and_preprocess_may_be_ones_own(stock: Any) -> None:
    class Counted(BatchTextGenerationPipeline):
        def preprocess(self, prompt_text: Any, **options: Any) -> Any:
            return super().preprocess(f"w9 {prompt_text}", **options)

        def postprocess(self, *args: Any, **options: Any) -> Any:
            return len(super().postprocess(*args, **options))

    pipe = Counted(model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    assert pipe(TEXTS, **GREEDY) == [1, 1, 1]
    assert pipe.last_report.prompt_tokens == 12 + 3


@pytest.mark.parametrize("name", ["forward", "_forward", "get_inference_context"])
def test_methods_around_the_model_may_not(pipe: Any, name: str) -> None:
    def own(*args: Any, **options: Any) -> Any:
        return getattr(BatchTextGenerationPipeline, name)(*args, **options)

    with pytest.raises(UnsupportedModelError, match=f"Own has a `{name}` of its own, which would not run"):
        type("Own", (BatchTextGenerationPipeline,), {name: own})(
            model=pipe.model, tokenizer=word_tokenizer(), device="cpu"
        )
    setattr(pipe, name, own)
    with pytest.raises(UnsupportedModelError, match=f"has a `{name}` of its own"):
        pipe(TEXTS, **GREEDY)
