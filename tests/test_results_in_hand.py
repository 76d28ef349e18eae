"""Results in hand: what they print, their slices, what they keep of prompts, and tables of them."""

from __future__ import annotations

import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchResult, Generation, Score, ScoreResult

CHAT = [{"role": "user", "content": "w5 w6"}]


def make() -> BatchGenerator:
    return BatchGenerator(build("llama"), word_tokenizer(97, template=True))


@pytest.fixture(scope="module")
def result() -> BatchResult:
    return make().generate(["w3 w4 w5", CHAT, [5, 6], "w8"], max_new_tokens=2)


# -- what is printed -------------------------------------------------------------------------------------------


def test_a_generation_is_a_line_with_its_text_first() -> None:
    ids = list(range(4000))
    shown = repr(Generation(3, 1, "yes " * 500, ids, ids, "stop", logprobs=[{5: -1.0}] * 4000, prompt="why " * 900))
    assert shown.startswith("Generation(text='yes yes") and len(shown) < 450 and "\n" not in shown
    assert "token_ids=[0, 1, 2, 3, 4, 5, ... 4,000 in all]" in shown and "logprobs=<of 4,000 tokens>" in shown
    assert "index=3" in shown and "sample=1" in shown
    shown = repr(Generation(0, 0, None, [], [], "error", error="is empty"))
    assert shown.startswith("Generation(error='is empty'") and "sample" not in shown
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    assert "prompt=<chat: 1 before, user 'Why?'>" in repr(Generation(0, 0, "So.", [1], [2], "stop", prompt=chat))


def test_a_score_is_a_line_with_its_text_first() -> None:
    shown = repr(Score(0, 1, " yes", [5] * 50, [-0.5] * 50, True, context="Is it? " * 50))
    assert shown.startswith("Score(text=' yes', logprob=-25.0000, is_greedy=True") and len(shown) < 250


# -- slices, equality, pickles ---------------------------------------------------------------------------------


def test_a_slice_is_a_result_with_the_same_report(result: BatchResult) -> None:
    part = result[1:3]
    assert isinstance(part, BatchResult) and list(part) == [result[1], result[2]] and part.report is result.report
    assert part.texts == result.texts[1:3] and len(result[::-1]) == 4 and result[::-1][0] == result[3]
    assert "<table" in part._repr_html_()
    assert len(result[10:]) == 0


def test_results_are_compared_by_what_was_generated(result: BatchResult) -> None:
    again = make().generate(["w3 w4 w5", CHAT, [5, 6], "w8"], max_new_tokens=2)
    assert again == result and again is not result and again != result[:2]
    assert result[:2] == [result[0], result[1]] and result != "text"
    # The same tokens, passed as ids: the same results.
    assert make().generate([each.prompt_token_ids for each in result], max_new_tokens=2) == result


def test_a_pickle_holds_everything_but_the_tokenizer(result: BatchResult) -> None:
    back = pickle.loads(pickle.dumps(result))
    assert back == result and [each.prompt for each in back] == [each.prompt for each in result]
    assert back[:1].texts == result.texts[:1]


def test_the_picture_of_a_pickle_shows_prompts_and_so_does_that_of_an_error(result: BatchResult) -> None:
    back = pickle.loads(pickle.dumps(result))
    assert "w3 w4 w5" in back._repr_html_().split("</pre>")[1]
    failed = BatchResult([Generation(0, 0, None, [], [], "error", error="is too long", prompt="Once <b>")], None)
    assert "Once &lt;b&gt;" in failed._repr_html_()


# -- prompts ---------------------------------------------------------------------------------------------------


def test_each_result_has_its_prompt_as_it_was_passed() -> None:
    document = "w7 " * 50
    prompts: list[Any] = [document + "w3", [*CHAT], [5, 6]]
    chat = prompts[1]
    result = make().generate(iter(prompts), max_new_tokens=2, num_return_sequences=2, do_sample=True, seed=1)
    assert result[0].prompt is prompts[0] and result[1].prompt is prompts[0]  # no copy
    assert result[2].prompt == CHAT and result[2].prompt is result[3].prompt
    assert result[4].prompt is None and result[4].prompt_token_ids == [5, 6]
    chat.append({"role": "assistant", "content": result[2].text})  # as people go on with a chat
    assert result[2].prompt == CHAT
    assert [each.prompt for each in make().stream("w3 w4", max_new_tokens=1)] == ["w3 w4"]


