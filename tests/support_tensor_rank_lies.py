"""Cases of ranks that see different things, or are given different things."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import pytest
import torch
from support_families import reference_generate
from support_tensor_ranks import DEVICE, PROMPTS, QUIET, RANK, RANKS, error_of, over_references, sharded, whole_model
from transformers import MaxTimeCriteria, MinPLogitsWarper

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows
from hf_batchllm.engine.device_loop.steps_as_graphs import GraphLauncher
from hf_batchllm.model import device_memory
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.parallel import group


@over_references
def lied_to(name: str) -> Any:
    """About free memory, the clock, whether the device is at work, and captures that fail."""
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["distinct"]
    wanted = [reference_generate(whole, prompt, max_new_tokens=14) for prompt in prompts]
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        own = device_memory.HostMemory.free
        patch.setattr(device_memory.HostMemory, "free", lambda self: own(self) // (1 + 50_000 * RANK))
        patch.setattr(device_memory.HostMemory, "taken_at_once", True)
        with BatchGenerator(model, page_size=16) as gen:
            result = gen.generate(prompts, max_new_tokens=14, **QUIET)
        assert result.token_ids == wanted
        found["memory"] = result.report.kv_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLauncher, "_is_behind", lambda _: random.Random(time.time_ns()).random() < 0.5)
        with BatchGenerator(model, page_size=16) as gen:
            assert gen.generate(prompts, max_new_tokens=14, **QUIET).token_ids == wanted
    with pytest.MonkeyPatch.context() as patch:

        def capture(rows: DecodeRows, pool: Any) -> None:
            if RANK == RANKS - 1:
                raise RuntimeError("cannot be captured")

        patch.setattr(DecodeRows, "capture", capture)
        patch.setattr(DecodeGraphs, "_capture", lambda graphs, rows: rows.capture(None))
        with BatchGenerator(model, page_size=16) as gen, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = gen.generate(prompts, max_new_tokens=14, **QUIET)
        assert result.token_ids == wanted
        found["capture"] = [str(each.message) for each in told]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLauncher, "_is_behind", lambda _: True)
        own_rows, own_ready, ready, failed = DecodeGraphs._make, DecodeGraphs.make_ready, [False], []

        def make_ready(*given: Any) -> Any:
            ready[0] = bool(RANK)
            refusal = own_ready(*given)
            ready[0] = False
            return refusal

        def make(*given: Any) -> DecodeRows:
            if ready[0]:
                failed.append(1)
                raise torch.OutOfMemoryError("no room for a graph")
            return own_rows(*given)

        patch.setattr(DecodeGraphs, "make_ready", make_ready)
        patch.setattr(DecodeGraphs, "_make", make)
        with BatchGenerator(model, page_size=16) as gen:
            result = gen.generate(prompts, max_new_tokens=30, **QUIET)
        assert [each[:14] for each in result.token_ids] == wanted
        assert failed or RANK == 0
        assert "no more while other steps run (OutOfMemoryError: no room for a graph)" in str(result.report)
    if DEVICE == "cpu":  # on a GPU the other's device would wait in the midst of the step, and the group would end
        found["rehearsal"] = rehearsed_in_little_memory(model)
    with pytest.MonkeyPatch.context() as patch:
        now = time.time
        patch.setattr(time, "time", lambda: now() + 1000 * RANK)  # the call begins late for all of them
        with BatchGenerator(model, page_size=16) as gen:
            result = gen.generate(prompts, max_new_tokens=4, max_time=60.0, **QUIET)
            assert [each.finish_reason for each in result] == ["length"] * len(prompts)
            began = now()
            result = gen.generate(prompts, max_new_tokens=2000, max_time=0.5, **QUIET)
            found["time"] = [each.token_ids for each in result], now() - began
    time.sleep(0.2 * RANK)
    criterion = MaxTimeCriteria(max_time=1.0)  # which is older on the first rank
    with BatchGenerator(model, page_size=16) as gen:
        result = gen.generate(prompts, max_new_tokens=2000, stopping_criteria=[criterion], **QUIET)
        found["since"] = [each.token_ids for each in result]
    return found


def rehearsed_in_little_memory(model: Any) -> Any:
    """One of them runs out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory.HostMemory, "free", lambda self: 60_000_000)
        patch.setattr(device_memory.HostMemory, "taken_at_once", True)
        own_step, steps = ModelRunner.step, []

        def step(runner: ModelRunner, *given: Any) -> Any:
            logits = own_step(runner, *given)
            steps.append(1)
            if RANK and len(steps) == 1:
                raise torch.OutOfMemoryError("no memory for the step that is tried")
            return logits

        patch.setattr(ModelRunner, "step", step)
        with BatchGenerator(model, page_size=16) as gen, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tight = gen.generate([[1, 2, each % 90] for each in range(6000)], max_new_tokens=2, **QUIET)
        return tight.report.kv_memory, [str(each.message) for each in told]


