"""What ends a sequence: strings, criteria of the user's own, EOS of each prompt. ``generate``, one prompt at a time, is
the oracle; on the device's loop rows run on after the host has seen an end, and nobody may notice."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_device_loop import assert_adds_up
from support_device_loop import device as device  # a fixture
from support_families import build
from support_kernels import plain
from support_letter_tokenizers import EOS, letter_tokenizer
from support_parity import mixed_prompts, pages_of_memory, reference
from support_parity import watched as watched  # a fixture
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation import EosTokenCriteria

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.errors import OptionValueError, TokenizerError
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling import stop_rules
from hf_batchllm.sampling.stop_string_tables import DecodedVocabulary, QuickStopStrings
from hf_batchllm.sampling.stop_strings import StopStringSearch

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]
FAMILY = "llama"
NEW_TOKENS = 24
TOKENIZER = letter_tokenizer()
PROMPTS = mixed_prompts(2)


def make(**fields: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), TOKENIZER, **fields)


_ALONE: dict[str, list[int]] = {}


def alone(prompt: Sequence[int], **options: Any) -> list[int]:
    """What ``generate`` makes of one prompt."""
    key = str((list(prompt), options))
    if key not in _ALONE:
        _ALONE[key] = generated(prompt, **options)
    return _ALONE[key]


def generated(prompt: Sequence[int], **options: Any) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": NEW_TOKENS, **options}
    if "stop_strings" in options:
        options.setdefault("tokenizer", TOKENIZER)
    return build(FAMILY).generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def assert_as_alone(
    result: Any, prompts: Sequence[Sequence[int]], options: Callable[[int], dict[str, Any]] | dict[str, Any]
) -> None:
    """Up to the first token that rounding decides."""
    whole = 0
    for index, prompt in enumerate(prompts):
        chosen = options(index) if callable(options) else options
        expected, got = alone(prompt, **chosen), result[index].token_ids
        _, sure = reference(FAMILY, tuple(prompt), NEW_TOKENS)
        assert got[:sure] == expected[:sure]
        if sure >= len(expected):
            whole += 1
            assert got == expected
            reason = "length" if len(expected) == chosen.get("max_new_tokens", NEW_TOKENS) else "stop"
            assert result[index].finish_reason == reason or (reason == "length" and len(got) == len(expected))
    assert whole >= 0.8 * len(prompts)


def text_of(prompt: Sequence[int], begin: int = 0, end: int | None = None) -> str:
    return TOKENIZER.decode(reference(FAMILY, tuple(prompt), NEW_TOKENS)[0])[begin:end]


class Below(StoppingCriteria):
    """Ends where the last token's id is below a number; it remembers what it was asked."""

    def __init__(self, bound: int, makes: Callable[[bool], Any] = bool) -> None:
        self.bound, self.makes = bound, makes
        self.asked: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        assert input_ids.dtype == torch.long and not kwargs and not torch.is_grad_enabled()
        self.asked.append((input_ids[0].tolist(), scores))
        return self.makes(int(input_ids[0, -1]) < self.bound)

    def __repr__(self) -> str:
        return f"Below({self.bound})"


# -- strings ---------------------------------------------------------------------------------------------------

STRINGS: dict[str, list[str]] = {
    "one": ["dd"],
    "several": ["abc", "eb", "ffff", "dcb"],
    "longer than most prompts": [text_of(PROMPTS[3], 5, 40), "cab"],
    "of one letter": ["c"],
    "never": ["fedcbafedcba"],
}


@pytest.mark.parametrize(("strings", "share"), [*((each, True) for each in STRINGS), ("several", False)])
def test_strings_end_where_they_end_in_generate(strings: str, share: bool, watched: list[Any]) -> None:
    given: Any = STRINGS[strings]
    generator = make(share_prefixes=share, page_size=8)
    result = generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS, stop_strings=given, progress=False)
    assert_as_alone(result, PROMPTS, {"stop_strings": given})
    assert {generation.finish_reason for generation in result} <= {"stop", "length"}
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.parametrize("bytes_in_tokens", [True, False])
def test_a_string_may_begin_in_the_prompt(bytes_in_tokens: bool) -> None:
    tokenizer = letter_tokenizer(bytes_in_tokens)
    prompt = PROMPTS[0][:6]
    whole, after = tokenizer.decode(prompt), text_of(prompt, 0, 2)
    with make() as generator:
        for strings in (whole[-3:] + after, whole + after[:1], "x" + whole + after[:1], whole):
            options = {"stop_strings": strings, "tokenizer": tokenizer}
            assert_as_alone(generator.generate([prompt], max_new_tokens=NEW_TOKENS, **options), [prompt], options)
        ends = generator.generate([prompt], max_new_tokens=9, stop_strings=whole + after[:1], tokenizer=tokenizer)
        assert len(ends[0].token_ids) == 1 and ends[0].finish_reason == "stop"


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


