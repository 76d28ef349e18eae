"""What a call leaves in its results for the views: how shared text begins, and prompts as text."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support_families import build
from support_html import view_of
from support_word_tokenizer import byte_tokenizer, word_tokenizer

import hf_batchllm.inputs.tokenizer
from hf_batchllm import BatchGenerator, BatchResult, Generation, plan_prompts

SHARED = " ".join(f"w{30 + at}" for at in range(60))
PROMPTS = [f"{SHARED} w{at} w7" for at in range(30, 36)] + ["w5 w6 w8"]
BEGINNING = " ".join(f"w{30 + at}" for at in range(20))
SAMPLED = {"max_new_tokens": 2, "num_return_sequences": 2, "do_sample": True, "seed": 1}


@pytest.fixture
def generator() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), word_tokenizer(97), page_size=8) as made:
        yield made


def test_plans_say_how_shared_text_begins(generator: BatchGenerator) -> None:
    for plan in (plan_prompts(PROMPTS, word_tokenizer(97)), generator.plan(PROMPTS)):
        assert plan.labels[0].startswith(BEGINNING) and len(plan.labels) == len(plan.segments)
        assert len(plan.labels[0]) < 200 < len(SHARED) + 60
        assert view_of(plan).text.count(BEGINNING) == 2, "in its block and in the table"
        assert pickle.loads(pickle.dumps(plan)).labels == plan.labels
    many = [f"{' '.join([f'w{group}'] * 30)} w{at}" for group in range(30, 60) for at in (8, 9)]
    plan = plan_prompts(many, word_tokenizer(97), min_shared_tokens=1)
    assert len(plan.segments) == 30 and len(plan.labels) == 12, "only those that save most"


def test_ids_alone_have_no_labels_and_no_tokenizer_is_loaded_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(model.config, "_name_or_path", "somewhere/else")  # says where a tokenizer is
    loaded = hf_batchllm.inputs.tokenizer.AutoTokenizer
    monkeypatch.setattr(loaded, "from_pretrained", lambda *_, **__: pytest.fail("a tokenizer was looked for"))
    rows = [[*range(3, 60), at] for at in range(5)]
    assert plan_prompts(rows).labels == {}
    with BatchGenerator(model) as generator:
        assert generator.plan(rows).labels == {}


@pytest.mark.parametrize("decoded", [lambda: 1 / 0, lambda: ["odd"], lambda: "\ufffd"], ids=["fails", "list", "half"])
def test_a_tokenizer_that_cannot_decode_costs_the_labels_alone(decoded: Any) -> None:
    tokenizer = word_tokenizer(97)
    tokenizer.decode = lambda *args, **kwargs: decoded()
    plan = plan_prompts(PROMPTS, tokenizer)
    assert plan.labels == {} and plan.segments and "of prompt 0" in view_of(plan).text


def test_no_half_characters_where_tokens_are_cut() -> None:
    tokenizer = byte_tokenizer()  # all but a byte of the faces is the same
    prompts = [f"{face} shared by these{row}" for face in "😀😁" for row in range(3)]
    plan = plan_prompts(prompts, tokenizer, min_shared_tokens=0)
    assert len(plan.segments) == 3 and list(plan.labels.values()) == [" shared by these"] * 2
    ids = tokenizer("a" + "🦊" * 500 + "ab").input_ids
    page = view_of(BatchResult([Generation(0, 0, "yes", [1], ids, "stop")], None, tokenizer.decode))
    assert "a" + "🦊" * 62 + "…" in page.text and "🦊" * 62 + "ab" in page.text and "\ufffd" not in page.text


def test_a_call_shows_what_was_asked_and_what_it_had_in_common(generator: BatchGenerator) -> None:
    result = generator.generate(PROMPTS, **SAMPLED)
    page = view_of(result)
    for shown in ("w5 w6 w8", BEGINNING, "14 generations", "sample"):
        assert shown in page.text
    page = view_of(result.report)
    assert BEGINNING in page.text and "14sequences" in page.text
    again = view_of(pickle.loads(pickle.dumps(result)))
    assert "w5 w6 w8" in again.text, "a result keeps its prompt as it was passed"
    ids = view_of(pickle.loads(pickle.dumps(generator.generate([[5, 6, 8]], max_new_tokens=1))))
    assert "w5 w6 w8" not in ids.text and "5 6 8" in ids.text, "the tokenizer is not in the pickle"
    page = view_of(generator.generate([*PROMPTS, [10**6]], max_new_tokens=2, on_error="record"))
    assert "has token id 1000000" in page.text and "8 generations" in page.text


def test_the_plan_of_a_run_does_not_number_its_sequences_as_prompts(generator: BatchGenerator) -> None:
    result = generator.generate([[], [7, 8], *PROMPTS], on_error="record", **SAMPLED)
    page, before = view_of(result.report.plan), view_of(generator.plan(PROMPTS))
    assert not [title for title in page.titles if re.search(r"prompt \d", title)]
    assert "16sequences" in page.text and "sequences" not in before.text
    assert [title for title in before.titles if "prompt 6: 3 tokens of its own" in title]


def test_what_does_not_fit_is_not_in_the_report() -> None:
    long = [*range(3, 90)] * 3
    with BatchGenerator(build("llama"), page_size=8, kv_memory=20_000) as small:
        report = small.generate([[5] * 3, long, long], max_new_tokens=4, on_error="record").report
        assert small.generate([long], max_new_tokens=4, on_error="record").report.prompt_tokens == 0
    assert (report.sequences, report.prompt_tokens, report.computed_tokens, report.saving) == (1, 3, 3, 0.0)
    assert (len(report.plan.order), report.plan.total_tokens) == (1, 3)
