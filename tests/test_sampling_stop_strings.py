"""Strings that end a sequence: found where ``generate`` finds them, in tables made as transformers makes them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_families import build
from support_kernels import plain
from support_letter_tokenizers import letter_tokenizer
from support_parity import watched as watched  # a fixture
from support_stopping import FAMILY, PROMPTS, TOKENIZER, ends_as_alone, make, text_of
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, StopStringCriteria

from hf_batchllm import BatchGenerator
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling import stop_rules
from hf_batchllm.sampling.stop_string_tables import DecodedVocabulary, QuickStopStrings
from hf_batchllm.sampling.stop_strings import StopStringSearch

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]

STRINGS: dict[str, list[str]] = {
    "one": ["dd"],
    "several": ["abc", "eb", "ffff", "dcb"],
    "longer than most prompts": [text_of(PROMPTS[3], 5, 40), "cab"],
    "of one letter": ["c"],
    "never": ["fedcbafedcba"],
}


@pytest.mark.some_cases
@pytest.mark.parametrize(("strings", "share"), [*((each, True) for each in STRINGS), ("several", False)])
def test_strings_end_where_they_end_in_generate(strings: str, share: bool, watched: list[Any]) -> None:
    result = ends_as_alone({"stop_strings": STRINGS[strings]}, share_prefixes=share, page_size=8)
    assert {generation.finish_reason for generation in result} <= {"stop", "length"}
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.parametrize("bytes_in_tokens", [True, False])
def test_a_string_may_begin_in_the_prompt(bytes_in_tokens: bool) -> None:
    tokenizer = letter_tokenizer(bytes_in_tokens)
    prompt = PROMPTS[0][:6]
    whole, after = tokenizer.decode(prompt), text_of(prompt, 0, 2)
    for strings in (whole[-3:] + after, whole + after[:1], "x" + whole + after[:1], whole):
        result = ends_as_alone({"stop_strings": strings, "tokenizer": tokenizer}, prompts=[prompt])
        assert strings != whole + after[:1] or (len(result[0].token_ids), result[0].finish_reason) == (1, "stop")


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_many_rows_at_once_are_found_as_transformers_finds_each(data: Any) -> None:
    text = st.text("abcdef", min_size=1, max_size=9)
    strings = data.draw(st.lists(text, min_size=1, max_size=3))
    rows, times = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    one = StopStringCriteria(letter_tokenizer(data.draw(st.booleans())), strings)
    token = st.integers(0, 130)  # some are beyond the tokenizer's vocabulary
    tokens = np.array([[data.draw(token) for _ in range(times)] for _ in range(rows)])
    requests, before = [], []
    for index in range(rows):
        before.append(data.draw(st.lists(token, min_size=1, max_size=12)))
        split = data.draw(st.integers(1, len(before[-1])))
        requests.append(Request(index, np.array(before[-1][:split], np.int32), 100))
        requests[-1].generated = before[-1][split:]
    real = {row: data.draw(st.integers(0, times)) for row in range(rows)}
    found = StopStringSearch(one, lambda request: request.prompt_ids).first(requests, list(range(rows)), real, tokens)
    for row in range(rows):
        ids = torch.tensor([[*before[row], *tokens[row]]])
        ends = [has for has in range(1, real[row] + 1) if one(ids[:, : len(before[row]) + has], None)]  # type: ignore[arg-type]
        assert found.get(row) == (ends[0] if ends else None)


def test_a_tokenizer_may_be_given_to_the_call() -> None:
    assert BatchGenerator(build(FAMILY)).generate([[5, 6]], max_new_tokens=2, stop_strings="a", tokenizer=TOKENIZER)


def test_a_generation_config_of_the_model_may_hold_strings() -> None:
    model = copy.deepcopy(build(FAMILY))
    model.generation_config.stop_strings = ["dd"]
    ends_as_alone({"stop_strings": ["dd"]}, {}, generator=BatchGenerator(model, TOKENIZER))


def test_prompts_with_the_same_strings_have_them_looked_for_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole vocabulary is gone through to make it."""
    made, embed = [], QuickStopStrings.clean_and_embed_tokens_with_cache

    def counted(self: StopStringCriteria, *given: Any) -> Any:
        made.append(self.stop_strings)
        return embed(self, *given)

    monkeypatch.setattr(QuickStopStrings, "clean_and_embed_tokens_with_cache", counted)
    each: list[dict[str, Any]] = [
        {"max_new_tokens": 3 + index, "stop_strings": (["dd", "ab"], "dd", ["dd"])[index % 3]}
        for index in range(len(PROMPTS))
    ]
    configs = [GenerationConfig(**options) for options in each]
    tokenizer = copy.deepcopy(TOKENIZER)
    generator = BatchGenerator(build(FAMILY), tokenizer)
    for new in ([("dd",), ("dd", "ab")], []):  # the second time they are known
        made.clear()
        ends_as_alone(lambda index: each[index], {"generation_config": configs}, generator=generator)
        assert sorted(made) == new
    made.clear()
    tokenizer.add_tokens(["ddd"])
    generator.generate(PROMPTS, configs, progress=False)
    assert len(made) == 2
    made.clear()
    theirs = {"stopping_criteria": [StopStringCriteria(TOKENIZER, ["c"])]}
    ends_as_alone(lambda index: each[index] | theirs, {"generation_config": configs, **theirs})


