"""``score``: the log-probabilities of a plain forward, whatever was shared, cut or run twice."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import up_to
from support_families import build, family_params, random_prompts
from support_parity import CUTS, counted_tokens, each_config_with_some, pages_of_memory, tries, watched  # noqa: F401
from support_score import KINDS_OF_ATTENTION, Ids, assert_right, questions

from hf_batchllm import BatchConfig, BatchGenerator
from hf_batchllm.engine.scoring import score_call as scoring_module
from hf_batchllm.results.scores import ScoreResult
from hf_batchllm.sampling import logprobs as logprobs_module

FAMILY = "llama"


def generator(family: str = FAMILY, **config: Any) -> BatchGenerator:
    return BatchGenerator(build(family), **{"min_shared_tokens": 1, **config})


def score(contexts: Any, continuations: Any = None, family: str = FAMILY, **options: Any) -> ScoreResult:
    config = {field.name: options.pop(field.name) for field in fields(BatchConfig) if field.name in options}
    return generator(family, **config).score(contexts, continuations, **{"progress": False, **options})


# -- as a plain forward gives them -----------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "config"), each_config_with_some(CUTS, 1, KINDS_OF_ATTENTION))
@pytest.mark.usefixtures("watched")
def test_shared_or_not_and_cut_anywhere(family: str, config: dict[str, Any]) -> None:
    contexts, several = questions()
    assert_right(family, contexts, several, score(contexts, several, family, **config))


@given(tries(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 3, 5, 16, 512]), st.integers(0, 3), st.data())
@settings(max_examples=up_to(25))
def test_texts_grown_on_one_another(
    texts: list[Ids], page_size: int, budget: int, fee: int, data: st.DataObject
) -> None:
    texts = [text for text in texts if len(text) > 1]
    cuts = [data.draw(st.integers(1, len(text) - 1)) for text in texts]
    contexts = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    several = [[text[cut:]] for text, cut in zip(texts, cuts, strict=True)]
    result = score(contexts, several, page_size=page_size, max_batch_tokens=budget, min_shared_tokens=fee)
    assert_right(FAMILY, contexts, several, result)


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "page_size"), [("llama", 8), ("gemma3", 1)])
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.usefixtures("watched")
def test_little_memory(family: str, page_size: int, scheduler: str) -> None:
    contexts, several = questions(2)
    longest = max(len(context) + max(map(len, each)) - 1 for context, each in zip(contexts, several, strict=True))
    memory = pages_of_memory(build(family), -(-longest // page_size) + 3, page_size)
    result = score(
        contexts, several, family, kv_memory=memory, page_size=page_size, max_batch_tokens=11, scheduler=scheduler
    )
    assert_right(family, contexts, several, result)


def test_whole_texts() -> None:
    texts = [text for text in random_prompts(random.Random(4), 97, "nested", 6) if len(text) > 1]
    result = score(None, texts)
    assert_right(FAMILY, [text[:1] for text in texts], [[text[1:]] for text in texts], result)


# -- what it costs ---------------------------------------------------------------------------------------------


@contextmanager
def head_rows(family: str = FAMILY) -> Iterator[list[int]]:
    """The rows of each run of the LM head."""
    rows: list[int] = []
    head = build(family).get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2])):
        yield rows


def distinct_beginnings(texts: Sequence[Ids], firsts: Sequence[int]) -> int:
    """Of the texts, each as long as one of its tokens from ``firsts`` on is known: a node of their tree for each."""
    return len(
        {tuple(text[:end]) for text, first in zip(texts, firsts, strict=True) for end in range(first, len(text))}
    )


@pytest.mark.parametrize("config", [{}, {"max_batch_tokens": 5}, {"scheduler": "fifo"}], ids=str)
def test_each_token_is_run_once_and_the_head_only_where_something_is_looked_up(config: dict[str, Any]) -> None:
    contexts, several = questions()
    joined = [
        (context + continuation, len(context))
        for context, each in zip(contexts, several, strict=True)
        for continuation in each
    ]
    texts, firsts = [text for text, _ in joined], [first for _, first in joined]
    with counted_tokens(build(FAMILY)) as sizes, head_rows() as rows:
        result = score(contexts, several, min_shared_tokens=0, **config)
    report = result.report
    assert sum(sizes) == distinct_beginnings(texts, [1] * len(texts)) == report.computed_tokens
    assert sum(sizes) == report.plan.computed_tokens
    assert sum(rows) == distinct_beginnings(texts, firsts)
    assert report.sequences == report.finished == len(texts)
    assert report.prompt_tokens == sum(len(text) - 1 for text in texts)
    assert report.saving == pytest.approx(1 - sum(sizes) / report.prompt_tokens)
    assert report.scored_tokens == sum(len(text) - first for text, first in joined) and report.new_tokens == 0


def test_answers_of_one_token_cost_nothing_but_their_context() -> None:
    contexts = random_prompts(random.Random(5), 97, "distinct", 4)
    with counted_tokens(build(FAMILY)) as sizes, head_rows() as rows:
        result = score(contexts, choices=[[5], [6], [7], [8]])
    assert sum(sizes) == sum(map(len, contexts)) and sum(rows) == len(contexts)
    assert_right(FAMILY, contexts, [[[5], [6], [7], [8]]] * len(contexts), result)


def test_a_context_kept_from_an_earlier_call() -> None:
    contexts = [[*range(5, 40), last] for last in (50, 51)]
    gen = generator(keep_prefixes=4)
    several = [[[60, 61], [62]], [[60], [63, 64, 65]]]
    first = gen.score(contexts, several)
    with counted_tokens(build(FAMILY)) as sizes:
        again = gen.score(contexts, several)
    assert_right(FAMILY, contexts, several, again)
    assert first.report.cached_tokens == 0
    assert again.report.cached_tokens == 35
    assert sum(sizes) == again.report.computed_tokens == first.report.computed_tokens - 35
    # Where something is looked up inside of it, no more of it can be made use of than lies before.
    shorter = [contexts[0][:20]]
    several = [[[*contexts[0][20:], 70]]]
    with counted_tokens(build(FAMILY)) as sizes:
        inside = gen.score(shorter, several)
    assert sum(sizes) == 36 - 19
    assert_right(FAMILY, shorter, several, inside)
    out = gen.generate(contexts, max_new_tokens=2)
    assert out.report.cached_tokens > 0


def test_steps_have_as_many_logits_as_there_may_be_and_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_module, "MOST_LOGITS", 9 * 101 + 100)
    monkeypatch.setattr(logprobs_module, "_LOGITS_PER_CPU_THREAD", 2 * 101)
    dice = random.Random(6)
    contexts = [[dice.randrange(97) for _ in range(20)] for _ in range(14)]
    several = [[[5], [6, 7]]] * len(contexts)
    with counted_tokens(build(FAMILY)) as sizes, head_rows() as rows:
        result = score(contexts, several, max_batch_tokens=300)
    assert max(rows) <= 9 and max(sizes) > 80
    assert_right(FAMILY, contexts, several, result)
    for config in ({"scheduler": "fifo"}, {"keep_prefixes": 2}):  # then nobody knows what comes together
        with counted_tokens(build(FAMILY)) as sizes:
            result = score(contexts, several, **config)
        assert max(sizes) == 9
        assert_right(FAMILY, contexts, several, result)


# -- on a GPU: the kernels under short chunks, and figures that come back while the next step runs -------------

SLOW_WITHOUT_KERNELS = pytest.mark.filterwarnings("ignore:attention on cuda")


@pytest.mark.gpu
@SLOW_WITHOUT_KERNELS
@pytest.mark.parametrize("family", family_params(KINDS_OF_ATTENTION))
@pytest.mark.parametrize(
    "config",
    [{}, {"max_batch_tokens": 7}, {"scheduler": "fifo", "max_batch_tokens": 31}, {"page_size": 16, "keep_prefixes": 4}],
    ids=str,
)
@pytest.mark.usefixtures("watched")
def test_float32_is_what_a_plain_forward_on_a_cpu_gives(family: str, config: dict[str, Any]) -> None:
    model = copy.deepcopy(build(family)).to("cuda")
    contexts, several = questions()
    with BatchGenerator(model, **{"min_shared_tokens": 1, **config}) as generator:
        for _ in range(2):  # kept prefixes, the second time
            assert_right(family, contexts, several, generator.score(contexts, several))


@pytest.mark.gpu
@SLOW_WITHOUT_KERNELS
def test_bfloat16() -> None:
    model = copy.deepcopy(build("llama")).to("cuda", torch.bfloat16)
    contexts, several = questions()
    result = BatchGenerator(model).score(contexts, several)
    for score in result:
        ids = torch.tensor([[*contexts[score.index], *score.token_ids]], device="cuda")
        with torch.no_grad():
            logprobs = model(ids).logits[0].float().log_softmax(dim=-1)
        first = len(contexts[score.index])
        expected = [logprobs[first - 1 + at, token].item() for at, token in enumerate(score.token_ids)]
        assert score.logprobs == pytest.approx(expected, abs=0.5)
