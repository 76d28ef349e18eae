"""A pool whose processes each hold PEFT adapters: a prompt is answered with its own, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support_adapters import lora, prompts, wrapped
from support_letter_tokenizers import letter_tokenizer
from support_quick_workers import quick_workers

from hf_batchllm import BatchGenerator, GeneratorPool

quick_workers()

pytestmark = pytest.mark.xdist_group("pool_adapters")
PROMPTS = prompts(30, kind="nested")
NAMES = [("a", "b", None)[number % 3] for number in range(len(PROMPTS))]


def load() -> Any:
    return wrapped(lora())


@pytest.fixture(scope="module")
def pool() -> Iterator[GeneratorPool]:
    with GeneratorPool(load, letter_tokenizer(97), gpus=["cpu", "cpu"], page_size=8, min_shared_tokens=4) as made:
        yield made


@pytest.fixture(scope="module")
def one() -> Iterator[BatchGenerator]:
    with BatchGenerator(load(), letter_tokenizer(97), page_size=8, min_shared_tokens=4) as made:
        yield made


@pytest.mark.some_cases
@pytest.mark.parametrize("adapter", [NAMES, "b", None, "as it is"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 1.5, "seed": 3, "num_return_sequences": 2}])
def test_answers_are_those_of_one_process(
    options: dict[str, Any], adapter: Any, pool: GeneratorPool, one: BatchGenerator
) -> None:
    given = {"max_new_tokens": 5, "progress": False, **options}
    if adapter != "as it is":
        given["adapter"] = adapter
    ours, wanted = (each.generate(PROMPTS, **given) for each in (pool, one))
    assert ours == wanted
    assert [row.adapter for row in ours] == [row.adapter for row in wanted]
    assert ours.report is not None and wanted.report is not None
    assert ours.report.plan.computed_tokens == wanted.report.plan.computed_tokens


def test_scores(pool: GeneratorPool, one: BatchGenerator) -> None:
    ends = [[[5, 6]]] * len(PROMPTS)
    for adapter in (NAMES, "a"):
        ours, wanted = (each.score(PROMPTS, ends, adapter=adapter, progress=False) for each in (pool, one))
        assert [row.logprob for row in ours] == pytest.approx([row.logprob for row in wanted], rel=1e-4)
        assert [row.adapter for row in ours] == [row.adapter for row in wanted]


def test_a_wrong_name_is_refused_in_the_same_words(pool: GeneratorPool, one: BatchGenerator) -> None:
    said = []
    for each in (pool, one):
        with pytest.raises(ValueError, match="c") as error:
            each.generate(PROMPTS, max_new_tokens=2, adapter="c")
        said.append(str(error.value))
    assert said[0] == said[1]
