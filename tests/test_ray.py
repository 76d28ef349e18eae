"""A dataset on Ray: its plan, its worker and its messages without a cluster; and on a cluster of this machine."""

from __future__ import annotations

import builtins
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support_ray import Load, in_one_process, texts
from support_real_model import examples_module, small_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_batchllm import BatchConfig, BatchLLMError, ConfigError, OptionValueError
from hf_batchllm.files.records import RecordLayout
from hf_batchllm.files.templates import Template
from hf_batchllm.ray import (
    ROW,
    RowReader,
    Worker,
    checked_options,
    dataset_of_blocks,
    generate_dataset,
    how_many_blocks,
    plan_blocks,
    prompt_columns,
)

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")]
ROOT = Path(__file__).parents[1]
SAMPLED: dict[str, Any] = {"seed": 5, "do_sample": True, "temperature": 1.3, "max_new_tokens": 6}


# --- the plan -----------------------------------------------------------------------------------------------------


def planned(prompts: list[str], blocks: int, new_tokens: int = 20) -> list[list[int]]:
    made = plan_blocks([each.encode() for each in prompts], blocks, BatchConfig(), {"max_new_tokens": new_tokens})
    rows = [block.tolist() for block in made]
    assert sorted(np.concatenate(made).tolist()) == list(range(len(prompts))) and all(
        each == sorted(each) for each in rows
    )
    return rows


def letters(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices("abcdef", k=count))


def test_prompts_that_share_a_beginning_stand_in_one_block() -> None:
    blocks = planned([letters(at % 12, 200) + letters(99 + at, 20) for at in range(120)], 4)
    assert [len(rows) for rows in blocks] == [30] * 4
    assert all(len({row % 12 for row in rows}) == 3 for rows in blocks)


def test_a_group_that_is_more_than_a_block_is_parted_and_the_largest_block_comes_first() -> None:
    blocks = planned([letters(3, 200) + letters(99 + at, 40) for at in range(64)], 4)
    assert len(blocks) == 4 and max(map(len, blocks)) <= 20
    blocks = planned(["a" * 30_000, *(letters(at, 40) for at in range(30))], 3, new_tokens=1)
    assert blocks[0] == [0] and len(blocks) == 3


def test_token_ids_texts_and_chats_are_planned() -> None:
    chats = [[{"role": "system", "content": "s" * 200}, {"role": "user", "content": str(at)}] for at in range(4)]
    ids = [[5] * 64 + [at] for at in range(4)]
    layout = RecordLayout(prompt_field="prompt", line_settings=False)
    found = [RowReader(layout, ["prompt"]).beginnings(pa.table({"prompt": each})) for each in (chats, ids, ["", "ab"])]
    blocks = [rows.tolist() for rows in plan_blocks([*found[0], *found[1]], 2, BatchConfig(), {})]
    assert sorted(blocks) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found[2] == [b"", b"ab"] and len(plan_blocks(found[2], 1, BatchConfig(), {})[0]) == 2


@pytest.mark.parametrize(
    ("rows", "workers", "blocks"),
    [(3, 8, 3), (100, 8, 8), (8192, 2, 8), (100_000, 2, 32), (10_000_000, 8, 611), (1, 1, 1)],
)
def test_how_many_blocks_there_are(rows: int, workers: int, blocks: int) -> None:
    assert how_many_blocks(rows, workers) == blocks


# --- the worker ---------------------------------------------------------------------------------------------------


def worker_for(names: list[str], seed: int | None = None, config: Any = None, **options: Any) -> Worker:
    layout = RecordLayout(
        options.pop("column", None), options.pop("template", None), *options.pop("chat", (False, None)), False
    )
    asked = {"generation_config": config, **checked_options(options, config), "seed": seed}
    reader = RowReader(layout, prompt_columns(layout, names))
    return Worker(reader, (Load(), None, "cpu"), BatchConfig(), asked, seed or 0, token_ids=True)


