"""``schema``, ``regex``, ``grammar`` and ``choice``: what is taken, and what is wrong with a value, before any work."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support_grammars import END_OF_BYTES, letters, of_bytes
from support_letter_tokenizers import EOS
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, OptionValueError, PromptError, UnsupportedOptionError
from hf_batchllm.errors import TokenizerError
from hf_batchllm.inputs.grammar_options import Grammar, checked_grammar, take_grammars

ANY_OBJECT = Grammar("schema", '{"type": "object"}')
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


class Model:
    """As a class of pydantic's."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


class Broken:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        raise TypeError("no schema of a Callable")


@pytest.mark.parametrize("value", [SCHEMA, json.dumps(SCHEMA), json.dumps(SCHEMA, indent=4), Model])
def test_forms_of_a_schema(value: Any) -> None:
    assert checked_grammar("schema", value) == Grammar("schema", json.dumps(SCHEMA)), "in the order of its fields"


def test_a_class_of_pydantics() -> None:
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("Person", name=(str, ...), age=(int, ...))
    schema = json.loads(checked_grammar("schema", person).text)
    assert schema["required"] == ["name", "age"]


@pytest.mark.parametrize("value", [True, "json_object", "json", {"type": "object"}])
def test_any_object(value: Any) -> None:
    assert checked_grammar("schema", value) == ANY_OBJECT


def of_each(count: int, **options: Any) -> list[Grammar | None]:
    given = take_grammars(options)
    assert given is not None and not options
    found, wrong = given.of_each(count)
    assert not wrong
    return found


def test_one_for_all_or_one_for_each() -> None:
    a, b = Grammar("regex", "a"), Grammar("regex", "b")
    assert of_each(3, regex="a") == [a, a, a]
    assert (
        of_each(3, regex=["a", None, "b"]) == of_each(3, regex=np.array(["a", None, "b"], dtype=object)) == [a, None, b]
    )
    both = Grammar("choice", '["a", "b"]')
    assert of_each(2, choice=["a", "b"]) == of_each(2, choice=[["a", "b"]] * 2) == [both, both]
    assert of_each(2, choice=[None, ("a", "b")]) == [None, both]
    assert of_each(3, regex=["a", None, None], schema=[None, True, False]) == [a, ANY_OBJECT, None]
    for nothing in ({}, {"regex": None, "schema": False}, {"choice": [None, None]}):
        assert take_grammars(dict(nothing)) is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": 5}, "`schema` must be a JSON schema .*not 5"),
    ({"schema": "{"}, r"`schema` is not JSON \(.*\): '{'"),
    ({"schema": "[1]"}, r"`schema` is JSON of a list, and a schema is an object: '\[1\]'"),
    ({"schema": {"a": {1, 2}}}, r"`schema` holds what JSON cannot hold \(Object of type set is not"),
    ({"schema": {"a": float("nan")}}, "`schema` holds what JSON cannot hold"),
    ({"schema": Broken}, "`schema` is the class Broken, of which pydantic makes no schema: no schema of a Callable"),
    ({"schema": {"type": "strin"}}, "`schema` cannot be used: llguidance says: Invalid type: strin"),
    ({"schema": {"uniqueItems": True}}, '`schema` cannot be used: llguidance says: Unimplemented keys: ."uniqueItems"'),
    ({"regex": 5}, r"`regex` must be a regular expression \(a string\).*not 5"),
    ({"regex": " "}, "`regex` is ' ': it must be a regular expression. Leave it out for a free answer"),
    ({"regex": "(a"}, "`regex` cannot be used: llguidance says: .*unclosed group"),
    ({"regex": "xyz"}, "`regex` cannot begin with any token of this tokenizer: llguidance says"),
    ({"grammar": "start: x"}, '`grammar` cannot be used: llguidance says: .*unknown name: "x"'),
    ({"choice": "a"}, "`choice` must be a list of strings, or a list of such lists.*not 'a'"),
    ({"choice": []}, "`choice` is empty, so there is nothing to choose from"),
    ({"choice": ["a", 5]}, "`choice` holds 5: each answer to choose from is a string"),
    ({"choice": ["\ud800"]}, "`choice` holds half a character"),
    ({"regex": "a", "choice": ["a"]}, "`choice` does not go with `regex`: an answer has one form"),
    ({"regex": ["a"]}, "`regex` is a list of 1 and there are 3 prompts: it must have one for each"),
    ({"regex": "a", "min_new_tokens": 2}, "`min_new_tokens` does not go with `regex`"),
    ({"regex": "a", "forced_eos_token_id": EOS}, "`forced_eos_token_id` does not go with `regex`"),
    ({"regex": "a", "num_beams": 2}, "`regex` does not go with `num_beams`"),
    ({"regex": "a", "eos_token_id": None}, "`regex` ends an answer by an EOS token, and there is none"),
]


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(*letters())


