"""How calls of ``score`` go: errors, interrupts, progress; and what they give back."""

from __future__ import annotations

import io
import math
import pickle
import random
import re
from typing import Any

import pytest
import torch
from support_calls import failing
from support_families import FAMILIES, build, random_prompts
from support_kernels import plain
from support_memory_device import Device, tight
from support_memory_device import device as device  # a fixture
from support_memory_device import rehearsed as rehearsed  # a fixture
from support_parity import pages_of_memory
from support_untouched import FAMILY, fingerprint
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, GenerationInterrupted, GeneratorBusyError, PromptError
from hf_batchllm.errors import OptionValueError
from hf_batchllm.inputs import preparing
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.results.scores import Score, ScoreResult

CONTEXTS = random_prompts(random.Random(4), 97, "mixed", 14)
CHOICES = [[5], [6, 7], [8, 9, 10]]


def make(**config: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), **{"max_batch_tokens": 24, "page_size": 8, "min_shared_tokens": 4, **config})


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    return [score.logprobs for score in make().score(CONTEXTS, choices=CHOICES)]


def assert_as_before(generator: BatchGenerator, before: Any, expected: list[list[float]]) -> None:
    assert fingerprint(build(FAMILY)) == before
    cache = generator._resources.kv.cache
    if cache is not None:
        cache.check_integrity(alive=[])
    result = generator.score(CONTEXTS, choices=CHOICES)
    for score, logprobs in zip(result, expected, strict=True):
        assert score.logprobs == pytest.approx(logprobs, abs=1e-4)


def assert_among(finished: ScoreResult, expected: list[list[float]]) -> None:
    for score in finished:
        assert score.error is None
        assert score.logprobs == pytest.approx(expected[3 * score.index + score.choice], abs=1e-4)


# -- how they end ----------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("step", [1, 4])
def test_an_interrupt_gives_what_had_finished(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[float]], step: int, keep: int
) -> None:
    generator, before = make(keep_prefixes=keep), fingerprint(build(FAMILY))
    with monkeypatch.context() as patch:
        failing(patch, ModelRunner, "every_row", {step}, KeyboardInterrupt)
        with pytest.raises(GenerationInterrupted, match=r"interrupted: .* of \d+ sequences had finished") as caught:
            generator.score(CONTEXTS, choices=CHOICES)
    finished = caught.value.result
    assert finished is generator.interrupted and isinstance(finished, ScoreResult)
    assert (len(finished) > 0) == (step > 1) and len(finished) < len(expected)
    assert_among(finished, expected)
    for scores, best in zip(finished.by_context, finished.best(), strict=True):
        assert (best is not None) == (len(scores) == len(CHOICES))
    assert finished._repr_html_()
    report = generator.last_report
    assert report.finished == len(finished) and report.sequences == len(expected)
    assert_as_before(generator, before, expected)
    assert generator.interrupted is None


def test_an_error_of_the_model_comes_out_and_nothing_stays(expected: list[list[float]]) -> None:
    generator, before = make(), fingerprint(build(FAMILY))
    head = build(FAMILY).get_output_embeddings()
    with head.register_forward_hook(lambda *args: 1 / 0), pytest.raises(ZeroDivisionError):
        generator.score(CONTEXTS, choices=CHOICES)
    assert_as_before(generator, before, expected)


def test_one_call_at_a_time() -> None:
    generator = make()
    stream = generator.stream([[5, 6], [7, 8]], max_new_tokens=4)
    next(stream)
    with pytest.raises(GeneratorBusyError, match="One call at a time"):
        generator.score([[5]], [[6]])
    stream.close()
    inside: list[Exception] = []

    def score_again(*args: Any) -> None:
        try:
            generator.score([[5]], [[6]])
        except GeneratorBusyError as error:
            inside.append(error)

    with build(FAMILY).get_input_embeddings().register_forward_hook(score_again):
        assert len(generator.score([[5]], [[6]])) == 1
    assert inside
    generator.close()
    with pytest.raises(GeneratorBusyError, match="closed"):
        generator.score([[5]], [[6]])


