"""A prompt's answer alone, and in a list: all that a call says of it, to the last bit."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build, random_prompts

from hf_batchllm import BatchGenerator, BatchResult, GeneratorPool, run_file
from hf_batchllm.engine.collector import TokenCollector

Rows = list[str]  # of a prompt's samples, all that is known of each
OPTIONS: dict[str, Any] = {
    **{"max_new_tokens": 8, "do_sample": True, "temperature": 1.3, "top_p": 0.95, "num_return_sequences": 2},
    **{"logprobs": 2, "prompt_logprobs": 1, "progress": False},
}


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    return copy.deepcopy(build(family)).to(device, dtype)


def that_counts_rows(model: Any) -> Any:
    """What its norm gives a row depends on how many rows there are: on any processor, without ``invariant=True``."""
    counting = copy.deepcopy(model)
    counting.model.norm.register_forward_hook(lambda norm, given, out: out * (1 + given[0].shape[-2] / 256))
    return counting


@cache
def strangers_and_mine() -> tuple[list[list[int]], list[int]]:
    """Twenty prompts, and the places of four among them, of which two share with others what they begin with."""
    rng = random.Random(5)
    prompts = random_prompts(rng, 97, "nested", 8) + random_prompts(rng, 97, "distinct", 8)
    prompts += random_prompts(rng, 97, "prefix", 4)
    order = list(range(20))
    rng.shuffle(order)
    return [prompts[place] for place in order], [order.index(place) for place in (0, 7, 13, 18)]


def told(result: BatchResult, places: Sequence[int]) -> list[Rows]:
    """All that a call says of the prompts at some places, to the last bit."""
    every: dict[int, Rows] = {place: [] for place in places}
    for row in result:
        if row.index in every:
            every[row.index].append(repr((row.token_ids, row.score, row.logprobs, row.prompt_logprobs)))
    return list(every.values())


def alone(model: Any, invariant: bool = True, page_size: int = 64, **options: Any) -> list[Rows]:
    prompts, mine = strangers_and_mine()
    with BatchGenerator(model, invariant=invariant, page_size=page_size) as generator:
        each = [generator.generate([prompts[place]], **{**OPTIONS, "seed": [place], **options}) for place in mine]
    return [told(result, [0])[0] for result in each]


def in_a_list(generator: BatchGenerator | GeneratorPool, **options: Any) -> tuple[list[Rows], BatchResult]:
    prompts, mine = strangers_and_mine()
    result = generator.generate(prompts, **{**OPTIONS, "seed": list(range(20)), **options})
    return told(result, mine), result


def short_of_memory(model: Any, **config: Any) -> dict[str, Any]:
    """Settings under which some sequences have to make room, and are computed again."""
    with BatchGenerator(model, **config) as probe:
        token = probe.architecture.kv_bytes_per_token
    return {"page_size": 4, "min_shared_tokens": 4, "max_batch_tokens": 24, "kv_memory": 72 * token, **config}


def a_file_that_was_cut_off_is_the_same(
    generator: BatchGenerator, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """A run from file to file that ends in its midst, and is started again."""
    prompts, _ = strangers_and_mine()
    source, whole, out = (folder / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    lines = [{"prompt": prompt, "temperature": 1.2, "logprobs": 1, "n": 2} for prompt in prompts]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run: dict[str, Any] = {"max_new_tokens": 5, "seed": 7, "window_bytes": 1500, "progress": False, **options}
    run_file(generator, source, whole, **run)
    collect, steps = TokenCollector.collect, iter(range(1000))

    def cut_off(self: TokenCollector, *given: Any) -> Any:
        if out.exists() and out.stat().st_size and next(steps) == 3:
            raise KeyboardInterrupt
        return collect(self, *given)

    with monkeypatch.context() as patches:
        patches.setattr(TokenCollector, "collect", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run_file(generator, source, out, **run)
    done = out.read_text().count("\n")
    assert 0 < done < 20
    assert run_file(generator, source, out, **run).written == 20 - done
    assert out.read_bytes() == whole.read_bytes()