def answered(table: pa.Table, **options: Any) -> list[dict[str, Any]]:
    """The rows in two blocks that are no neighbours."""
    worker = worker_for(table.column_names, **options)
    numbered = table.append_column(ROW, pa.array(range(table.num_rows)))
    blocks = [numbered.take(pa.array(range(first, table.num_rows, 2), pa.int64())) for first in (1, 0)]
    return pa.concat_tables([worker(block) for block in blocks]).sort_by("index").to_pylist()


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
        {"max_tokens": 5, "logits_processor": LogitsProcessorList([Barred(20)])},
        {"max_tokens": 4, "prefix_allowed_tokens_fn": lambda index, ids: [10 + index]},
        {"config": GenerationConfig(do_sample=True, max_new_tokens=4), "seed": 5},
    ],
    ids=["greedy", "sampled", "several samples", "beams", "a factory", "a list", "allowed tokens", "a config"],
)
def test_the_answers_are_those_of_one_call(options: dict[str, Any]) -> None:
    prompts = texts(16)
    found = answered(pa.table({"prompt": prompts}), **options)
    wanted = in_one_process(
        prompts, **{{"config": "generation_config"}.get(name, name): options[name] for name in options}
    )
    for row, expected in zip(found, wanted.by_prompt, strict=True):
        rows = row["samples"] if len(expected) > 1 else [row]
        for name in ("token_ids", "text", "finish_reason"):
            assert [each[name] for each in rows] == [getattr(each, name) for each in expected]
        if "num_beams" in options:
            # The calls run other beams beside each other, and float32 rounds in another way.
            assert [each["score"] for each in rows] == pytest.approx([each.score for each in expected], rel=1e-5)
        assert row["prompt_tokens"] == len(expected[0].prompt_token_ids)
        assert row.get("seed") == options.get("seed")


def test_a_bad_row_says_why_and_the_others_run() -> None:
    found = answered(pa.table({"prompt": [*texts(5), None], "id": list("abcdef")}), max_new_tokens=3)
    assert [row["error"] is None for row in found] == [True] * 5 + [False]
    assert found[5]["error"] == "row 5: has an empty `prompt`" and found[5]["text"] is None and found[5]["id"] == "f"
    found = answered(pa.table({"prompt": [[5, 6], [7, 10_000], []]}), max_new_tokens=3)
    assert found[0]["error"] is None
    assert "row 1: the prompt" in found[1]["error"] and "10000" in found[1]["error"].replace(",", "")
    assert "empty list" in found[2]["error"]


def test_columns_depend_on_the_options_alone_and_make_room_for_results() -> None:
    worker = worker_for(["prompt"], num_return_sequences=2, logprobs=1, **SAMPLED)
    tables = [pa.table({"prompt": pa.array(each, pa.string()), ROW: [0, 1]}) for each in (["ab", "cd"], [None, None])]
    good, bad = map(worker, tables)
    assert good.schema == bad.schema
    assert set(good["samples"][0].as_py()[0]["logprobs"][0]) == {"token_id", "token", "logprob", "top"}
    (row,) = answered(pa.table({"id": ["x"], "text": ["ab"], "index": [7]}), column="text", max_new_tokens=2)
    assert list(row)[:3] == ["id", "input_text", "input_index"] and (row["input_index"], row["index"]) == (7, 0)


def test_templates_and_chats() -> None:
    table = pa.table({"a": ["ab", "cd"], "b": [{"c": "ef"}, {"c": None}]})
    found = answered(table, template=Template("{a}: {b.c}"), max_new_tokens=3)
    assert found[0]["token_ids"] == in_one_process(["ab: ef"], max_new_tokens=3)[0].token_ids
    assert "row 1: has" in found[1]["error"]
    layout = RecordLayout("a", None, True, "be brief", False)
    (record, _) = RowReader(layout, ["a"]).read(table, [0, 1])
    assert [message["role"] for message in record.prompt] == ["system", "user"]  # type: ignore[union-attr]


def test_what_only_the_model_can_tell_ends_the_worker_before_any_block() -> None:
    for name in ("judge", ["a", "b"]):
        with pytest.raises(OptionValueError, match="adapter"):
            worker_for(["prompt"], adapter=name)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        worker_for(["prompt"], max_new_tokens=2, seed=3, continue_final_message=True)
    assert [str(each.message).partition(":")[0] for each in heard] == ["`seed` has no effect on greedy decoding"]


def test_a_worker_whose_device_has_failed_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts another one. Other errors are the user's to see."""

    def failing(*given: Any, **options: Any) -> None:
        raise error

    worker, ended = worker_for(["prompt"], max_new_tokens=2), []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(worker.generator, "generate", failing)
    for error in (RuntimeError("CUDA error: unspecified launch failure"), torch.OutOfMemoryError(), KeyError("mine")):
        with pytest.raises(type(error)):
            worker(pa.table({"prompt": ["ab"], ROW: [0]}))
    assert len(ended) == 1 and ended[0] != 0


