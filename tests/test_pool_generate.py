"""A pool's answers are those of one process, in the order of the prompts."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_families import build, random_prompts
from support_invariant import alone, in_a_list, model_of
from support_letter_tokenizers import EOS, letter_tokenizer
from support_pool import Load
from support_quick_workers import quick_workers
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from hf_batchllm import (
    BatchGenerator,
    BatchResult,
    GeneratorBusyError,
    GeneratorPool,
    OptionValueError,
    PromptError,
    PromptsTypeError,
    UnsupportedOptionError,
)

quick_workers()

pytestmark = pytest.mark.xdist_group("pool_generate")
PROMPTS = {
    kind: random_prompts(random.Random(4), 97, kind, 30)[:28] for kind in ("prefix", "nested", "mixed", "distinct")
}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20}


@pytest.fixture(scope="module")
def pool() -> Iterator[GeneratorPool]:
    with GeneratorPool(Load(), letter_tokenizer(97), gpus=["cpu"] * 2, page_size=16) as made:
        yield made


@pytest.fixture(scope="module")
def pool_of_three() -> Iterator[GeneratorPool]:
    with GeneratorPool(Load(), letter_tokenizer(97), gpus=["cpu"] * 3, page_size=16) as made:
        yield made


@pytest.fixture(scope="module")
def one() -> Iterator[BatchGenerator]:
    with BatchGenerator(build("llama"), letter_tokenizer(97), page_size=16) as made:
        yield made


class Fewer(LogitsProcessor):
    """Of a test's own module, which a worker imports."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == 1, -torch.inf)


class Until(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **given: Any) -> torch.Tensor:
        return ids[:, -1] % 5 == 0


