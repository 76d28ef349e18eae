"""What a dataset's call on Ray is made of, without a cluster: the plan, the worker, options and columns."""

from __future__ import annotations

import builtins
import random
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support_ray import Load, in_one_process, texts
from transformers import GenerationConfig, LogitsProcessor

from hf_batchllm import BatchConfig, ConfigError, OptionValueError, UnsupportedOptionError
from hf_batchllm.files.records.prompt_records import RecordLayout
from hf_batchllm.files.records.templates import Template
from hf_batchllm.ray import generate_dataset
from hf_batchllm.ray.call_options import checked_options, expected_answers, taken_columns
from hf_batchllm.ray.plan_rows import blocks_of_rows, how_many_blocks, words_of
from hf_batchllm.ray.rows import ROW, reader_of
from hf_batchllm.ray.worker import Worker, WorkerCall

# --- the plan -----------------------------------------------------------------------------------------------------


def planned(prompts: list[Any], blocks: int, new_tokens: int = 20, **fields: Any) -> list[list[int]]:
    words = [words_of(prompt) for prompt in prompts]
    made = blocks_of_rows(words, new_tokens=new_tokens, samples=1, blocks=blocks, config=BatchConfig(**fields))
    assert sorted(np.concatenate(made).tolist()) == list(range(len(prompts)))
    return [rows.tolist() for rows in made]


def groups_of(prompts: list[str], blocks: list[list[int]]) -> list[int]:
    """Of each beginning, in how many blocks it is."""
    return [
        sum(any(prompts[row][:200] == beginning for row in rows) for rows in blocks)
        for beginning in {prompt[:200] for prompt in prompts}
    ]


def test_prompts_that_share_a_beginning_stand_in_one_block() -> None:
    rng = random.Random(3)
    beginnings = ["".join(rng.choices("abcdef", k=200)) for _ in range(12)]
    prompts = [beginnings[at % 12] + "".join(rng.choices("ghij", k=20)) for at in range(120)]
    blocks = planned(prompts, 4)
    assert [len(rows) for rows in blocks] == [30] * 4
    assert groups_of(prompts, blocks) == [1] * 12


def test_a_group_that_is_more_than_a_block_is_parted() -> None:
    rng = random.Random(3)
    beginning = "".join(rng.choices("abcdef", k=200))
    prompts = [beginning + "".join(rng.choices("ghij", k=40)) for _ in range(64)]
    blocks = planned(prompts, 4)
    assert len(blocks) == 4 and max(map(len, blocks)) <= 20


def test_the_largest_block_comes_first() -> None:
    prompts = ["a" * 30_000, *("".join(random.Random(at).choices("abcdef", k=40)) for at in range(30))]
    blocks = planned(prompts, 3, new_tokens=1)
    assert blocks[0] == [0] and len(blocks) == 3


def test_rows_have_their_order_in_a_block() -> None:
    assert all(rows == sorted(rows) for rows in planned(texts(), 3))


def test_token_ids_texts_and_chats_are_planned() -> None:
    chats = [[{"role": "system", "content": "s" * 200}, {"role": "user", "content": str(at)}] for at in range(4)]
    ids = [[5] * 64 + [at] for at in range(4)]
    assert planned([*chats, *ids], 2) in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[4, 5, 6, 7], [0, 1, 2, 3]])
    assert [len(words_of(each)) for each in ("", "abcd", "abcde", [1, 2, 3])] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "workers", "blocks"),
    [(3, 8, 3), (100, 8, 8), (8192, 2, 8), (100_000, 2, 32), (10_000_000, 8, 611), (1, 1, 1)],
)
def test_how_many_blocks_there_are(rows: int, workers: int, blocks: int) -> None:
    assert how_many_blocks(rows, workers) == blocks


# --- the worker ---------------------------------------------------------------------------------------------------


def answered(table: pa.Table, layout: RecordLayout | None = None, **options: Any) -> pa.Table:
    """The rows in two blocks that are no neighbours."""
    reader = reader_of(layout or RecordLayout(prompt_field="prompt", line_settings=False), table.column_names)
    seed = options.pop("seed", None)
    asked, token_ids = checked_options(options, None), True
    worker = Worker(
        WorkerCall(Load(), None, BatchConfig(), "cpu", reader, None, asked, seed or 0, token_ids, seed is not None)
    )
    numbered = table.append_column(ROW, pa.array(range(table.num_rows)))
    blocks = [numbered.take(pa.array(range(first, table.num_rows, 2), pa.int64())) for first in (1, 0)]
    return pa.concat_tables([worker(block) for block in blocks]).sort_by("index")


