"""A process of a model in parts that fails, or is killed, in each part of a call: the call and the next one go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_broken_parts import MOMENTS, WAYS, LoadsToBreak, break_at, has_broken, seconds, whole_model
from support_quick_workers import quick_workers

from hf_batchllm import BatchGenerator, GeneratorPool

quick_workers()
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.some_cases]
MANY = [[1, 2, each % 90] for each in range(2000)]  # more than fits into little memory
AT_MOST = 30.0  # seconds, of which a watch waits for five


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_call_ends_and_the_next_one_works(moment: str, way: str, rank: int, tmp_path: Path) -> None:
    """An error may end the call; after a kill another model has the answers."""
    whole = whole_model()
    whole.save_pretrained(tmp_path / "model")
    prompts, most = (MANY, 4) if moment == "rehearsal" else (MANY[:40], 30)
    with BatchGenerator(whole, page_size=16) as one:
        wanted = one.generate(prompts, max_new_tokens=most, progress=False).token_ids
    load = LoadsToBreak(tmp_path / "model", tmp_path)
    with GeneratorPool(load, gpus=["cpu"] * 4, tp=2, page_size=16) as pool:
        pool.wait()
        break_at(tmp_path, moment, rank, way)
        with seconds() as took:
            try:
                found, said = pool.generate(prompts, max_new_tokens=most, progress=False).token_ids, ""
            except Exception as error:
                found, said = wanted, f"{type(error).__name__}: {error}"
        print(moment, rank, way, f"{took[0]:.1f} s", len(pool), said[:300], flush=True)
        assert has_broken(tmp_path)
        assert found == wanted
        assert took[0] < AT_MOST
        assert "told to" in said or not said
        assert way == "fails" or not said, "another model has the answers"
        again = pool.generate(prompts, max_new_tokens=most, progress=False).token_ids
        assert again == wanted
