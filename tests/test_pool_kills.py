"""A process of a model in parts fails, or is killed, at each moment of a call: the pool goes on, and nobody is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support_broken_parts import MOMENTS, WAYS, LoadsToBreak, break_at, broken_call, forget, groups_of, whole_model
from support_pool import none_left_behind
from support_quick_workers import quick_workers

from hf_batchllm import BatchGenerator, GeneratorPool

quick_workers()
pytestmark = [pytest.mark.some_cases, pytest.mark.xdist_group("pool_kills")]
AT_MOST = 60.0  # seconds, of which a watch waits for five; tests/kill_ranks.py asks for ten
_MODELS = 3  # of a pool: all but one may be lost


@cache
def one() -> BatchGenerator:
    return BatchGenerator(whole_model(), page_size=16)


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[GeneratorPool, Path]]]:
    """A pool that has two models at least. One that has lost too many is closed, and leaves none behind."""
    folder = tmp_path_factory.mktemp("parts")
    whole_model().save_pretrained(folder / "model")
    pools: list[GeneratorPool] = []

    def pool() -> tuple[GeneratorPool, Path]:
        if pools and len(pools[-1]) < 2:
            pools.pop().close()
        if not pools:
            load = LoadsToBreak(folder / "model", folder)
            pools.append(GeneratorPool(load, gpus=["cpu"] * 2 * _MODELS, tp=2, page_size=16))
            pools[-1].wait()
            started.extend(each for group in groups_of(pools[-1]) for each in group)
        return pools[-1], folder

    with none_left_behind() as started:
        yield pool
        for each in pools:
            each.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_call_ends_and_the_next_one_works(
    moment: str, way: str, rank: int, two_models: Callable[[], tuple[GeneratorPool, Path]]
) -> None:
    """An error may end the call; after a kill another model has the answers."""
    pool, folder = two_models()
    prompts, most = (2000, 2) if moment == "rehearsal" else (30, 12)
    given: dict[str, Any] = {"max_new_tokens": most, "progress": False}
    several = [[1, 2, each % 90] for each in range(prompts)]
    wanted = one().generate(several, **given).token_ids
    forget(folder)
    break_at(folder, moment, rank, way)
    found = broken_call(pool, folder, lambda: pool.generate(several, **given))
    assert found.broken is not None
    assert not found.wrong(wanted, way)
    assert found.is_told(way)
    assert found.seconds < AT_MOST
    assert pool.generate(several[:4], **given).token_ids == wanted[:4]