# --- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_token": 5}, "did you mean `max_new_tokens`"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": "hot"}, "must be a number"),
        ({"page_size": 16}, "a field of BatchConfig"),
        ({"streamer": object()}, "many"),
        ({"prompt_logprobs": 1}, "no place in a dataset"),
        ({"on_error": "raise"}, "column `error`"),
        ({"best_of": 3}, "is not an option here"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "contradicts"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"schema": "x"}, "`schema` is not JSON"),
        ({"inputs": ["a"]}, "`inputs` is not an option here: the prompts are those of the dataset"),
        ({"adapter": ["a"]}, "`adapter` is a list: it is one value for all rows"),
        ({"config": [GenerationConfig()]}, "must be a transformers.GenerationConfig, not a list"),
    ],
)
def test_wrong_options_are_refused_without_a_model(options: dict[str, Any], said: str) -> None:
    config = options.pop("config", None)
    with pytest.raises(BatchLLMError, match=said):
        checked_options(options, config)


def test_names_from_elsewhere_are_understood() -> None:
    wanted = {"max_new_tokens": 5, "num_return_sequences": 2}
    assert checked_options({"max_tokens": 5, "n": 2, "presence_penalty": 0}, None) == wanted


@pytest.mark.parametrize(
    ("column", "template", "names", "said"),
    [
        ("promt", None, ["id", "prompt"], r"no column 'promt' \(it has id, prompt\)"),
        (None, None, ["question"], r"no column `prompt` or `messages` \(it has question\): pass prompt_column"),
        (None, None, ["prompt", "messages"], "both `prompt` and `messages`"),
        (None, "{x.y}", ["y"], "no column 'x'"),
        ("a", "{a}", ["a"], "keep one"),
    ],
)
def test_a_wrong_column_is_told_with_those_that_there_are(
    column: str | None, template: str | None, names: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        prompt_columns(RecordLayout(column, template and Template(template)), names)


def test_without_ray_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **given: Any) -> Any:
        if name.partition(".")[0] == "ray" and not (rest and rest[-1]):
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *rest, **given)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"needs Ray Data: pip install 'hf-batchllm\[ray\]'"):
        generate_dataset(None, "model", concurrency=1)  # type: ignore[arg-type]


# --- on a cluster -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray", reason="needs Ray: pip install 'hf-batchllm[ray]'")
    pytest.importorskip("ray.data")
    with pytest.MonkeyPatch.context() as patch:  # workers import the tests' own modules
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", *sys.path))))
        quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
        found.init(num_cpus=3, object_store_memory=100 << 20, **quiet)
        found.data.DataContext.get_current().enable_progress_bars = False
        yield found
        found.shutdown()


def run(ds: Any, **given: Any) -> Any:
    return generate_dataset(ds, Load(), num_gpus=0, **{"concurrency": 1, **given})


def parts(prompts: list[Any]) -> list[list[dict[str, Any]]]:
    """The rows of three files."""
    rows = [{"id": f"k{at}", "prompt": prompt} for at, prompt in enumerate(prompts)]
    return [rows[at : at + 14] for at in (0, 14, 28)]


def test_parquet_to_parquet_while_an_actor_dies(ray: Any, tmp_path: Path) -> None:
    prompts = texts()
    (tmp_path / "in").mkdir()
    for number, rows in enumerate(parts(prompts)):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / f"{number}.parquet")
    options = {"concurrency": 2, "num_gpus": 0, "blocks": 4, "num_return_sequences": 2, **SAMPLED}
    ds, marker = ray.data.read_parquet(str(tmp_path / "in")), tmp_path / "died"
    generate_dataset(ds, Load(dies=str(marker)), **options).write_parquet(str(tmp_path / "out"))
    assert marker.exists()
    found = pq.read_table(tmp_path / "out").sort_by("index").to_pylist()
    wanted = in_one_process(prompts, num_return_sequences=2, **SAMPLED)
    assert [(row["id"], row["prompt"]) for row in found] == [(f"k{at}", each) for at, each in enumerate(prompts)]
    assert [each["text"] for row in found for each in row["samples"]] == wanted.texts
    assert {row["seed"] for row in found} == {5} and not any(row["error"] for row in found)