SAMPLED: dict[str, Any] = {"seed": 5, "do_sample": True, "temperature": 1.3, "max_new_tokens": 6}


class Barred(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        scores[:, self.token :] = -float("inf")
        return scores


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 6},
        SAMPLED,
        {**SAMPLED, "num_return_sequences": 3},
        {"num_beams": 3, "max_new_tokens": 4},
        {"max_tokens": 5, "logits_processor": lambda index, ids: [Barred(20 + index)]},
        {"max_tokens": 4, "prefix_allowed_tokens_fn": lambda index, ids: [10 + index]},
    ],
    ids=["greedy", "sampled", "several samples", "beams", "a factory", "allowed tokens"],
)
def test_the_answers_are_those_of_one_call(options: dict[str, Any]) -> None:
    prompts = texts(16)
    found = answered(pa.table({"prompt": prompts}), **options).to_pylist()
    wanted = in_one_process(prompts, **options)
    samples = options.get("num_return_sequences", 1)
    for number, row in enumerate(found):
        rows = row["samples"] if samples > 1 else [row]
        expected = wanted[number * samples : (number + 1) * samples]
        assert [each["token_ids"] for each in rows] == [each.token_ids for each in expected]
        assert [each["text"] for each in rows] == [each.text for each in expected]
        assert [each["finish_reason"] for each in rows] == [each.finish_reason for each in expected]
        if "num_beams" in options:
            # The calls run other beams beside each other, and float32 rounds in another way.
            assert [each["score"] for each in rows] == pytest.approx([each.score for each in expected], rel=1e-5)
        assert row["prompt_tokens"] == len(expected[0].prompt_token_ids)
        assert row.get("seed") == (5 if "do_sample" in options else None)


def test_a_bad_row_says_why_and_the_others_run() -> None:
    prompts = [*texts(5), None]
    table = pa.table({"prompt": prompts, "id": list("abcdef")})
    found = answered(table, max_new_tokens=3).to_pylist()
    assert [row["error"] is None for row in found] == [True] * 5 + [False]
    assert found[5]["error"].startswith("row 5: has nothing in 'prompt'")
    assert found[5]["text"] is None and found[5]["id"] == "f"
    ids = pa.table({"prompt": [[5, 6], [7, 10_000], []]})
    found = answered(ids, max_new_tokens=3).to_pylist()
    assert found[0]["error"] is None
    assert "row 1: the prompt" in found[1]["error"] and "10000" in found[1]["error"].replace(",", "")
    assert "empty list" in found[2]["error"]


def test_all_blocks_have_the_same_columns() -> None:
    options: dict[str, Any] = {"num_return_sequences": 2, "logprobs": 1, **SAMPLED}
    good = answered(pa.table({"prompt": ["ab", "cd"]}), **options)
    bad = answered(pa.table({"prompt": pa.array([None, None], pa.string())}), **options)
    assert good.schema == bad.schema
    assert set(good["samples"][0].as_py()[0]["logprobs"][0]) == {"token_id", "token", "logprob", "top"}


def test_columns_are_kept_and_make_room_for_results() -> None:
    table = pa.table({"id": ["x"], "text": ["ab"], "index": [7]})
    found = answered(table, layout=RecordLayout(prompt_field="text", line_settings=False), max_new_tokens=2)
    assert found.column_names[:3] == ["id", "input_text", "input_index"]
    assert found["input_index"].to_pylist() == [7] and found["index"].to_pylist() == [0]


def test_templates_and_chats() -> None:
    table = pa.table({"a": ["ab", "cd"], "b": [{"c": "ef"}, {"c": None}]})
    layout = RecordLayout(template=Template("{a}: {b.c}"), line_settings=False)
    found = answered(table, layout=layout, max_new_tokens=3).to_pylist()
    assert found[0]["token_ids"] == in_one_process(["ab: ef"], max_new_tokens=3)[0].token_ids
    assert "row 1: has" in found[1]["error"]


