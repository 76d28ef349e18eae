"""Answers of a given form: token for token those of ``generate`` with llguidance's masks, one prompt at a time."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import random_prompts
from support_generate_alone import PAGE
from support_grammars import END_OF_BYTES, Plain, letters, of_bytes
from support_letter_tokenizers import EOS
from support_oracle import check_row
from support_parity import pages_of_memory
from transformers import GenerationConfig, LogitsProcessor

from hf_batchllm import BatchGenerator, BatchResult, Generation
from hf_batchllm.errors import NothingToDrawError
from hf_batchllm.sampling.grammar_masks import GrammarMasks
from hf_batchllm.sampling.host_sampler import HostSampler

LARK = """
start: word ("d" word)*
word: "ab" | /c[ef]+/ | "fa" word
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer"},
        "mood": {"enum": ["so", "la"]},
    },
    "required": ["name", "mood"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMS: list[tuple[str, Any]] = [
    ("regex", "(ab|c)+d?"),
    ("regex", "(a|bc){2,5}(d|ef)*"),
    ("grammar", LARK),
    ("choice", ["abc", "abcde", "fed", "fedab"]),
]
PROMPTS = random_prompts(random.Random(5), 97, "mixed", 6)[:6]
NEWLINE, COMMA = of_bytes()[1]("\n,").input_ids
OF_BYTES = [list(b"age and name: "), list(b"age and mood: "), list(b"x"), list(b"age and name, too: ")]


def is_sure(row: Generation, form: tuple[str, Any] | None, given: Any, options: dict[str, Any]) -> bool:
    """The row is what ``generate`` gives with a plain processor for its prompt alone, rounding aside."""
    own = {name: value for name, value in options.items() if name != "seed"}
    if form is not None:
        option, value = form
        text = value if isinstance(value, str) else json.dumps(value)
        own["logits_processor"] = [Plain(option, text, given, len(row.prompt_token_ids))]
    return check_row(given[0], row, own, options.get("seed"))


def generate(given: Any, prompts: Any, config: dict[str, Any] | None = None, **options: Any) -> BatchResult:
    with BatchGenerator(*given, **(config or PAGE)) as generator:
        result: BatchResult = generator.generate(prompts, **options)
    return result


@pytest.mark.some_cases
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[1] if form[0] == "regex" else form[0])
@pytest.mark.parametrize(
    "sampled", [{}, {"do_sample": True, "seed": 3, "temperature": 1.4, "top_k": 20, "num_return_sequences": 2}]
)
def test_one_for_all_prompts(form: tuple[str, Any], sampled: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": EOS, **sampled}
    result = generate(letters(), PROMPTS, **options, **dict([form]))
    assert sum(is_sure(row, form, letters(), options) for row in result) > 0.7 * len(result)
    if form[0] == "choice":
        assert {row.text for row in result} <= {*form[1]}
    if form[0] == "regex":
        assert all(re.fullmatch(form[1], row.text) for row in result if row.finish_reason == "stop")


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "seed": 4, "top_p": 0.9}])
def test_each_prompt_has_its_own_or_none(sampled: dict[str, Any]) -> None:
    forms = [None if place % 4 == 2 else FORMS[place % 4] for place in range(len(PROMPTS))]
    each = {
        name: [form[1] if form is not None and form[0] == name else None for form in forms]
        for name in ("regex", "grammar", "choice")
    }
    options: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": EOS, "repetition_penalty": 1.2, **sampled}
    result = generate(letters(), PROMPTS, **options, **each)
    sure = [is_sure(row, form, letters(), options) for row, form in zip(result, forms, strict=True)]
    assert sum(sure) > 0.7 * len(result)
    assert {len(row.token_ids) for row, form in zip(result, forms, strict=True) if form is None} == {10}


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "seed": 7, "temperature": 1.3, "top_k": 30}])
def test_on_a_gpus_loop_masks_are_made_meanwhile(
    device: str, sampled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = GrammarMasks.begin
    monkeypatch.setattr(GrammarMasks, "begin", lambda self, some: begun.append(len(some)) or begin(self, some))
    given = model_on(device, "llama"), letters()[1]
    options: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": EOS, **sampled}
    forms = [FORMS[0] if place % 3 else None for place in range(len(PROMPTS))]
    regex = [None if form is None else form[1] for form in forms]
    result = generate(given, PROMPTS, {"min_shared_tokens": 4, "page_size": 16}, regex=regex, **options)
    assert result.report is not None and "replayed" in result.report.graphs
    assert result.report.steps - len(begun) in (0, 1)  # a step may run when all have ended, which is seen later
    if sampled:  # with the noise of the device
        assert all(re.fullmatch("(ab|c)*a?d?", row.text) for row, form in zip(result, forms, strict=True) if form)
    else:
        assert sum(is_sure(row, form, given, options) for row, form in zip(result, forms, strict=True)) > 3


def test_json_of_bytes_in_a_vocabulary_that_is_wider_than_the_tokenizers() -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": END_OF_BYTES}
    schemas = [PERSON, json.dumps(PERSON), None, True]
    result = generate(of_bytes(), OF_BYTES, schema=schemas, **options)
    forms = [("schema", PERSON), ("schema", PERSON), None, ("schema", {"type": "object"})]
    for row, form in zip(result, forms, strict=True):
        is_sure(row, form, of_bytes(), options)
    assert max(result[0].token_ids[:-1]) < 256
    options |= {"do_sample": True, "seed": 2}
    for row in generate(of_bytes(), OF_BYTES[:2], schema=PERSON, **options):
        is_sure(row, ("schema", PERSON), of_bytes(), options)
        answer = json.loads(row.text)
        assert answer.keys() <= {"name", "age", "mood"} and answer["mood"] in ("so", "la")


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize(
    "more", [{"eos_token_id": [END_OF_BYTES, NEWLINE, COMMA]}, {"stop_token_ids": [NEWLINE, COMMA]}]
)
def test_an_end_token_within_a_grammar_does_not_cut_answers_off(more: dict[str, Any], drafts: dict[str, Any]) -> None:
    """Newlines may stand between the parts of this JSON, and commas between its numbers."""
    given = model_that_likes(NEWLINE, COMMA)
    options = {"max_new_tokens": 60, "eos_token_id": END_OF_BYTES, **more, **drafts}
    numbers = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}
    schema = {"type": "object", "properties": {"a": numbers}, "required": ["a"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_pattern": "\\n?"}
    for sampled in ({}, {"do_sample": True, "seed": 3, "num_return_sequences": 4}):
        for row in generate(given, OF_BYTES, schema=schema, **options, **sampled):
            assert row.finish_reason == "stop" and json.loads(row.text.rstrip("\n,"))["a"] in ([1], [2])
            assert not {NEWLINE, COMMA}.intersection(row.token_ids[:-1])
    (row,) = generate(given, OF_BYTES[:1], regex="[^\n]{3}\n", **options)
    assert len(row.text) == 4 and row.text.endswith("\n"), "a grammar may end with an end token of its own"


def model_that_likes(*tokens: int) -> Any:
    model, tokenizer = of_bytes()
    model = copy.deepcopy(model)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size).requires_grad_(False)
    head.weight.copy_(model.lm_head.weight)
    head.bias.zero_()[list(tokens)] = 3.0
    model.lm_head = head
    return model, tokenizer


def test_an_end_token_that_must_come_within_a_grammar_is_named(device: str) -> None:
    given = model_on(device, "llama"), letters()[1]
    options: dict[str, Any] = {"regex": "(a|c)ba", "eos_token_id": [EOS, 1]}
    with pytest.raises(NothingToDrawError, match=r"the `regex` of prompt . cannot .* only token 1 can come next"):
        generate(given, PROMPTS, max_new_tokens=5, **options)
    rows = generate(given, PROMPTS, max_new_tokens=1, **options)
    assert {row.finish_reason for row in rows} == {"length"}, "what comes after the last token does not matter"


def test_options_that_stand_before_the_grammar_and_behind_it() -> None:
    """A processor of the user's that would leave other tokens; scores that are no numbers; several EOS tokens."""
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "eos_token_id": [EOS, 3, 99],
        "remove_invalid_values": True,
        "renormalize_logits": True,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[0], [5, 6]],
    }
    given = {**options, "do_sample": True, "temperature": 0.7, "min_p": 0.02}
    result = generate(letters(), PROMPTS, regex="[ac-f]+b", seed=6, **given)
    assert all(re.fullmatch("[ac-f]+b?.*", row.text) for row in result)
    ended = [row for row in result if row.finish_reason == "stop" and row.token_ids[-1] == EOS]
    assert all(re.fullmatch("[ac-f]+b", row.text) for row in ended)


