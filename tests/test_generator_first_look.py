"""What a notebook's user meets first: completion, early errors and warnings in their order, words of a report."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any, get_type_hints

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchConfig, BatchGenerator, PromptsTypeError
from hf_batchllm.inputs.config_fields import ConfigFields


def make() -> BatchGenerator:
    return BatchGenerator(build("llama"), word_tokenizer(97, template=True))


# -- completion ------------------------------------------------------------------------------------------------


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


# -- the order of what is said ---------------------------------------------------------------------------------


def test_missing_prompts_come_before_warnings_of_options() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PromptsTypeError, match="prompts is None"):
            make().generate()


# -- messages that may be meant as a chat each -----------------------------------------------------------------

FIRST, SECOND = {"role": "user", "content": "w5"}, {"role": "user", "content": "w6"}
ANSWER = {"role": "assistant", "content": "w7"}


def test_two_messages_of_the_user_in_a_row_are_warned_of_once() -> None:
    gen = make()
    with pytest.warns(
        UserWarning, match=r"list of 2 messages is read as one chat.*\[\[message\], \[message\]\]"
    ) as given:
        assert len(gen.generate([FIRST, SECOND], max_new_tokens=1)) == 1
    assert len(given) == 1 and given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gen.generate([FIRST, SECOND], max_new_tokens=1)
        gen.plan([FIRST, SECOND])
    with pytest.warns(UserWarning, match="read as one chat"):
        make().plan([FIRST, SECOND])
    with pytest.warns(UserWarning, match="read as one chat"):
        make().score([FIRST, SECOND], choices=["w8", "w9"])


@pytest.mark.parametrize("prompts", [[FIRST, ANSWER, SECOND], [[FIRST, SECOND]], [[FIRST], [SECOND]], [FIRST]], ids=str)
def test_other_chats_are_as_they_are(prompts: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().generate(prompts, max_new_tokens=1)


# -- words of a report -----------------------------------------------------------------------------------------


def test_an_interrupted_report_does_not_claim_what_was_only_planned() -> None:
    report = make().generate([[5] * 40 + [6], [5] * 40 + [7]], max_new_tokens=1).report
    assert report is not None and "% saved)" in str(report) and "saved by the plan" not in report._repr_html_()
    broken = dataclasses.replace(report, finished=0, computed_tokens=0, steps=1)
    assert "0 computed (48.8% saved by the plan of the whole call)" in str(broken) and "in 1 step\n" in str(broken)
    assert "of prompt tokens saved by the plan" in broken._repr_html_()
