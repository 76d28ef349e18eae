"""What a notebook's user meets first: warnings, each kind once for a generator, at the line of whoever called, and none
without a reason; completion; words of a report."""

from __future__ import annotations

import dataclasses
import inspect
import linecache
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
from support_families import FAMILIES, build
from support_word_tokenizer import word_tokenizer
from transformers import GenerationConfig

from hf_batchllm import (
    BatchConfig,
    BatchGenerator,
    PromptsTypeError,
    UnsupportedOptionError,
    accelerated,
    plan_prompts,
)
from hf_batchllm.engine import resources
from hf_batchllm.inputs.config_fields import ConfigFields

FAMILY = "llama"
IDS = [[5, 6, 7], [5, 6, 8]]
GREEDY = {"max_new_tokens": 2}


# Messages that may be meant as a chat each.
FIRST, SECOND = {"role": "user", "content": "w5"}, {"role": "user", "content": "w6"}
ANSWER = {"role": "assistant", "content": "w7"}
CHATS = word_tokenizer(97, template=True)


def make(**fields: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), **fields)


def caught(call: Callable[[], Any], times: int = 1) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [warning for warning in said if not issubclass(warning.category, DeprecationWarning)]


def with_dropout() -> Any:
    model = FAMILIES["gpt2"]()
    model.transformer.drop.p = 0.1
    return model.train()


KINDS: list[tuple[Callable[[], BatchGenerator], Any, dict[str, Any], str]] = [
    (make, IDS, {"eos_token_id": [*range(101)]}, "no length was given, so 20 new tokens are generated"),
    (make, IDS, {**GREEDY, "temperature": 0.5}, "`temperature` has no effect on greedy decoding: set `do_sample=True`"),
    (make, IDS, {**GREEDY, "top_k": 5, "top_p": 0.5}, "`top_k` and `top_p` have no effect on greedy decoding"),
    (make, IDS, {"generation_config": GenerationConfig(max_new_tokens=2, min_p=0.5)}, "`min_p` has no effect"),
    (make, IDS, {**GREEDY, "do_sample": True, "top_p": 2}, "`top_p` is 2, and has no effect: it is a probability"),
    (make, IDS, {**GREEDY, "max_length": 40}, "`max_length` has no effect beside `max_new_tokens`"),
    (make, IDS, {**GREEDY, "min_new_tokens": 9}, "`min_new_tokens` (9) is more than `max_new_tokens` (2)"),
    (make, IDS, {**GREEDY, "cache_implementation": "quantized"}, 'cache_implementation="quantized" has no effect'),
    (make, IDS, {**GREEDY, "negative_prompt_ids": torch.tensor(IDS)}, "`negative_prompt_ids` has no effect"),
    (lambda: BatchGenerator(with_dropout()), IDS, GREEDY, "in training mode and has dropout"),
    (lambda: make(tokenizer=CHATS), [FIRST, SECOND], GREEDY, "list of 2 messages is read as one chat"),
    (lambda: make(tokenizer=word_tokenizer(bos=True)), ["w5", "", ""], GREEDY, "prompt 1 is an empty string:"),
]


@pytest.mark.parametrize("door", ["generate", "stream"])
@pytest.mark.parametrize(("making", "prompts", "options", "says"), KINDS, ids=[row[-1][:30] for row in KINDS])
def test_each_kind_is_said_once_and_points_at_the_caller(
    making: Callable[[], BatchGenerator], prompts: Any, options: dict[str, Any], says: str, door: str
) -> None:
    made = making()
    (warning,) = caught(lambda: list(getattr(made, door)(prompts, **options)), times=3)
    assert says in str(warning.message)
    assert warning.category is UserWarning
    assert warning.filename == __file__
    assert "getattr(made, door)" in linecache.getline(__file__, warning.lineno)
    assert len(caught(lambda: list(getattr(making(), door)(prompts, **options)))) == 1  # another generator, another ear


def test_transformers_does_not_say_it_a_second_time() -> None:
    logger, heard = logging.getLogger("transformers.generation.configuration_utils"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)  # another test may have made transformers quiet
    type(logger).warning_once.cache_clear()  # type: ignore[attr-defined]
    try:
        (warning,) = caught(partial(make().generate, IDS, **GREEDY, temperature=0.7, length_penalty=1.0), times=2)
        assert "`temperature` has no effect" in str(warning.message)
        for name in ("output_attentions", "output_hidden_states"):
            with pytest.raises(UnsupportedOptionError, match=rf"`?{name}.*it is set to True"):
                make().generate(IDS, **GREEDY, **{name: True})
        assert heard == []
        GenerationConfig(temperature=0.7, do_sample=False)  # the user's own: transformers' warning comes
        assert len(heard) <= 1
        GenerationConfig(top_p=0.4, do_sample=False)
        assert any("top_p" in each for each in heard)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def test_another_option_without_effect_is_named_too() -> None:
    made = make()
    for options, says in (({"top_k": 5}, "`top_k` has"), ({"temperature": 0.7}, "`temperature` has")):
        (warning,) = caught(partial(made.generate, IDS, **GREEDY, **options), times=2)
        assert str(warning.message).startswith(says)