def test_a_row_of_a_tensor_has_its_own() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    options = {"choice": [["abc"], None], "max_new_tokens": 4, "eos_token_id": EOS}
    made: Any = generate(letters(), None, input_ids=ids, pad_token_id=EOS, **options)
    for row, each in zip(made.tolist(), generate(letters(), ids.tolist(), **options), strict=True):
        assert row[3 : 3 + len(each.token_ids)] == each.token_ids


def test_a_sequence_that_waits_for_memory_goes_on_where_it_was() -> None:
    model, tokenizer = letters()
    prompts = random_prompts(random.Random(6), 97, "distinct", 8)
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": EOS}
    config = {"kv_memory": pages_of_memory(model, 20, 8), **PAGE}
    result = generate((model, tokenizer), prompts, config, regex="(abc?|d|ef){30}", **options)
    assert result.report is not None and result.report.preemptions > 0
    assert sum(is_sure(row, ("regex", "(abc?|d|ef){30}"), letters(), options) for row in result) > 0.5 * len(result)


def test_a_stream_gives_the_same() -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": EOS, "regex": "(ab|c)+"}
    with BatchGenerator(*letters(), **PAGE) as generator:
        streamed = sorted(generator.stream(PROMPTS, **options), key=lambda row: row.index)
        assert [row.text for row in streamed] == generator.generate(PROMPTS, **options).texts