@pytest.mark.parametrize(("options", "why"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_for_all(options: dict[str, Any], why: str, generator: BatchGenerator) -> None:
    with pytest.raises(UnsupportedOptionError, match=why):
        generator.generate([[1], [2], [3]], max_new_tokens=3, **{"eos_token_id": EOS, **options})


OF_ONE: list[tuple[dict[str, Any], str]] = [
    ({"regex": [None, 5, None]}, "prompt 1 has a `regex` that must be a regular expression"),
    ({"regex": ["a", "(b", None]}, "prompt 1 has a `regex` that cannot be used: llguidance says: .*unclosed group"),
    ({"choice": [None, [], None]}, "prompt 1 has a `choice` that is empty"),
    ({"schema": [True, "x", None]}, "prompt 1 has a `schema` that is not JSON"),
    (
        {"regex": [None, "a", None], "choice": [None, ["a"], None]},
        "prompt 1 has `regex` and `choice`: an answer has one",
    ),
    ({"regex": [None, "a", None], "grammar": "start: x"}, "`grammar` cannot be used"),
]


@pytest.mark.parametrize(("options", "why"), OF_ONE, ids=lambda value: str(value)[:40])
def test_a_wrong_value_for_one_prompt(options: dict[str, Any], why: str, generator: BatchGenerator) -> None:
    with pytest.raises((PromptError, OptionValueError), match=why):
        generator.generate([[1], [2], [3]], max_new_tokens=3, eos_token_id=EOS, **options)


def test_the_others_run() -> None:
    with BatchGenerator(*letters()) as generator:
        result = generator.generate(
            [[1], [2], [3]], regex=["a", "(b", None], max_new_tokens=3, eos_token_id=EOS, on_error="record"
        )
        assert [row.error is None for row in result] == [True, False, True] and result[0].text == "a"
        assert "has a `regex` that cannot be used" in (result[1].error or "")
        configs = [GenerationConfig(max_new_tokens=3, min_new_tokens=place) for place in (0, 2)]
        result = generator.generate(
            [[1], [2]], configs, regex=["a", "a"], eos_token_id=EOS, on_error="record", do_sample=False
        )
        assert result[0].text == "a" and "has a `min_new_tokens` that does not go with `regex`" in (
            result[1].error or ""
        )


def test_a_tokenizer_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = letters()
    with BatchGenerator(model) as generator:
        with pytest.raises(TokenizerError, match=r"`regex` needs a tokenizer: .*, or pass `tokenizer=` here"):
            generator.generate([[1]], regex="a", max_new_tokens=3, eos_token_id=EOS)
        (row,) = generator.generate([[1]], regex="a", max_new_tokens=3, eos_token_id=EOS, tokenizer=tokenizer)
        assert row.token_ids == [0, EOS]


def test_it_is_no_option_of_a_config() -> None:
    with BatchGenerator(*letters()) as generator, pytest.raises(UnsupportedOptionError, match="pass regex= beside it"):
        generator.generate([[1]], GenerationConfig(regex="a"))


def test_what_the_grammar_library_warns_of_is_passed_on() -> None:
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    says = pytest.warns(UserWarning, match='`schema`: llguidance says: Unimplemented keys: ."uniqueItems"')
    with BatchGenerator(*of_bytes()) as generator, says:
        generator.generate([[1]], schema=lenient, max_new_tokens=2, eos_token_id=END_OF_BYTES)