def test_what_does_not_fit_into_the_cache_is_said_of_contexts() -> None:
    generator = make(kv_memory=pages_of_memory(build(FAMILY), 3, 8))
    contexts = [[5] * 10, [6] * 30, [7] * 10]
    with pytest.raises(PromptError, match=r"^context 1 has 30 tokens, which takes .* for 24 tokens: shorten") as caught:
        generator.score(contexts, choices=[[5], [6]])
    assert caught.value.problems.keys() == {1} and generator.last_report is None
    result = generator.score(contexts, choices=[[5], [6]], on_error="record")
    assert [score.error is None for score in result] == [True, True, False, False, True, True]
    assert result.report.sequences == 4
    contexts.append([6] * 10)  # would fit alone
    with pytest.raises(PromptError) as caught:
        generator.score(contexts, [[5], [5], [5], [6]])
    assert caught.value.problems.keys() == {1}
    result = generator.score(contexts, [[5], [5], [5], [6]], on_error="record")
    assert result[3].error is not None and result[3].error.startswith("would be read from a longer one, which has 30")


@plain
@pytest.mark.filterwarnings("ignore:steps of this call")
@pytest.mark.parametrize("part", [2.0, 0.4])
def test_over_the_kernels_references_with_little_memory(part: float, device: Device, rehearsed: list[int]) -> None:
    """On a GPU the largest step is run beforehand where memory may be short."""
    tight(device, CONTEXTS, part, build("llama"))
    with BatchGenerator(build("llama"), page_size=4, min_shared_tokens=1, max_batch_tokens=64) as generator:
        result = generator.score(CONTEXTS, choices=CHOICES)
    assert bool(rehearsed) == (part < 2)
    every = BatchGenerator(build("llama"), share_prefixes=False).score(CONTEXTS, choices=CHOICES)
    for score, other in zip(result, every, strict=True):
        assert score.logprobs == pytest.approx(other.logprobs, abs=1e-4) and score.is_greedy == other.is_greedy


def test_dropout_is_warned_of() -> None:
    model = build("gpt2")
    generator = BatchGenerator(model)
    model.train()
    try:
        with pytest.warns(UserWarning, match="training mode and has dropout"):
            generator.score([[5, 6]], [[7]])
    finally:
        model.eval()


def test_an_empty_context_is_nothing_to_warn_of(recwarn: pytest.WarningsRecorder) -> None:
    BatchGenerator(build("llama"), word_tokenizer(bos=True)).score([""], ["w5"])
    assert not recwarn.list


def test_the_bar_counts_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    tqdm, how = preparing.tqdm, {"file": screen, "mininterval": 0, "ncols": 120}
    monkeypatch.setattr(preparing, "_on_terminal", lambda: True)
    monkeypatch.setattr(preparing, "tqdm", lambda **options: tqdm(**options | how))
    result = make().score(CONTEXTS, choices=CHOICES, progress=True)
    last = screen.getvalue().strip().split("\r")[-1]
    done = rf"{len(result)} / {len(result)} done · {result.report.saving:.0%} saved"
    assert re.search(rf"100%\|.*\| \[.*\] reading [\d,]+ / [\d,]+ · [\d,]+ scores/s · {done}", last)
    screen.truncate(0)
    make().score(CONTEXTS[:3], choices=CHOICES)
    assert not screen.getvalue().strip("\0")


def test_half_precision_and_inference_mode() -> None:
    model = FAMILIES["llama"]().to(torch.bfloat16)
    ids = [5, 6, 7, 8]
    with torch.inference_mode():
        score = BatchGenerator(model).score([ids[:2]], [ids[2:]])[0]
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    assert score.logprobs == pytest.approx([logprobs[1, 7].item(), logprobs[2, 8].item()], abs=0.1)