def test_settings_may_differ_beside_a_grammar() -> None:
    configs = [GenerationConfig(max_new_tokens=2 + place, do_sample=bool(place % 2)) for place in range(3)]
    result = generate(letters(), PROMPTS[:3], generation_config=configs, regex="(ab|c)+", eos_token_id=EOS, seed=1)
    assert all(re.fullmatch("(ab|c)*a?", row.text) for row in result)


class NoFifths(LogitsProcessor):
    supports_continuous_batching = True

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 10:90:5] = -torch.inf
        return scores


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_p": 0.9}, {"do_sample": True, "temperature": 1.4}])
def test_nothing_waits_for_the_device_while_tokens_are_picked(
    sampled: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a grammar, with a processor of the user's own, and with neither of the two."""
    pick, calls = HostSampler.without_waiting, []

    def strict(self: HostSampler, *given: Any) -> torch.Tensor:
        calls.append(given)
        if device == "cuda":  # elsewhere nothing can be waited for
            torch.cuda.set_sync_debug_mode("error")
        try:
            return pick(self, *given)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(HostSampler, "without_waiting", strict)
    model, tokenizer = letters()
    if device == "cuda":
        model = copy.deepcopy(model).to(device)
    forms = ["(ab|c)+d?", None, "(abc?|d|ef){30}", None, None, "(ab|c)+d?"]
    asked: dict[str, Any] = {"regex": forms, "eos_token_id": EOS, "max_new_tokens": 8, "seed": 3, **sampled}
    with BatchGenerator(model, tokenizer, **PAGE) as generator:
        plain = generator.generate(PROMPTS, **asked)
        own = generator.generate(PROMPTS, logits_processor=[NoFifths()], **asked)
    assert len(calls) >= 16
    assert all(re.fullmatch("[a-f]*", row.text) for row in [*plain, *own] if forms[row.index])
    banned = set(range(10, 90, 5)) - {EOS}
    assert any(banned.intersection(tokens) for tokens in plain.token_ids)
    assert not any(banned.intersection(tokens) for tokens in own.token_ids)


def test_no_token_is_made_up_where_nothing_is_left() -> None:
    with pytest.raises(NothingToDrawError):
        generate(letters(), PROMPTS, regex="a", suppress_tokens=[0], max_new_tokens=4, eos_token_id=EOS)