def test_strings_need_a_tokenizer_and_say_so() -> None:
    with BatchGenerator(build(FAMILY)) as generator:
        with pytest.raises(TokenizerError, match=r"`stop_strings` need a tokenizer.*or pass `tokenizer=` here"):
            generator.generate([[5, 6]], stop_strings="a")
        assert generator.generate([[5, 6]], max_new_tokens=2, stop_strings="a", tokenizer=TOKENIZER)
        for wrong, why in (
            ("", "an empty string ends"),
            ([], "which names no string"),
            (["a", ""], "an empty string ends"),
        ):
            with pytest.raises(OptionValueError, match=f"`stop_strings` is .* {why}"):
                generator.generate([[5, 6]], stop_strings=wrong, tokenizer=TOKENIZER)
        with pytest.raises(OptionValueError, match="`stop_strings` cannot be looked for in tokens of this tokenizer"):
            generator.generate([[5, 6]], stop_strings="xyz", tokenizer=TOKENIZER)


def test_a_generation_config_of_the_model_may_hold_strings() -> None:
    model = copy.deepcopy(build(FAMILY))
    model.generation_config.stop_strings = ["dd"]
    result = BatchGenerator(model, TOKENIZER).generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert_as_alone(result, PROMPTS, {"stop_strings": ["dd"]})


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
        result = generator.generate(PROMPTS, configs, progress=False)
        assert sorted(made) == new
        assert_as_alone(result, PROMPTS, lambda index: each[index])
    made.clear()
    tokenizer.add_tokens(["ddd"])
    generator.generate(PROMPTS, configs, progress=False)
    assert len(made) == 2
    made.clear()
    theirs = {"stopping_criteria": [StopStringCriteria(TOKENIZER, ["c"])]}
    result = make().generate(PROMPTS, configs, progress=False, **theirs)
    assert_as_alone(result, PROMPTS, lambda index: each[index] | theirs)


TOKENS = "a b ab ba aba Ġa Ċ Ċb Ã © Ã© ▁a ▁ ##b <0x0A> <0xC3> <0xA9> é".split()


@pytest.mark.parametrize("decoder", ["none", "byte_level", "byte_fallback", "word_piece"])
def test_tables_for_strings_are_those_of_transformers(decoder: str) -> None:
    kinds = {
        "byte_level": lambda: decoders.ByteLevel(),
        "byte_fallback": lambda: decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
        "word_piece": lambda: decoders.WordPiece(),
    }
    names = ["[UNK]", "abcdef", *TOKENS]
    tokenizer = Tokenizer(models.WordLevel({name: 3 * place for place, name in enumerate(names)}, unk_token="[UNK]"))
    if decoder in kinds:
        tokenizer.decoder = kinds[decoder]()
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
    result = generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS, stop_strings="dd", progress=False)
    assert_as_alone(result, PROMPTS, {"stop_strings": "dd"})
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


# -- criteria of the user's own --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "makes",
    [bool, lambda ends: torch.tensor([ends]), lambda ends: torch.tensor(ends)],
    ids=["bool", "tensor", "scalar"],
)
def test_a_criterion_is_asked_what_generate_asks_it(makes: Any, watched: list[Any]) -> None:
    asked, prompts = [], PROMPTS if makes is bool else PROMPTS[:4]
    for prompt in prompts:
        criterion = Below(8, makes)
        generated(prompt, stopping_criteria=[criterion], eos_token_id=[60, 61], pad_token_id=0)
        asked.append(criterion.asked)
    criterion = Below(8, makes)
    options = {"stopping_criteria": [criterion], "eos_token_id": [60, 61], "pad_token_id": 0}
    result = make(page_size=8).generate(prompts, max_new_tokens=NEW_TOKENS, **options)
    assert_as_alone(result, prompts, options)
    for prompt, expected in zip(prompts, asked, strict=True):
        # A prompt that is in the list twice is asked about twice.
        times = sum(other == prompt for other in prompts)
        mine = [ids for ids, scores in criterion.asked if ids[: len(prompt)] == prompt and scores is None]
        assert all(mine.count(ids) >= times for ids, _ in expected)
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_plain_functions_and_several_criteria() -> None:
    options = {
        "stopping_criteria": [
            lambda ids, scores, **rest: ids.shape[1] >= 30,
            Below(4),
            StopStringCriteria(TOKENIZER, ["abc"]),
        ],
        "stop_strings": ["dd"],  # whose place is taken
    }
    result = make().generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options)
    assert_as_alone(result, PROMPTS, options)