def test_json_lines_to_json_lines_in_two_runs(ray: Any, tmp_path: Path) -> None:
    """The second run goes on after the first one, by a checkpoint of Ray's."""
    prompts, source, out = [*texts(), None], tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number, rows in enumerate(parts(prompts)):
        (source / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    context = ray.data.DataContext.get_current()
    kept = {"checkpoint_path": str(tmp_path / "done"), "delete_checkpoint_on_success": False}

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for path in sorted(out.glob("*.json*")) for line in path.read_text().splitlines()]

    def stopping(table: pa.Table) -> pa.Table:
        if list(out.glob("*.json*")):
            raise OSError("the disk is full")
        return table

    try:
        for column in ("key", "index"):
            context.checkpoint_config = ray.data.checkpoint.CheckpointConfig(id_column=column, **kept)
            with pytest.raises(OptionValueError, match=f"names the column '{column}'"):
                run(ray.data.from_items([{"prompt": "ab", "index": 1}]))
        context.checkpoint_config = ray.data.checkpoint.CheckpointConfig(id_column="id", **kept)
        made = run(ray.data.read_json(str(source), lines=True), blocks=4, **SAMPLED)
        with pytest.raises(Exception, match="the disk is full"):
            made.map_batches(stopping, batch_size=None, batch_format="pyarrow").write_json(str(out))
        first = lines()
        assert 0 < len(first) < len(prompts)
        run(ray.data.read_json(str(source), lines=True), blocks=4, **SAMPLED).write_json(str(out))
    finally:
        context.checkpoint_config = None
    found = sorted(lines(), key=lambda row: row["index"])
    assert [row["index"] for row in found] == list(range(len(prompts)))
    assert [row["text"] for row in found[:-1]] == in_one_process(prompts[:-1], **SAMPLED).texts
    assert found[-1]["error"].startswith("row 40: has an empty `prompt`")
    assert all(row in found for row in first)


def test_what_is_wrong_is_told_before_any_actor_starts(ray: Any) -> None:
    ds = ray.data.from_items([{"question": "ab"}])
    for given, error, said in (
        ({}, ConfigError, r"has no column `prompt` or `messages` \(it has question\)"),
        ({"prompt_column": "question", "max_new_tokens": 0}, OptionValueError, "max_new_tokens"),
        ({"concurrency": 0}, ConfigError, "`concurrency` is 0"),
        ({"blocks": 0}, ConfigError, "`blocks` is 0"),
        ({"ray_options": {"num_gpus": 1}}, TypeError, "multiple values.*'num_gpus'"),
        ({"seed": [1]}, OptionValueError, "`seed` is a list"),
    ):
        with pytest.raises(error, match=said):
            run(ds, **given)
    with pytest.raises(ConfigError, match="a dataset of Ray Data"):
        run([{"prompt": "ab"}])
    with pytest.raises(ConfigError, match=r"as in generate_dataset\(ds, "):
        generate_dataset(ds, Load()()[0], concurrency=1, prompt_column="question")
    assert run(ray.data.from_items([{"prompt": "ab"}]).limit(0)).count() == 0


def test_rows_are_numbered_in_the_order_of_the_source(ray: Any) -> None:
    """Whichever of them is read first; and the dataset's own settings stay as they are."""

    def slow_at_first(table: pa.Table) -> pa.Table:
        time.sleep(0.3 if table["id"][0].as_py() == 0 else 0)
        return table.append_column("prompt", pa.array(["ab"] * len(table)))

    ds = ray.data.range(12, override_num_blocks=4).map_batches(slow_at_first, batch_size=None, batch_format="pyarrow")
    rows = run(ds, blocks=3, max_new_tokens=1).take_all()
    assert sorted((row["index"], row["id"]) for row in rows) == [(at, at) for at in range(12)]
    assert not ds.context.execution_options.preserve_order
    tables = [pa.table({"id": list(range(at, at + 3))}) for at in (0, 3, 6, 9)]
    made = dataset_of_blocks(list(map(ray.put, tables)), [3] * 4, [np.array([1, 4, 11]), np.array([0])], 1)
    assert sorted((row["id"], row[ROW]) for row in made.iter_rows()) == [(at, at) for at in (0, 1, 4, 11)]


def test_the_example(ray: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "small_model", small_model)
    example = examples_module("ray_data")
    example.load, example.WORKERS = Load(), 1
    example.main()
    printed = capsys.readouterr().out
    assert "12 answers about 3 pages" in printed and "the same in one process: 12 of 12" in printed