def disagreeing(name: str) -> Any:
    """Other prompts, options or seeds on one of the ranks."""
    with BatchGenerator(sharded(name)) as gen:
        found = [
            error_of(lambda: gen.generate([[1, 2, 3 + RANK]], max_new_tokens=4, **QUIET)),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4 + RANK, **QUIET)),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, do_sample=True, seed=RANK, **QUIET)),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, repetition_penalty=1.0 + RANK, **QUIET)),
            error_of(
                lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **[{}, {"prompt_logprobs": 1}][RANK], **QUIET)
            ),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **[{}, {"max_time": 9.0}][RANK], **QUIET)),
        ]
        drawn = gen.generate([[1, 2, 3]] * 8, max_new_tokens=6, do_sample=True, temperature=2.0, **QUIET).token_ids
    with BatchGenerator(sharded(name), max_batch_tokens=16 + RANK) as gen:
        found.append(error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **QUIET)))
    return found, drawn


def other_tensors(name: str) -> Any:
    """A weight, or a buffer, that each rank has the whole of is another one on the second."""
    model, found = sharded(name), []
    for each in model.model.norm.weight.data, model.model.rotary_emb.inv_freq:
        own = each.clone()
        each.mul_(1.0 + RANK)
        with BatchGenerator(model) as gen:
            found.append(error_of(lambda: gen.generate([[1, 2]], max_new_tokens=2, **QUIET)))
        each.copy_(own)
    with BatchGenerator(model) as gen:
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def other_processors(name: str) -> Any:
    """They hold something else on the second."""
    with BatchGenerator(sharded(name)) as gen:
        held: dict[str, Any] = {"logits_processor": [MinPLogitsWarper(0.1 + RANK / 10)], "do_sample": True, "seed": 1}
        found = error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **held, **QUIET))
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def different_ways(name: str) -> Any:
    """One draws a seed, and the other has no need of it."""
    sampled: dict[str, Any] = {"do_sample": True} if RANK else {}
    with BatchGenerator(sharded(name)) as gen:
        found = error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **sampled, **QUIET))
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def different_calls(name: str) -> Any:
    """One streams, or scores, where the other generates; and the other way round."""
    with BatchGenerator(sharded(name)) as gen:

        def generates() -> Any:
            return gen.generate([[1, 2, 3]], max_new_tokens=4, **QUIET)

        def streams() -> Any:
            return [*gen.stream([[1, 2, 3]], max_new_tokens=4)]

        def scores() -> Any:
            return gen.score([[1, 2, 3]], [[[4]]], **QUIET)

        pairs = [(generates, streams), (streams, generates), (generates, scores)]
        found = [error_of(pair[RANK]) for pair in pairs]
        return found, generates().token_ids


def comes_late(name: str) -> Any:
    """To a call that the first rank waits for."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(group, "_PATIENCE", 0.3)
        patch.setattr(group, "_SILENCE", 0.1)
        with BatchGenerator(sharded(name)) as gen:
            for _ in range(2):
                time.sleep(0.9 * RANK)
                gen.generate([[1, 2, 3]], max_new_tokens=2, **QUIET)
    return [str(each.message) for each in told]
