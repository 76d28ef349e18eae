"""What a call leaves in its results for the views: how shared text begins, and prompts as text."""

import pickle
import re

import pytest
from support_families import build
from support_html import view_of
from support_word_tokenizer import byte_tokenizer, word_tokenizer

import hf_batchllm.inputs.kept_tokenizers
from hf_batchllm import BatchGenerator, BatchResult, Generation, plan_prompts

SHARED = " ".join(f"w{30 + at}" for at in range(60))
PROMPTS = [f"{SHARED} w{at} w7" for at in range(30, 36)] + ["w5 w6 w8"]
BEGINNING = " ".join(f"w{30 + at}" for at in range(20))


@pytest.fixture
def generator():
    with BatchGenerator(build("llama"), word_tokenizer(97), page_size=8) as made:
        yield made


@pytest.fixture
def no_tokenizer_is_loaded(monkeypatch):
    """Beside a model that says where one is."""
    model = build("llama")
    monkeypatch.setattr(model.config, "_name_or_path", "somewhere/else")

    def load(*args, **kwargs):
        pytest.fail("a tokenizer was looked for")

    monkeypatch.setattr(hf_batchllm.inputs.kept_tokenizers.AutoTokenizer, "from_pretrained", load)
    return model


def test_plans_say_how_shared_text_begins(generator):
    for plan in (plan_prompts(PROMPTS, word_tokenizer(97)), generator.plan(PROMPTS)):
        assert plan.labels[0].startswith(BEGINNING) and len(plan.labels) == len(plan.segments)
        assert len(plan.labels[0]) < 200 < len(SHARED) + 60
        assert view_of(plan).text.count(BEGINNING) == 2, "in its block and in the table"
        assert pickle.loads(pickle.dumps(plan)).labels == plan.labels


def test_only_the_segments_that_save_most_have_labels():
    many = [f"{' '.join([f'w{group}'] * 30)} w{at}" for group in range(30, 60) for at in (8, 9)]
    plan = plan_prompts(many, word_tokenizer(97), min_shared_tokens=1)
    assert len(plan.segments) == 30 and len(plan.labels) == 12


def test_ids_alone_have_no_labels_and_no_tokenizer_is_loaded_for_them(no_tokenizer_is_loaded):
    rows = [[*range(3, 60), at] for at in range(5)]
    assert plan_prompts(rows).labels == {}
    with BatchGenerator(no_tokenizer_is_loaded) as generator:
        assert generator.plan(rows).labels == {}


def test_a_tokenizer_that_cannot_decode_costs_the_labels_alone():
    tokenizer = word_tokenizer(97)
    for decode in (lambda *args, **kwargs: 1 / 0, lambda *args, **kwargs: ["odd"], lambda *args, **kwargs: "\ufffd"):
        tokenizer.decode = decode
        plan = plan_prompts(PROMPTS, tokenizer)
        assert plan.labels == {} and plan.segments
        assert "of prompt 0" in view_of(plan).text


def test_no_half_characters_where_tokens_are_cut():
    tokenizer = byte_tokenizer()
    prompts = [
        f"{face} shared by these" + str(row) for face in "😀😁" for row in range(3)
    ]  # all but a byte is the same
    plan = plan_prompts(prompts, tokenizer, min_shared_tokens=0)
    assert len(plan.segments) == 3 and list(plan.labels.values()) == [" shared by these"] * 2
    ids = tokenizer("a" + "🦊" * 500 + "ab").input_ids
    page = view_of(BatchResult([Generation(0, 0, "yes", [1], ids, "stop")], None, tokenizer.decode))
    assert "a" + "🦊" * 62 + "…" in page.text and "🦊" * 62 + "ab" in page.text and "\ufffd" not in page.text


def test_a_call_shows_what_was_asked_and_what_it_had_in_common(generator):
    result = generator.generate(PROMPTS, max_new_tokens=3, num_return_sequences=2, do_sample=True, seed=1)
    assert any(label.startswith(BEGINNING) for label in result.report.plan.labels.values())
    page = view_of(result)
    assert "w5 w6 w8" in page.text and BEGINNING in page.text
    assert "14 generations" in page.text and "sample" in page.text
    page = view_of(result.report)
    assert BEGINNING in page.text and "14sequences" in page.text
    again = pickle.loads(pickle.dumps(result))
    assert "w5 w6 w8" in view_of(again).text, "a result keeps its prompt as it was passed"
    ids = generator.generate([[5, 6, 8]], max_new_tokens=1)
    again = pickle.loads(pickle.dumps(ids))  # without the tokenizer
    assert "w5 w6 w8" not in view_of(again).text and "5 6 8" in view_of(again).text


def test_a_prompt_that_was_refused_is_in_the_table(generator):
    result = generator.generate([*PROMPTS, [10**6]], max_new_tokens=2, on_error="record")
    page = view_of(result)
    assert "has token id 1000000" in page.text and "8 generations" in page.text


def test_the_plan_of_a_run_does_not_number_its_sequences_as_prompts(generator):
    rows = [[], [7, 8], *PROMPTS]
    result = generator.generate(rows, max_new_tokens=2, num_return_sequences=2, do_sample=True, on_error="record")
    page = view_of(result.report.plan)
    assert not [title for title in page.titles if re.search(r"prompt \d", title)]
    assert "16sequences" in page.text and "16 sequences" not in view_of(generator.plan(PROMPTS)).text
    assert [title for title in view_of(generator.plan(PROMPTS)).titles if "prompt 6: 3 tokens of its own" in title]


def test_what_does_not_fit_is_not_in_the_report():
    long = [*range(3, 90)] * 3
    with BatchGenerator(build("llama"), page_size=8, kv_memory=20_000) as small:
        report = small.generate([[5] * 3, long, long], max_new_tokens=4, on_error="record").report
        assert small.generate([long], max_new_tokens=4, on_error="record").report.prompt_tokens == 0
    assert (report.sequences, report.prompt_tokens, report.computed_tokens, report.saving) == (1, 3, 3, 0.0)
    assert (len(report.plan.order), report.plan.total_tokens) == (1, 3)
