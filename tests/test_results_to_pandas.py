"""Results as a DataFrame."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchResult, Generation

pd = pytest.importorskip("pandas")

COLUMNS = ("prompt text finish_reason index sample prompt_tokens new_tokens error token_ids prompt_token_ids").split()
PROMPTS = [[5, 6, 7], [5, 6, 8, 9], [5]]


def make(**fields: object) -> BatchGenerator:
    return BatchGenerator(build("llama"), word_tokenizer(), **fields)


def dtypes(table: pd.DataFrame) -> dict[str, str]:
    return {name: str(dtype) for name, dtype in table.dtypes.items()}


def test_a_row_for_each_generation() -> None:
    result = make().generate(PROMPTS, max_new_tokens=4)
    table = result.to_pandas()
    assert list(table.columns) == COLUMNS
    assert list(table.index) == list(range(len(PROMPTS)))
    for place, row in enumerate(table.itertuples()):
        generation = result[place]
        assert (row.index, row.sample, row.text) == (place, generation.sample, generation.text)
        assert (row.finish_reason, row.prompt_tokens, row.new_tokens) == ("length", len(PROMPTS[place]), 4)
        assert row.token_ids == generation.token_ids and row.prompt_token_ids == generation.prompt_token_ids
    assert table["error"].isna().all()
    assert table["new_tokens"].sum() == result.report.new_tokens


def test_samples_and_errors_are_rows_like_others() -> None:
    result = make().generate(
        [[5, 6], [], "w7"], max_new_tokens=3, do_sample=True, num_return_sequences=2, seed=1, on_error="record"
    )
    table = result.to_pandas()
    assert list(table["sample"]) == [0, 1] * 3
    assert list(table["finish_reason"]) == ["length", "length", "error", "error", "length", "length"]
    failed = table[table["error"].notna()]
    assert list(failed["index"]) == [1, 1]
    assert list(failed["error"]) == [result[2].error] * 2 and "empty" in result[2].error
    assert failed["text"].isna().all() and list(failed["new_tokens"]) == [0, 0]
    # Grouping by prompt is what most want next.
    assert list(table.groupby("index")["new_tokens"].sum()) == [6, 0, 6]


def test_log_probabilities_where_they_were_asked_for() -> None:
    result = make().generate(PROMPTS, max_new_tokens=2, logprobs=1)
    table = result.to_pandas()
    assert list(table.columns) == [*COLUMNS[:-2], "logprobs", *COLUMNS[-2:]]
    assert list(table["logprobs"]) == [generation.logprobs for generation in result]
    table = make().generate(PROMPTS, max_new_tokens=2, prompt_logprobs=0).to_pandas()
    assert list(table.columns) == [*COLUMNS[:-2], "prompt_logprobs", *COLUMNS[-2:]]


def test_the_types_do_not_depend_on_what_is_in_it() -> None:
    """What works on one result works on an empty one, and on one that is all errors."""
    some = dtypes(make().generate(PROMPTS, max_new_tokens=2).to_pandas())
    assert {some[name] for name in ("index", "sample", "prompt_tokens", "new_tokens")} == {"int64"}
    assert {some[name] for name in ("text", "finish_reason", "error")} == {"string"}
    empty = make().generate([], max_new_tokens=2)
    assert len(empty.to_pandas()) == 0 and dtypes(empty.to_pandas()) == some
    errors = make().generate([[]], max_new_tokens=2, on_error="record")
    assert len(errors.to_pandas()) == 1 and dtypes(errors.to_pandas()) == some
    nothing = BatchResult([], None)
    assert dtypes(nothing.to_pandas()) == some
    textless = BatchGenerator(build("llama")).generate([torch.tensor([5, 6])], max_new_tokens=2).to_pandas()
    assert textless["text"].isna().all() and dtypes(textless) == some


def test_a_column_of_prompts_keeps_its_index() -> None:
    table = pd.DataFrame({"ask": ["w5", "w6 w7", "w8", "w9 w3", "w4"]}, index=[7, 3, 9, 1, 5])
    asked = table[[True, False, True, True, False]].copy()
    result = make().generate(asked["ask"], max_new_tokens=3)
    asked["answer"] = result.to_pandas()["text"]
    assert list(asked["answer"]) == result.texts and None not in result.texts
    assert list(result[1:].to_pandas().index) == [9, 1]
    several = make().generate(asked["ask"], max_new_tokens=2, do_sample=True, num_return_sequences=2, seed=1)
    assert list(several.to_pandas().index) == [7, 7, 9, 9, 1, 1]
    errors = make().generate(pd.Series(["w5", []], index=["a", "b"]), max_new_tokens=2, on_error="record")
    assert list(errors.to_pandas().index) == ["a", "b"]
    assert list(make().generate(list(asked["ask"]), max_new_tokens=2).to_pandas().index) == [0, 1, 2]
    scores = make().score(asked["ask"], choices=[" w5", " w6"])
    assert list(scores.to_pandas().index) == [7, 7, 9, 9, 1, 1] and list(scores[3:].to_pandas().index) == [9, 1, 1]
    assert list(make().score(None, asked["ask"] + " w4").to_pandas().index) == [7, 9, 1]
    assert list(make().score("w5", pd.Series([" w6", " w7"], index=[4, 2])).to_pandas().index) == [0, 1]


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    result = BatchResult([Generation(0, 0, "so", [5], [6], "length")], None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pandas: pip install 'hf-batchllm\[notebook\]'"):
        result.to_pandas()


def test_pandas_is_imported_by_nobody_else() -> None:
    code = "import sys, hf_batchllm; hf_batchllm.BatchResult([], None); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