def test_other_doors_point_at_the_caller_too(monkeypatch: pytest.MonkeyPatch) -> None:
    words = word_tokenizer(bos=True)
    planned, chats = make(tokenizer=words), make(tokenizer=CHATS)
    two = [FIRST, SECOND]
    doors: list[tuple[Callable[[], Any], str]] = [
        (lambda: [planned.plan([""]) for _ in range(2)], "an empty string"),
        (lambda: plan_prompts(["", ""], words), "empty string"),
        (lambda: [chats.generate(two, max_new_tokens=1), chats.plan(two)], "[[message], [message]]"),
        (lambda: make(tokenizer=CHATS).plan(two), "read as one chat"),
        (lambda: make(tokenizer=CHATS).score(two, choices=["w8", "w9"]), "read as one chat"),
    ]
    for call, says in doors:
        (warning,) = caught(call)
        assert warning.filename == __file__ and says in str(warning.message)

    def tight() -> None:  # what is found out when the first result is asked for
        page = make(page_size=16)._resources.kv.page_bytes
        small = make(page_size=16, min_shared_tokens=1, kv_memory=2 * page)
        for _ in range(2):
            assert len(list(small.stream([[5] * 17 + [7], [5] * 17 + [8]], max_new_tokens=14))) == 2

    (warning,) = caught(tight)
    assert "fit into the KV cache only alone" in str(warning.message)
    assert warning.filename == __file__

    def inside() -> None:
        ids = torch.tensor(IDS)
        with accelerated(build(FAMILY)) as model:
            for _ in range(2):
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, max_length=40)

    (warning,) = caught(inside)
    assert warning.filename == __file__

    look = resources.inspect_model
    monkeypatch.setattr(
        resources, "inspect_model", lambda model: dataclasses.replace(look(model), device=torch.device("mps"))
    )
    (warning,) = caught(make)
    assert "attention on mps runs in plain PyTorch" in str(warning.message)
    assert warning.filename == __file__

    class Own(BatchGenerator):
        def __init__(self, model: Any) -> None:
            super().__init__(model)

    (warning,) = caught(lambda: Own(build(FAMILY)))
    assert warning.filename == __file__


def test_cells_of_a_notebook_do_not_repeat_it() -> None:
    room: dict[str, Any] = {"__name__": "__main__", "made": make(), "prompts": IDS}

    def run_cells() -> None:
        for number in range(3):
            cell = "\n" * number + "made.generate(prompts, max_new_tokens=1, temperature=0.5)"
            exec(compile(cell, f"/tmp/ipykernel_1/{number}.py", "exec"), room)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        run_cells()
    assert [warning.filename for warning in said] == ["/tmp/ipykernel_1/0.py"]


def test_nothing_is_said_without_a_reason(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = build(FAMILY).generation_config
    for name, value in {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 100, "do_sample": True}.items():
        monkeypatch.setattr(defaults, name, value)  # a checkpoint's own: nobody asked for them in the call
    made = make(tokenizer=word_tokenizer(), config=BatchConfig())
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)

    def calls() -> None:
        made.generate(["w5 w6", "w5"], max_new_tokens=2, do_sample=False)
        made.generate(["w5 w6", "w5"], max_new_tokens=2)
        made.generate(IDS, GenerationConfig(max_new_tokens=2, do_sample=False))
        made.generate(IDS, max_new_tokens=2, do_sample=False, top_k=50, temperature=1.0, max_length=None)
        list(made.stream(IDS, max_new_tokens=2, do_sample=True, top_p=0.5))

    assert caught(calls, times=2) == []
    assert not [record for record in caplog.records if "pad_token_id" in record.getMessage()]
    with pytest.raises(UnsupportedOptionError):
        made.generate(IDS, max_gen_toks=2)


@pytest.mark.parametrize("prompts", [[FIRST, ANSWER, SECOND], [[FIRST, SECOND]], [[FIRST], [SECOND]], [FIRST]], ids=str)
def test_other_chats_are_as_they_are(prompts: list[Any]) -> None:
    assert not caught(lambda: make(tokenizer=CHATS).generate(prompts, max_new_tokens=1))


def test_missing_prompts_come_before_warnings_of_options() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PromptsTypeError, match="prompts is None"):
            make().generate()


# -- completion, and words of a report ------------------------------------------------------------------------


def test_the_signature_names_the_fields_of_the_config() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(BatchConfig)}
    shown = inspect.signature(BatchGenerator).parameters
    assert {name: shown[name].default for name in fields} == fields
    assert get_type_hints(ConfigFields) == get_type_hints(BatchConfig)
    assert list(shown)[:3] == ["model", "tokenizer", "config"]
    assert BatchGenerator(build("llama"), page_size=16).config == BatchConfig(page_size=16)


def test_completion_offers_what_the_docstring_names() -> None:
    described = inspect.getdoc(BatchGenerator) or ""
    for name in (name for name in dir(make()) if not name.startswith("_")):
        attribute = inspect.getattr_static(BatchGenerator, name, None)
        assert inspect.getdoc(attribute) or f"``{name}``" in described, name


def test_an_interrupted_report_does_not_claim_what_was_only_planned() -> None:
    report = make().generate([[5] * 40 + [6], [5] * 40 + [7]], max_new_tokens=1).report
    assert report is not None and "% saved)" in str(report) and "saved by the plan" not in report._repr_html_()
    broken = dataclasses.replace(report, finished=0, computed_tokens=0, steps=1)
    assert "0 computed (48.8% saved by the plan of the whole call)" in str(broken) and "in 1 step\n" in str(broken)
    assert "of prompt tokens saved by the plan" in broken._repr_html_()
