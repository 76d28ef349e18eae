"""Results as tables: a DataFrame, lines of JSON, a dataset."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build
from support_html import CHAT, GIVEN, that_chats

from hf_batchllm import BatchGenerator, BatchResult, Generation, ScoreResult

pd = pytest.importorskip("pandas")

COLUMNS = "prompt text finish_reason index sample prompt_tokens new_tokens error token_ids prompt_token_ids".split()
SCORES = "context text logprob mean_logprob is_greedy index choice tokens error logprobs token_ids".split()
PROMPTS = [[5, 6, 7], [5, 6, 8, 9], [5]]


@pytest.fixture(scope="module")
def result() -> BatchResult:
    return that_chats().generate(GIVEN, max_new_tokens=4)


def dtypes(table: Any) -> dict[str, str]:
    return {name: str(dtype) for name, dtype in table.dtypes.items()}


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_row_for_each_generation(result: BatchResult) -> None:
    table = result.to_pandas()
    assert list(table.columns) == COLUMNS and list(result.to_pandas(ids=False).columns) == COLUMNS[:-2]
    assert list(table.index) == list(range(len(GIVEN))) and table["prompt"].tolist() == ["w3 w4 w5", CHAT, None, "w8"]
    for place, row in enumerate(table.itertuples()):
        generation = result[place]
        assert (row.index, row.sample, row.text) == (place, generation.sample, generation.text)
        assert row.finish_reason == generation.finish_reason
        assert (row.prompt_tokens, row.new_tokens) == (len(row.prompt_token_ids), len(row.token_ids))
        assert row.token_ids == generation.token_ids and row.prompt_token_ids == generation.prompt_token_ids
    assert table["error"].isna().all() and table["new_tokens"].sum() == result.report.new_tokens


def test_a_row_for_each_score() -> None:
    scores = that_chats().score(["w3 w4"], choices=[" w5", " w6"])
    table = scores.to_pandas()
    assert list(table.columns) == SCORES == list(ScoreResult([], None).to_pandas().columns)
    assert dtypes(table) == dtypes(ScoreResult([], None).to_pandas())
    assert table["logprob"].tolist() == scores.logprobs and table["is_greedy"].dtype == bool


def test_samples_and_errors_are_rows_like_others() -> None:
    options = {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2, "seed": 1}
    result = that_chats().generate([[5, 6], [], "w7"], on_error="record", **options)
    table = result.to_pandas()
    assert list(table["sample"]) == [0, 1] * 3
    assert list(table["finish_reason"]) == ["length", "length", "error", "error", "length", "length"]
    failed = table[table["error"].notna()]
    assert list(failed["index"]) == [1, 1]
    assert list(failed["error"]) == [result[2].error] * 2 and "empty" in str(result[2].error)
    assert failed["text"].isna().all() and list(failed["new_tokens"]) == [0, 0]
    assert list(table.groupby("index")["new_tokens"].sum()) == [6, 0, 6]  # what most want next


def test_log_probabilities_where_they_were_asked_for() -> None:
    for option, values in ({"logprobs": 1}, "logprobs"), ({"prompt_logprobs": 0}, "prompt_logprobs"):
        result = that_chats().generate(PROMPTS, max_new_tokens=2, **option)
        table = result.to_pandas()
        assert list(table.columns) == [*COLUMNS[:-2], values, *COLUMNS[-2:]]
        assert list(table[values]) == [getattr(generation, values) for generation in result]


def test_the_types_do_not_depend_on_what_is_in_it() -> None:
    """What works on one result works on an empty one, and on one that is all errors."""
    some = dtypes(that_chats().generate(PROMPTS, max_new_tokens=2).to_pandas())
    assert {some[name] for name in ("index", "sample", "prompt_tokens", "new_tokens")} == {"int64"}
    assert {some[name] for name in ("text", "finish_reason", "error")} == {"string"}
    empty = that_chats().generate([], max_new_tokens=2)
    errors = that_chats().generate([[]], max_new_tokens=2, on_error="record")
    textless = BatchGenerator(build("llama")).generate([torch.tensor([5, 6])], max_new_tokens=2)
    for result, rows in ((empty, 0), (errors, 1), (BatchResult([], None), 0), (textless, 1)):
        table = result.to_pandas()
        assert len(table) == rows and dtypes(table) == some and table["text"].isna().all()


def test_a_column_of_prompts_keeps_its_index() -> None:
    table = pd.DataFrame({"ask": ["w5", "w6 w7", "w8", "w9 w3", "w4"]}, index=[7, 3, 9, 1, 5])
    asked = table[[True, False, True, True, False]].copy()
    result = that_chats().generate(asked["ask"], max_new_tokens=3)
    asked["answer"] = result.to_pandas()["text"]
    assert list(asked["answer"]) == result.texts and None not in result.texts
    assert list(result[1:].to_pandas().index) == [9, 1]
    several = that_chats().generate(asked["ask"], max_new_tokens=2, do_sample=True, num_return_sequences=2, seed=1)
    assert list(several.to_pandas().index) == [7, 7, 9, 9, 1, 1]
    errors = that_chats().generate(pd.Series(["w5", []], index=["a", "b"]), max_new_tokens=2, on_error="record")
    assert list(errors.to_pandas().index) == ["a", "b"]
    assert list(that_chats().generate(list(asked["ask"]), max_new_tokens=2).to_pandas().index) == [0, 1, 2]
    scores = that_chats().score(asked["ask"], choices=[" w5", " w6"])
    assert list(scores.to_pandas().index) == [7, 7, 9, 9, 1, 1] and list(scores[3:].to_pandas().index) == [9, 1, 1]
    assert list(that_chats().score(None, asked["ask"] + " w4").to_pandas().index) == [7, 9, 1]
    assert list(that_chats().score("w5", pd.Series([" w6", " w7"], index=[4, 2])).to_pandas().index) == [0, 1]


def test_lines_of_json(result: BatchResult, tmp_path: Path) -> None:
    result.to_jsonl(tmp_path / "all.jsonl")
    read = json_lines(tmp_path / "all.jsonl")
    assert [each["prompt"] for each in read] == [each.prompt for each in result]
    assert [each["token_ids"] for each in read] == result.token_ids and read[0]["error"] is None
    result[:2].to_jsonl(tmp_path / "all.jsonl", ids=False)
    read = json_lines(tmp_path / "all.jsonl")
    assert len(read) == 2 and "token_ids" not in read[0]
    text = "é \ud800\u2028"
    odd = Generation(0, 0, text, [5], [6], "stop", logprobs=[{5: -math.inf, 7: -1.0}], prompt="a\nb")
    BatchResult([odd], None).to_jsonl(tmp_path / "odd.jsonl")
    (line,) = json_lines(tmp_path / "odd.jsonl")
    assert line["logprobs"] == [{"5": None, "7": -1.0}] and line["prompt"] == "a\nb" and line["text"] == text


def test_a_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    generator = that_chats()
    texts = generator.generate(["w3", "w4"], max_new_tokens=2, logprobs=1, prompt_logprobs=0).to_dataset()
    assert isinstance(texts, datasets.Dataset) and texts["prompt"][:] == ["w3", "w4"]
    first = texts[0]
    assert [place[0]["token_id"] for place in first["logprobs"]] and first["prompt_logprobs"] == [None]
    assert texts.features["error"].dtype == "string" and texts.features["index"].dtype == "int64"
    chats = generator.generate([CHAT, [5]], max_new_tokens=1).to_dataset(ids=False)
    assert chats["prompt"][:] == [CHAT, None] and "token_ids" not in chats.column_names
    mixed = generator.generate([CHAT, "w3"], max_new_tokens=1).to_dataset()["prompt"][:]
    assert json.loads(mixed[0]) == CHAT and mixed[1] == "w3"
    scores = generator.score(["w3"], choices=[" w5", " w6"]).to_dataset()
    assert scores["logprobs"][0] == pytest.approx([scores["logprob"][0]])
    assert len(BatchResult([], None).to_dataset()) == 0


@pytest.mark.parametrize(("name", "install"), [("pandas", r"'hf-batchllm\[notebook\]'"), ("datasets", "datasets")])
def test_an_error_says_what_to_install(name: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = BatchResult([Generation(0, 0, "so", [5], [6], "length")], None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs {name}: pip install {install}"):
        result.to_pandas() if name == "pandas" else result.to_dataset()


def test_pandas_is_imported_by_nobody_else() -> None:
    code = "import sys, hf_batchllm; hf_batchllm.BatchResult([], None); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
