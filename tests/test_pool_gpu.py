"""Processes of a pool on GPUs: two on the first, which part its memory, and one on each where there are several."""

from __future__ import annotations

import copy
import os
import random
import signal
from typing import Any

import pytest
import torch
from support_families import build, family_params, random_prompts
from support_invariant import alone, in_a_list, model_of
from support_letter_tokenizers import letter_tokenizer
from support_pool import Load, is_running, none_left_behind
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, GeneratorPool

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("pool_gpu")]
OPTIONS: dict[str, Any] = {"page_size": 16, "kv_memory": "64MiB"}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "seed": 8},
    "two samples": {"do_sample": True, "num_return_sequences": 2, "seed": 8},
    "beams": {"num_beams": 3},
}


def prompts() -> list[list[int]]:
    return [
        prompt for kind in ("prefix", "nested", "distinct") for prompt in random_prompts(random.Random(6), 97, kind, 30)
    ]


def where() -> list[Any]:
    several = [] if torch.cuda.device_count() < 2 else [pytest.param([0, 1], id="a GPU each")]
    return [pytest.param([0, 0], id="one GPU"), *several]


@pytest.mark.parametrize("gpus", where())
def test_answers_are_those_of_one_process(gpus: list[int]) -> None:
    given = prompts()
    with (
        none_left_behind() as started,
        GeneratorPool(Load(), letter_tokenizer(97), gpus=gpus, **OPTIONS) as pool,
        BatchGenerator(copy.deepcopy(build("llama")).to("cuda"), letter_tokenizer(97), **OPTIONS) as one,
    ):
        pool.wait()
        started += [worker.process_id for worker in pool._crew.workers]
        for way, options in WAYS.items():
            wanted = one.generate(given, max_new_tokens=12, progress=False, **options)
            result = pool.generate(given, max_new_tokens=12, progress=False, **options)
            assert result.token_ids == wanted.token_ids, way
            assert result.report is not None and all(each.pieces for each in result.report.workers)
        ends = [[prompt[-2:]] for prompt in given]
        scores, wanted_scores = (
            [row.logprob for row in each.score([prompt[:-2] for prompt in given], ends, progress=False)]
            for each in (pool, one)
        )
        assert scores == pytest.approx(wanted_scores, abs=1e-3)


@pytest.mark.parametrize("family", family_params(["llama", "qwen3", "gemma3", "mixtral"]))
@pytest.mark.parametrize("gpus", where())
def test_the_same_to_the_last_bit(gpus: list[int], family: str) -> None:
    """Each GPU has a part of the list, and none knows what the other has."""
    expected = alone(model_of(family, torch.bfloat16, "cuda"))
    load = Load(family, dtype=torch.bfloat16)
    with GeneratorPool(load, gpus=gpus, invariant=True, min_shared_tokens=4, kv_memory="256MiB") as pool:
        pool.wait()
        found, result = in_a_list(pool)
        assert found == expected and all(worker.pieces for worker in result.report.workers)
        assert in_a_list(pool, prompt_lookup_num_tokens=4)[0] == expected


def test_a_process_is_killed() -> None:
    given = prompts() * 8
    gpus = [0, 1] if torch.cuda.device_count() > 1 else [0, 0]
    configs = [GenerationConfig(max_new_tokens=4 + number % 40) for number in range(len(given))]
    with BatchGenerator(copy.deepcopy(build("llama")).to("cuda"), **OPTIONS) as one:
        wanted = one.generate(given, configs, progress=False)
    with none_left_behind() as started, GeneratorPool(Load(slow={1: 0.02}), gpus=gpus, **OPTIONS) as pool:
        pool.wait()
        started += [worker.process_id for worker in pool._crew.workers]
        rows = pool.stream(given, configs, progress=False)
        found = [next(rows)]
        os.kill(started[1], signal.SIGKILL)
        with pytest.warns(UserWarning, match="GPU"):
            found += rows
        assert [row.token_ids for row in sorted(found, key=lambda row: row.index)] == wanted.token_ids
        assert pool.generate(given, configs, progress=False).token_ids == wanted.token_ids
        assert not is_running(started[1])