def test_a_prompt_that_failed_is_there_too() -> None:
    (failed,) = BatchGenerator(build("llama"), word_tokenizer(97)).generate([CHAT], on_error="record", max_new_tokens=1)
    assert failed.error is not None and failed.prompt == CHAT


def test_scores_have_their_contexts() -> None:
    scores = make().score(["w3 w4", CHAT, [5]], choices=[" w5", " w6"])
    assert [each.context for each in scores] == ["w3 w4", "w3 w4", CHAT, CHAT, None, None]
    assert make().score(None, ["w3 w4"])[0].context is None


# -- probabilities ---------------------------------------------------------------------------------------------


def test_probabilities_among_the_choices() -> None:
    scores = make().score(["w3 w4", "w4"], choices=[" w5", " w6 w7", " w8"])
    for among, of_context in zip(scores.probabilities, scores.by_context, strict=True):
        weights = [math.exp(each.logprob) for each in of_context]
        assert among == pytest.approx([weight / sum(weights) for weight in weights]) and sum(among) == pytest.approx(1)
    odd = ScoreResult(
        [
            *(Score(0, choice, None, [5], [-math.inf], False) for choice in (0, 1)),
            Score(1, 0, None, [5], [-5000.0], False),
            Score(1, 1, None, [5], [-math.inf], False),
            Score(2, 0, None, [], [], False, "is empty"),
        ],
        None,
    )
    assert odd.probabilities[:2] == [[0.5, 0.5], [1.0, 0.0]] and math.isnan(odd.probabilities[2][0])


# -- tables ----------------------------------------------------------------------------------------------------


def test_the_prompt_comes_first_and_ids_last_or_not_at_all(result: BatchResult) -> None:
    table = result.to_pandas()
    assert list(table.columns)[:2] == ["prompt", "text"] and list(table.columns)[-2:] == TOKENS
    assert list(result.to_pandas(ids=False).columns) == list(table.columns)[:-2]
    assert table["prompt"].tolist() == ["w3 w4 w5", CHAT, None, "w8"]
    scores = make().score(["w3 w4"], choices=[" w5", " w6"]).to_pandas()
    assert scores.columns[0] == "context" and scores.columns[-1] == "token_ids"


TOKENS = ["token_ids", "prompt_token_ids"]


def test_lines_of_json(result: BatchResult, tmp_path: Path) -> None:
    result.to_jsonl(tmp_path / "all.jsonl")
    read = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text("utf-8").splitlines()]
    assert [each["prompt"] for each in read] == [each.prompt for each in result]
    assert [each["token_ids"] for each in read] == result.token_ids and read[0]["error"] is None
    result[:2].to_jsonl(tmp_path / "all.jsonl", ids=False)
    read = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text("utf-8").splitlines()]
    assert len(read) == 2 and "token_ids" not in read[0]
    odd = Generation(0, 0, "é \ud800\u2028", [5], [6], "stop", logprobs=[{5: -math.inf, 7: -1.0}], prompt="a\nb")
    BatchResult([odd], None).to_jsonl(tmp_path / "odd.jsonl")
    (line,) = (tmp_path / "odd.jsonl").read_bytes().split(b"\n")[:-1]
    assert json.loads(line)["logprobs"] == [{"5": None, "7": -1.0}] and json.loads(line)["prompt"] == "a\nb"


def test_a_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    generator = make()
    texts = generator.generate(["w3", "w4"], max_new_tokens=2, logprobs=1, prompt_logprobs=0).to_dataset()
    assert isinstance(texts, datasets.Dataset) and texts["prompt"][:] == ["w3", "w4"]
    first = texts[0]
    assert [place[0]["token_id"] for place in first["logprobs"]] and first["prompt_logprobs"] == [None]
    assert texts.features["error"].dtype == "string"
    chats = generator.generate([CHAT, [5]], max_new_tokens=1).to_dataset(ids=False)
    assert chats["prompt"][:] == [CHAT, None] and "token_ids" not in chats.column_names
    mixed = generator.generate([CHAT, "w3"], max_new_tokens=1).to_dataset()["prompt"][:]
    assert json.loads(mixed[0]) == CHAT and mixed[1] == "w3"
    scores = generator.score(["w3"], choices=[" w5", " w6"]).to_dataset()
    assert scores["logprobs"][0] == pytest.approx([scores["logprob"][0]])
    assert len(BatchResult([], None).to_dataset()) == 0


def test_without_datasets_the_error_says_what_to_install(result: BatchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="needs datasets: pip install datasets"):
        result.to_dataset()