def test_an_option_that_the_model_refuses_ends_the_worker_before_any_block() -> None:
    reader = reader_of(RecordLayout(prompt_field="prompt"), ["prompt"])
    asked = checked_options({"adapter": "judge"}, None)
    with pytest.raises(ValueError, match="adapter"):
        Worker(WorkerCall(Load(), None, BatchConfig(), "cpu", reader, None, asked, 0, False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_without_its_gpu_says_so() -> None:
    reader = reader_of(RecordLayout(prompt_field="prompt"), ["prompt"])
    with pytest.raises(ConfigError, match=r"PyTorch sees none.*num_gpus=0"):
        Worker(WorkerCall(Load(), None, BatchConfig(), "cuda", reader, None, {}, 0, False))


def test_a_worker_whose_device_has_failed_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts another one. Other errors are the user's to see."""
    table = pa.table({"prompt": ["ab"], ROW: [0]})
    reader = reader_of(RecordLayout(prompt_field="prompt"), ["prompt"])
    worker = Worker(
        WorkerCall(Load(), None, BatchConfig(), "cpu", reader, None, {"max_new_tokens": 2}, 0, False, False)
    )
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    for error in (RuntimeError("CUDA error: unspecified launch failure"), torch.OutOfMemoryError(), KeyError("mine")):
        monkeypatch.setattr(worker._gen, "generate", raising(error))
        with pytest.raises(type(error)):
            worker(table)
    assert len(ended) == 1 and ended[0] != 0


def raising(error: Exception) -> Any:
    def call(*given: Any, **options: Any) -> None:
        raise error

    return call


def test_sampling_that_was_not_asked_for_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="`seed` has no effect on greedy decoding"):
        answered(pa.table({"prompt": ["ab"]}), max_new_tokens=2, seed=3)


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_token": 5}, "did you mean `max_new_tokens`"),
        ({"max_new_tokens": 0}, "greater than 0"),
        ({"temperature": "hot"}, "must be a number"),
        ({"page_size": 16}, r"config=BatchConfig\(page_size=...\)"),
        ({"adapter": ["a", "b"]}, "one value for all rows"),
        ({"streamer": object()}, "many"),
        ({"prompt_logprobs": 1}, "no place in a dataset"),
        ({"on_error": "raise"}, "column `error`"),
        ({"best_of": 3}, "is not an option here"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "contradicts"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"regex": ["a", "b"]}, "`regex` is a list: it is one value for all rows"),
        ({"schema": "x"}, "`schema` is not JSON"),
    ],
)
def test_wrong_options_are_refused_without_a_model(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        checked_options(options, None)


def test_names_from_elsewhere_are_understood() -> None:
    assert checked_options({"max_tokens": 5, "n": 2, "presence_penalty": 0}, None) == {
        "max_new_tokens": 5,
        "num_return_sequences": 2,
    }
    with pytest.raises(OptionValueError, match="one GenerationConfig for all rows"):
        checked_options({}, [GenerationConfig()])


def test_the_plan_reckons_with_the_length_of_answers() -> None:
    assert expected_answers({}, None) == (20, 1)
    assert expected_answers({"max_new_tokens": 7}, GenerationConfig(max_new_tokens=9, num_beams=4)) == (7, 4)


# --- columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "names", "said"),
    [
        (RecordLayout(prompt_field="promt"), ["id", "prompt"], r"no column 'promt' \(it has id, prompt\).*'prompt'"),
        (RecordLayout(), ["question"], r"no column `prompt` or `messages` \(it has question\): pass prompt_column"),
        (RecordLayout(), ["prompt", "messages"], "both `prompt` and `messages`"),
        (RecordLayout(template=Template("{x.y}")), ["y"], "no column 'x'"),
        (RecordLayout(prompt_field="a", template=Template("{a}")), ["a"], "keep one"),
    ],
)
def test_a_wrong_column_is_told_with_those_that_there_are(layout: RecordLayout, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reader_of(layout, names)


def test_the_column_of_a_checkpoint_stays() -> None:
    taken_columns(["id"], "id")
    taken_columns(["id"], None)
    with pytest.raises(OptionValueError, match="no such column"):
        taken_columns(["id"], "key")
    with pytest.raises(OptionValueError, match="becomes 'input_index'"):
        taken_columns(["index"], "index")


def test_without_ray_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **given: Any) -> Any:
        if name.partition(".")[0] == "ray" and not (rest and rest[0] and rest[-1]):
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *rest, **given)

    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"needs Ray Data: pip install 'hf-batchllm\[ray\]'"):
        generate_dataset(None, "model", concurrency=1)  # type: ignore[arg-type]