@pytest.mark.parametrize(
    "given",
    [
        [MaxLengthCriteria(40)],
        [MaxLengthCriteria(5)],  # there is one token at least
        [MaxLengthCriteria(60), MaxLengthCriteria(44)],
        [EosTokenCriteria(7)],
        [EosTokenCriteria([9, 10]), EosTokenCriteria(torch.tensor([11, 85]))],
    ],
)
def test_the_users_take_the_place_of_those_that_the_options_ask_for(given: list[Any]) -> None:
    options = {"stopping_criteria": given, "eos_token_id": list(range(20, 40)), "pad_token_id": 0}
    result = make().generate(PROMPTS, max_new_tokens=NEW_TOKENS, progress=False, **options)
    for prompt, generation in zip(PROMPTS, result, strict=True):
        expected = alone(prompt, **options)
        _, sure = reference(FAMILY, tuple(prompt), NEW_TOKENS)
        if sure >= NEW_TOKENS and len(expected) <= NEW_TOKENS:
            assert generation.token_ids == expected


def test_min_new_tokens_hold_back_the_options_eos_and_no_other() -> None:
    options = {"stopping_criteria": [EosTokenCriteria(85)], "eos_token_id": [45], "min_new_tokens": 12}
    assert_as_alone(
        make().generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options), PROMPTS, options | {"pad_token_id": 0}
    )


def test_a_longer_max_length_than_the_options_is_the_one_that_counts() -> None:
    result = make().generate([PROMPTS[0]], max_new_tokens=3, stopping_criteria=[MaxLengthCriteria(len(PROMPTS[0]) + 9)])
    assert len(result[0].token_ids) == 9 and result[0].finish_reason == "length"


@pytest.mark.parametrize("further", [2, 9])
def test_the_options_length_is_still_where_they_force_an_eos(further: int) -> None:
    """A MaxLengthCriteria takes the place of a criterion, and no processor knows of it."""
    prompt = PROMPTS[0]
    options = {"forced_eos_token_id": 99, "max_new_tokens": 5, "pad_token_id": 0}
    options |= {"stopping_criteria": [MaxLengthCriteria(len(prompt) + further)]}
    result = make().generate([prompt], **options)
    assert result.token_ids[0] == generated(prompt, **options) and (99 in result.token_ids[0]) == (further == 9)


def test_with_tensors_a_max_length_counts_the_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    options = {"attention_mask": mask, "pad_token_id": 0, "stopping_criteria": [MaxLengthCriteria(9)]}
    expected = build(FAMILY).generate(ids, **options)
    assert make().generate(input_ids=ids, **options).tolist() == expected.tolist() and expected.shape == (2, 9)