TOKENS = "a b ab ba aba Ġa Ċ Ċb Ã © Ã© ▁a ▁ ##b <0x0A> <0xC3> <0xA9> é".split()


@pytest.mark.parametrize("decoder", ["none", "byte_level", "byte_fallback", "word_piece"])
def test_tables_for_strings_are_those_of_transformers(decoder: str) -> None:
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    kinds = {
        "byte_level": decoders.ByteLevel(),
        "byte_fallback": decoders.Sequence(fallback),
        "word_piece": decoders.WordPiece(),
    }
    names = ["[UNK]", "abcdef", *TOKENS]
    tokenizer = Tokenizer(models.WordLevel({name: 3 * place for place, name in enumerate(names)}, unk_token="[UNK]"))
    if decoder in kinds:
        tokenizer.decoder = kinds[decoder]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    vocabulary = DecodedVocabulary(fast)
    for strings in [("a",), ("ab",), ("abab", "b"), ("\n", "bé"), ("a b",), ("é",), ("zzz",), ("z", "a")]:
        try:
            expected = StopStringCriteria(fast, list(strings))
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)[:40]):
                QuickStopStrings(fast, strings, vocabulary)
            continue
        made = QuickStopStrings(fast, strings, vocabulary)
        assert vars(made).keys() == vars(expected).keys()
        for name, value in vars(expected).items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: one == other
            assert same(getattr(made, name), value), (strings, name)


def test_a_new_string_needs_no_new_look_at_the_vocabulary() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    generator = BatchGenerator(build(FAMILY), tokenizer)
    generator.generate(PROMPTS[:1], max_new_tokens=2, stop_strings="a", progress=False)
    looks: list[int] = []

    def counted() -> Any:
        looks.append(1)
        return type(tokenizer).get_vocab(tokenizer)

    tokenizer.get_vocab = counted
    ends_as_alone({"stop_strings": "dd"}, generator=generator)
    assert not looks


def test_many_different_strings_take_long_to_prepare_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_rules, "_LONG_PREPARATION", 2 * 101)
    generator = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate(PROMPTS[:2], [GenerationConfig(max_new_tokens=2, stop_strings=each) for each in "ab"])
    configs = [GenerationConfig(max_new_tokens=2, stop_strings=each) for each in "abc"]
    with pytest.warns(UserWarning, match="prompts have 3 different `stop_strings`.* all 101 tokens"):
        generator.generate(PROMPTS[:3], configs)