class Fails(LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 12:
            raise ZeroDivisionError("no luck")
        return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {**SAMPLED, "seed": 5},
    "samples": {**SAMPLED, "seed": 6, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams that sample": {**SAMPLED, "num_beams": 2, "seed": 8},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "processors": {"logits_processor": [Fewer()], "stopping_criteria": [Until()]},
    "strings": {"stop_strings": ["ab", "c"]},
    "eos": {"eos_token_id": list(range(0, 97, 7))},
    "seeds": {**SAMPLED, "seed": list(range(28))},
    "grammars": {"regex": ["(ab|c)+", None, "d(ef)*", "a{9}"] * 7, "eos_token_id": EOS},
    "configs": {
        "generation_config": [GenerationConfig(max_new_tokens=1 + place % 5, do_sample=False) for place in range(28)]
    },
}


@pytest.mark.some_cases
@pytest.mark.parametrize(("processes", "kind"), [*[("pool", kind) for kind in PROMPTS], ("pool_of_three", "nested")])
@pytest.mark.parametrize("options", OPTIONS)
def test_answers_are_those_of_one_process(
    options: str, processes: str, kind: str, one: BatchGenerator, request: pytest.FixtureRequest
) -> None:
    pool = request.getfixturevalue(processes)
    given = {"max_new_tokens": 7, "progress": False, **OPTIONS[options]}
    if options == "configs":
        del given["max_new_tokens"]
    if options == "grammars":
        pytest.importorskip("llguidance", reason="needs the extra `json`")
    ours, wanted = pool.generate(PROMPTS[kind], **given), one.generate(PROMPTS[kind], **given)
    assert [without_logprobs(row) for row in ours] == [without_logprobs(row) for row in wanted]
    for mine, its in zip(ours, wanted, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            assert_near(getattr(mine, name), getattr(its, name))
        assert mine.score == pytest.approx(its.score, abs=1e-4)
    assert ours.report is not None and wanted.report is not None
    for name in ("sequences", "finished", "prompt_tokens", "new_tokens", "seed"):
        assert getattr(ours.report, name) == getattr(wanted.report, name)
    assert str(ours.report.plan) == str(wanted.report.plan)
    assert len(ours.report.workers) == len(pool)
    assert sum(worker.new_tokens for worker in ours.report.workers) > 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_same_to_the_last_bit(family: str) -> None:
    """Whichever process has a prompt, and whatever else it has."""
    load = Load(family, dtype=torch.bfloat16)
    with GeneratorPool(load, gpus=["cpu"] * 2, invariant=True, min_shared_tokens=4) as pool:
        found, result = in_a_list(pool)
    assert all(worker.pieces for worker in result.report.workers)
    assert found == alone(model_of(family, torch.bfloat16))


def without_logprobs(row: Any) -> Any:
    return replace(row, logprobs=None, prompt_logprobs=None, score=None)


def assert_near(ours: Any, wanted: Any) -> None:
    assert (ours is None) == (wanted is None)
    for mine, its in zip(ours or [], wanted or [], strict=True):
        assert mine == (None if its is None else pytest.approx(its, abs=1e-4))


def test_texts_and_chats(pool: GeneratorPool, one: BatchGenerator) -> None:
    texts = ["abc" * 9 + end for end in "defghijkl"]
    ours, wanted = (each.generate(texts, max_new_tokens=5, progress=False) for each in (pool, one))
    assert ours == wanted and ours.texts == wanted.texts
    assert [row.prompt for row in ours] == texts
    assert pool.plan(texts).labels == one.plan(texts).labels
    assert ours.report is not None and wanted.report is not None
    assert ours.report.plan.labels == wanted.report.plan.labels
    assert pool.tokenizer is not None and pool.tokenizer.decode([5]) == one.tokenizer.decode([5])


def test_a_seed_is_drawn_as_one_process_draws_it(pool: GeneratorPool, one: BatchGenerator) -> None:
    """And where nothing is drawn, torch's random numbers stay where they are."""
    drawn = []
    for each in (pool, one):
        torch.manual_seed(3)
        each.generate(PROMPTS["prefix"], max_new_tokens=2, do_sample=False, progress=False)
        result = each.generate(PROMPTS["prefix"], max_new_tokens=4, progress=False, **SAMPLED)
        drawn.append((result.token_ids, result.report.seed, int(torch.randint(99, ()))))  # type: ignore[union-attr]
    assert drawn[0] == drawn[1]


def test_scores(pool: GeneratorPool, one: BatchGenerator) -> None:
    prompts = PROMPTS["nested"]
    for given in (
        {"contexts": prompts, "choices": [[3], [4, 5], [4, 6]]},
        {"contexts": None, "continuations": prompts},
    ):
        ours, wanted = (each.score(**given, progress=False) for each in (pool, one))  # type: ignore[arg-type]
        assert [(row.index, row.choice, row.token_ids) for row in ours] == [
            (row.index, row.choice, row.token_ids) for row in wanted
        ]
        assert [row.logprob for row in ours] == pytest.approx([row.logprob for row in wanted], abs=1e-4)
        assert ours.report is not None and wanted.report is not None
        assert ours.report.scored_tokens == wanted.report.scored_tokens
        assert ours.report.sequences == wanted.report.sequences


def test_a_column_keeps_its_index(pool: GeneratorPool) -> None:
    pandas = pytest.importorskip("pandas")
    column = pandas.Series([[5, 6], [7, 8], [9, 10]], index=[7, 3, 5])
    assert list(pool.generate(column, max_new_tokens=2).to_pandas().index) == [7, 3, 5]
    assert list(pool.score(column, choices=[[3], [4]]).to_pandas().index) == [7, 7, 3, 3, 5, 5]


def test_streams(pool: GeneratorPool, one: BatchGenerator) -> None:
    given = {"max_new_tokens": 6, "on_error": "record"}
    prompts = [*PROMPTS["prefix"], []]
    found = list(pool.stream(prompts, **given))  # type: ignore[arg-type]
    wanted = one.generate(prompts, progress=False, **given)  # type: ignore[arg-type]
    assert sorted(found, key=lambda row: row.index) == list(wanted)
    for _ in range(2):  # the next call finds the workers free
        stream = pool.stream(PROMPTS["mixed"], max_new_tokens=40)
        next(stream)
        with pytest.raises(GeneratorBusyError, match="a stream is still open"):
            pool.generate([[1]], max_new_tokens=1)
        stream.close()  # type: ignore[attr-defined]
        assert pool.generate(PROMPTS["mixed"], max_new_tokens=3, progress=False) == one.generate(
            PROMPTS["mixed"], max_new_tokens=3, progress=False
        )


def test_bad_prompts(pool: GeneratorPool, one: BatchGenerator) -> None:
    prompts = [[1, 2], [], [3, 400], "xyz", [5], [True], [-1, 3], [2**40], torch.tensor([4, 97]), (6, 7), None, [1.5]]
    with pytest.raises(PromptError) as ours:
        pool.generate(prompts, max_new_tokens=2)
    with pytest.raises(PromptError) as wanted:
        one.generate(prompts, max_new_tokens=2)
    assert str(ours.value) == str(wanted.value) and ours.value.problems == wanted.value.problems
    found, expected = (
        each.generate(prompts, max_new_tokens=2, on_error="record", progress=False) for each in (pool, one)
    )
    assert found == expected


def test_bad_options_are_refused_in_the_same_words(pool: GeneratorPool, one: BatchGenerator) -> None:
    for wrong in ({"max_new_token": 3}, {"num_beams": 0}, {"seed": -1}, {"on_error": "ignore"}, {"progress": 1}):
        said = []
        for each in (pool, one):
            with pytest.raises((UnsupportedOptionError, ValueError)) as error:
                each.generate([[1, 2]], **wrong)  # type: ignore[arg-type]
            said.append((type(error.value), str(error.value)))
        assert said[0] == said[1]


def test_what_a_pool_does_not_take(pool: GeneratorPool) -> None:
    with pytest.raises(ValueError, match="rows as a list"):
        pool.generate(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="rows as a list"):
        pool.generate(None, input_ids=torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(OptionValueError, match="streamer"):
        pool.generate([[1, 2]], streamer=Streamer(), max_new_tokens=2)
    with pytest.raises(PromptsTypeError):
        pool.generate(None)


class Streamer:
    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


def test_an_option_that_cannot_be_sent_is_named(pool: GeneratorPool) -> None:
    import threading

    processor = Fewer()
    processor.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        pool.generate([[1, 2]], logits_processor=[processor], max_new_tokens=2)
    assert len(pool.generate([[1, 2]], max_new_tokens=2, progress=False)) == 1


def test_an_error_in_the_users_code_brings_what_had_finished(pool: GeneratorPool) -> None:
    prompts = [[5] * 3] * 4 + [[7, *range(20)]] * 4
    with pytest.raises(ZeroDivisionError, match="no luck") as error:
        pool.generate(prompts, logits_processor=[Fails()], max_new_tokens=3, progress=False)
    assert any("In a process of the pool" in note for note in error.value.__notes__)
    part = getattr(error.value, "result", None)
    assert part is None or isinstance(part, BatchResult)
    assert len(pool.generate(prompts, max_new_tokens=2, progress=False)) == 8, "the pool goes on"


def test_warnings_come_once_and_point_here(pool: GeneratorPool) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            pool.generate([[1, 2], [3]], progress=False)
    said = [each for each in heard if "no length was given" in str(each.message)]
    assert len(said) <= 1  # another case's call may have brought it
    assert all(each.filename == __file__ for each in said)


def test_time_is_the_calls(pool: GeneratorPool) -> None:
    """Also for prompts that no worker has begun."""
    result = pool.generate(PROMPTS["nested"] * 20, max_new_tokens=60, max_time=0.3, progress=False)
    assert len(result) == 560 and {row.finish_reason for row in result} <= {"time", "length", "stop"}
    assert any(row.finish_reason == "time" for row in result)


def test_nothing_to_do(pool: GeneratorPool) -> None:
    assert len(pool.generate([], max_new_tokens=2)) == 0
    assert len(pool.generate([[]], on_error="record", max_new_tokens=2, progress=False)) == 1


def test_the_bar(pool: GeneratorPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.generate(PROMPTS["prefix"], max_new_tokens=4, progress=True)
    assert "28 / 28 done" in capsys.readouterr().err
