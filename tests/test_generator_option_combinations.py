"""Options of ``generate``, alone and together: every row is what ``generate`` makes of its prompt by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import up_to
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from support_options import ANY, DRAWN, SEED, WITH, _prompts, _tokens
from support_oracle import check_row
from transformers import GenerationConfig, PreTrainedModel

from hf_batchllm import BatchGenerator, Generation, accelerated

FAMILIES = ("llama", "gemma3")
LENGTHS: list[dict[str, Any]] = [{"max_new_tokens": 8}, {"max_length": 74}, {"max_new_tokens": 1}]


@cache
def _generator(family: str) -> BatchGenerator:
    return BatchGenerator(build(family), letter_tokenizer())


def check(family: str, prompts: list[list[int]], options: dict[str, Any]) -> int:
    """How many rows were looked at to their end."""
    for name, others in WITH.items():
        if name in options:
            options = others | options
    model, tokens = build(family), _tokens(options)
    try:
        result = _generator(family).generate(prompts, seed=SEED, progress=False, **options)
    except RuntimeError:  # nothing is left to draw from
        assert any(_cannot_be_drawn(model, prompt, options | tokens) for prompt in prompts)
        return 0
    assert len(result) == len(prompts) * options.get("num_return_sequences", 1)
    return sum(check_row(model, row, options | tokens, SEED) for row in result)


def _cannot_be_drawn(model: PreTrainedModel, prompt: list[int], options: dict[str, Any]) -> bool:
    """Whether ``generate`` fails, in some of several tries."""
    ids = torch.tensor([prompt])
    for _ in range(20):
        try:
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        except RuntimeError:
            return True
    return False


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ANY)
def test_an_option_by_itself(name: str, family: str) -> None:
    prompts = _prompts(1)
    for value in ANY[name] if family == "llama" else ANY[name][-1:]:
        assert check(family, prompts, {"max_new_tokens": 8, name: value}) >= 3


@pytest.mark.some_cases
@pytest.mark.parametrize("name", [*ANY, *DRAWN])
def test_an_option_by_itself_with_sampling(name: str) -> None:
    for value in (ANY | DRAWN)[name]:
        options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2, name: value}
        assert check("llama", _prompts(2), options) >= 6


def _some(table: dict[str, list[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: st.sampled_from(table[name]) for name in chosen}))


@settings(max_examples=up_to(15))
@given(
    st.sampled_from(FAMILIES),
    st.integers(0, 1000),
    st.sampled_from(LENGTHS),
    _some(ANY, 5),
    st.one_of(st.none(), _some(DRAWN, 3)),
)
def test_options_together(
    family: str, seed: int, length: dict[str, Any], some: dict[str, Any], drawn: dict[str, Any] | None
) -> None:
    sampling = {} if drawn is None else {"do_sample": True, "num_return_sequences": 1 + seed % 2, **drawn}
    check(family, _prompts(seed, 3), {**length, **some, **sampling})


_SETTINGS = st.tuples(_some(ANY, 2), st.one_of(st.none(), _some(DRAWN, 2)))
_ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")  # of the call, not of a config


@settings(max_examples=up_to(15))
@given(st.integers(0, 1000), st.lists(_SETTINGS, min_size=4, max_size=4))
def test_each_prompt_has_its_own_settings(
    seed: int, chosen: list[tuple[dict[str, Any], dict[str, Any] | None]]
) -> None:
    every: list[dict[str, Any]] = []
    for number, (some, drawn) in enumerate(chosen):
        options = {name: value for name, value in some.items() if name not in _ARGUMENTS}
        for name in WITH.keys() & options.keys():
            options = WITH[name] | options
        every.append(
            {"max_new_tokens": 4 + number, **options} | ({} if drawn is None else {"do_sample": True, **drawn})
        )
    prompts, model = _prompts(seed), build("llama")
    configs = [GenerationConfig(**options) for options in every]
    try:
        result = _generator("llama").generate(prompts, configs, seed=SEED, progress=False)
    except RuntimeError:
        pairs = zip(prompts, every, strict=True)
        assert any(_cannot_be_drawn(model, prompt, options | _tokens(options)) for prompt, options in pairs)
        return
    assert [row.index for row in result] == list(range(4))
    for row, options in zip(result, every, strict=True):
        check_row(model, row, options | _tokens(options), SEED)


# The last draw of the third prompt is between two tokens, at distances from the entropy that differ by 1e-7.
_EDGE_SEED = 47
_ON_AN_EDGE = {"max_new_tokens": 6, "do_sample": True, "min_p": 0.3, "typical_p": 0.4, "forced_bos_token_id": 7}


@cache
def _row_on_an_edge() -> Generation:
    return _generator("llama").generate(_prompts(0), seed=_EDGE_SEED, progress=False, **_ON_AN_EDGE)[2]


def _with(token: int, place: int) -> Generation:
    row = _row_on_an_edge()
    return replace(row, token_ids=[*row.token_ids[:place], token, *row.token_ids[place + 1 :]])


def test_rounding_decides_at_the_edge_of_a_warper() -> None:
    rows = [_with(token, 5) for token in (50, 74)]
    assert _row_on_an_edge() in rows
    whole = [check_row(build("llama"), row, _ON_AN_EDGE, _EDGE_SEED) for row in rows]
    assert not all(whole)


@pytest.mark.parametrize(("place", "token"), [(1, 15), (2, 66), (2, 83), (3, 22), (3, 83), (4, 74), (5, 16)])
def test_a_token_that_no_rounding_gives_is_found(place: int, token: int) -> None:
    with pytest.raises(AssertionError, match=f"token {place}: {token}"):
        check_row(build("llama"), _with(token, place), _ON_AN_EDGE, _EDGE_SEED)


# -- on a GPU: in float32, whoever picks the tokens, the device or the host --------------------------------------


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return copy.deepcopy(build("llama")).cuda()


@pytest.fixture(scope="module")
def generator(model: PreTrainedModel) -> Iterator[BatchGenerator]:
    with BatchGenerator(model, letter_tokenizer()) as made:
        yield made


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ANY)
def test_an_option_on_a_gpu(
    name: str, sampled: bool, generator: BatchGenerator
) -> None:  # watermarks are the device's own
    options = {"max_new_tokens": 8, name: ANY[name][0]} | WITH.get(name, {})
    if sampled:  # with noise that a CPU can make again: it is the host's where one option needs the host
        options |= {"do_sample": True, "typical_p": 0.95}
    result = generator.generate(_prompts(1), seed=SEED, progress=False, **options)
    assert sum(check_row(generator.model, row, options | _tokens(options), SEED) for row in result) >= 3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_log_probabilities_on_a_gpu(generator: BatchGenerator) -> None:
    prompts = _prompts(3, 8)
    given: dict[str, Any] = {"max_new_tokens": 6, "logprobs": 3, "prompt_logprobs": 2, "progress": False}
    for ours, theirs in zip(
        generator.generate(prompts, **given), BatchGenerator(build("llama")).generate(prompts, **given), strict=True
    ):
        assert ours.token_ids == theirs.token_ids
        for mine, others in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:])):
            for one, other in zip(mine, others, strict=True):
                assert one.keys() == other.keys()
                assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_scores_come_as_from_generate_on_a_gpu(model: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]], device="cuda")
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "no_repeat_ngram_size": 2}
    plain = model.generate(ids, **given)
    with accelerated(model):
        fast = model.generate(ids, **given)
        assert model.generate.last_report is not None
    assert torch.equal(fast.sequences, plain.sequences)
    for name in ("scores", "logits"):
        mine, others = getattr(fast, name), getattr(plain, name)
        assert mine[0].device == others[0].device
        torch.testing.assert_close(torch.stack(mine), torch.stack(others), atol=1e-3, rtol=1e-3)