# -- what they give back ---------------------------------------------------------------------------------------


def a_result() -> ScoreResult:
    return ScoreResult(
        [
            Score(0, 0, " yes", [5], [-2.0], True),
            Score(0, 1, " no, never", [6, 7, 8], [-1.0, -1.0, -0.5], False),
            Score(1, 0, "ää", [9], [-3.0], False),
            Score(1, 1, "bbb", [10], [-3.5], False),
            Score(2, 0, "c", [11], [-1.0], False),
            Score(2, 1, "d", [12], [-1.0], False),
        ],
        None,
    )


def test_the_most_likely_of_each_context() -> None:
    result = a_result()
    assert result.best() == result.best(per="total") == [0, 0, 0]
    assert result.best(per="token") == [1, 0, 0]
    assert result.best(per="character") == [1, 1, 0]
    assert result.best(per="byte") == [1, 0, 0]
    with pytest.raises(OptionValueError, match=r"`per` must be 'total', 'token', 'character' or 'byte', not 'letter'"):
        result.best(per="letter")
    without = ScoreResult([Score(0, 0, None, [5], [-2.0], True)], None)
    with pytest.raises(OptionValueError, match="no text to measure"):
        without.best(per="character")


def test_nothing_is_the_most_likely_where_the_model_gives_no_number() -> None:
    scores = [Score(0, 0, "a", [5], [math.nan], False), Score(0, 1, "b", [6], [-1.0], False)]
    sure = [Score(1, 0, "a", [5], [-2.0], False), Score(1, 1, "b", [6], [-1.0], False)]
    never = [Score(2, choice, "a", [5], [-math.inf], False) for choice in (0, 1)]
    assert ScoreResult([*scores, *sure, *never], None).best() == [None, 1, 0]


def test_figures_of_a_score() -> None:
    score = a_result()[1]
    assert score.logprob == -2.5 and score.mean_logprob == pytest.approx(-2.5 / 3)
    assert score.perplexity == pytest.approx(math.exp(2.5 / 3))
    assert Score(0, 0, None, [5], [-math.inf], False).perplexity == math.inf
    assert Score(0, 0, None, [5], [-1e9], False).perplexity == math.inf
    failed = Score(0, 0, None, [], [], False, "is bad")
    assert math.isnan(failed.logprob) and math.isnan(failed.mean_logprob) and math.isnan(failed.perplexity)


def test_they_are_a_sequence_and_show_themselves() -> None:
    result = make().score(CONTEXTS, choices=CHOICES)
    assert len(result) == 3 * len(CONTEXTS) == len(list(result)) == len(result.logprobs)
    assert isinstance(result[0], Score) and [score.choice for score in result[:4]] == [0, 1, 2, 0]
    assert "ScoreResult of 42 scores" in repr(result) and "and 37 more" in repr(result)
    assert "scored tokens" in str(result.report) and "new tokens" not in str(result.report)
    assert "42" in result._repr_html_() and "scored tokens" in result.report._repr_html_()
    again = pickle.loads(pickle.dumps(result))
    assert list(again) == list(result)
    angry = ScoreResult([Score(0, 0, "<b>", [5], [-1.0], True), Score(0, 1, None, [], [], False, "<i>")], None)
    assert "&lt;b&gt;" in angry._repr_html_() and "&lt;i&gt;" in angry._repr_html_()


def test_a_table() -> None:
    pytest.importorskip("pandas")
    table = make().score(CONTEXTS[:2], choices=CHOICES).to_pandas()
    assert list(table.columns[:7]) == ["context", "text", "logprob", "mean_logprob", "is_greedy", "index", "choice"]
    assert len(table) == 6 and table.groupby("index").logprob.idxmax().notna().all()
    failed = make().score([[5], [300]], choices=[[6]], on_error="record").to_pandas()
    assert failed.error.notna().tolist() == [False, True] and failed.logprob.isna().tolist() == [False, True]