class Counts(StoppingCriteria):
    """Ends after so many calls: one of it cannot serve two sequences."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        self.left -= 1
        return self.left <= 0


def test_a_factory_gives_each_sequence_criteria_of_its_own() -> None:
    made: list[tuple[int, list[int]]] = []

    def factory(index: int, prompt_token_ids: list[int]) -> list[Any]:
        made.append((index, prompt_token_ids))
        return [Counts(index + 2)]

    prompts = PROMPTS[:5]
    result = make().generate(prompts, max_new_tokens=NEW_TOKENS, stopping_criteria=factory)
    assert [len(tokens) for tokens in result.token_ids] == [2, 3, 4, 5, 6]
    assert sorted(made) == [(index, list(prompt)) for index, prompt in enumerate(prompts)]
    options = {"do_sample": True, "num_return_sequences": 3, "seed": 1, "stopping_criteria": factory}
    result = make().generate(prompts[:2], max_new_tokens=NEW_TOKENS, **options)
    assert [len(tokens) for tokens in result.token_ids] == [2, 2, 2, 3, 3, 3]
    assert [index for index, _ in made[5:]].count(0) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Below(3), r"`stopping_criteria` is a single criterion \(Below\): put it into a list"),
        (5, "must be a list of criteria, or a function that gives a list for each sequence, not an int"),
        ([Below(3), "stop"], "holds a string at place 1, which is not a criterion"),
        (lambda ids, scores: False, r"is a single criterion \(<lambda>\): put it into a list"),
    ],
)
def test_what_is_no_list_of_criteria(given: Any, message: str) -> None:
    with make() as generator, pytest.raises(OptionValueError, match=message):
        generator.generate([[5, 6]], max_new_tokens=3, stopping_criteria=given)


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_what_a_criterion_raises_comes_out(error: BaseException, device: str, watched: list[Any]) -> None:
    def raises(ids: torch.Tensor, scores: Any, **rest: Any) -> bool:
        if ids.shape[1] > 40:
            raise error
        return ids.shape[1] == 12

    prompts = [[5, 6, 7, 8], list(range(30)), [5, 6, 7], list(range(34))]
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    generator = BatchGenerator(model, steps_per_sync=8, page_size=4)
    with pytest.raises(GenerationInterrupted if isinstance(error, KeyboardInterrupt) else type(error)) as caught:
        generator.generate(prompts, max_new_tokens=NEW_TOKENS, stopping_criteria=[raises])
    if isinstance(error, KeyboardInterrupt):
        assert [generation.index for generation in caught.value.result] in ([0, 2], [2], [])
    report = generator.last_report
    assert report is not None and report.computed_tokens == generator.plan(prompts).computed_tokens
    assert all(cache.free_pages == cache.num_pages for cache in watched)
    assert_as_alone(generator.generate(prompts, max_new_tokens=NEW_TOKENS), prompts, {})


# -- each prompt its own ---------------------------------------------------------------------------------------


def test_every_prompt_has_its_own_eos_and_strings(watched: list[Any]) -> None:
    each: list[dict[str, Any]] = [
        {"eos_token_id": [*range(10)], "pad_token_id": 0},
        {"eos_token_id": [*range(50, 58)], "pad_token_id": 0},
        {"stop_strings": ["ab"]},
        {"stop_strings": ["dd", "eeb"], "eos_token_id": 85, "pad_token_id": 0},
        {},
    ]
    made = [GenerationConfig(max_new_tokens=NEW_TOKENS, **options) for options in each]
    configs = [made[index % len(made)] for index in range(len(PROMPTS))]
    result = make(page_size=8).generate(PROMPTS, configs, progress=False)
    assert_as_alone(result, PROMPTS, lambda index: each[index % len(each)])
    assert all(cache.free_pages == cache.num_pages for cache in watched)


# -- on the device's loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7, 32])
def test_ends_that_only_the_host_sees(steps: int, device: str, watched: list[Any]) -> None:
    """Rows run on for up to two bursts, beyond pages that are others' by then."""
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    prompts = mixed_prompts(3)
    options = {"stop_strings": ["abc", "dd"], "eos_token_id": [*range(3, 97, 31)], "pad_token_id": 0}
    options |= {"stopping_criteria": [Below(5)]}
    generator = BatchGenerator(model, TOKENIZER, steps_per_sync=steps, page_size=4, max_batch_tokens=64)
    result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False, **options)
    assert_as_alone(result, prompts, options)
    assert_adds_up(generator, prompts, result, steps)
    assert result.report.idle_tokens > 0 or steps == 1
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.parametrize(("steps", "scheduler"), [(2, "groups"), (8, "groups"), (8, "fifo")])
def test_pages_of_an_ended_row_are_written_by_it_only_before_their_next_owner_comes(
    steps: int, scheduler: str, device: str, watched: list[Any]
) -> None:
    """So little memory that a page freed is a page taken, and prefixes are kept for calls to come."""
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    prompts = PROMPTS
    options = {"stop_strings": ["abc", "dd"], "stopping_criteria": [Below(2)]}
    memory = pages_of_memory(build(FAMILY), 28, 4)
    generator = BatchGenerator(
        model, TOKENIZER, steps_per_sync=steps, page_size=4, kv_memory=memory, min_shared_tokens=4,
        keep_prefixes=3, scheduler=scheduler,
    )  # fmt: skip
    results = [generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False, **options) for _ in range(2)]
    for result in results:
        assert_as_alone(result, prompts, options)
        assert result.report.idle_tokens > 0
    assert results[1].report.cached_tokens > 0
    if scheduler == "groups":
        assert results[0].report.preemptions > 0
    generator.close()


def test_answers_that_strings_may_end_are_looked_at_in_time(device: str) -> None:
    """Without an EOS token, too, nobody runs for long before somebody looks."""
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    generator = BatchGenerator(model, TOKENIZER, steps_per_sync=64)
    result = generator.generate([PROMPTS[0]], max_new_tokens=400, stopping_criteria=[lambda ids, scores: True])
    assert len(result[0].token_ids) == 1 and result.report.idle_tokens <= 8


# -- with tensors ----------------------------------------------------------------------------------------------


def test_rows_of_a_tensor_are_padded_once_they_have_ended() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [30, 31, 32, 33]])
    options = {"max_new_tokens": NEW_TOKENS, "stop_strings": ["dd", "ab"], "tokenizer": TOKENIZER}
    with_eos = options | {"eos_token_id": EOS, "pad_token_id": 1}
    expected = build(FAMILY).generate(ids, **with_eos)
    with make() as generator:
        assert generator.generate(input_ids=ids, **with_eos).tolist() == expected.tolist()
        with pytest.raises(OptionValueError, match="`pad_token_id` is None, and rows may end at different lengths"):
            generator.generate(input_ids=ids, **options)
        # Without an EOS token ``generate`` runs all rows on until all have ended; here they are padded.
        padded = generator.generate(input_ids=ids, pad_token_id=1, **options)
        assert padded.tolist() == expected.tolist()
        one = generator.generate(input_ids=ids[:1], **options)
        assert one.tolist() == build(FAMILY).generate(ids[:1], **options).tolist()
