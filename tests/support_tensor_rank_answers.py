"""Cases of ranks that have a model together: the same answers as one process, or a refusal by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support_drafts import always_pay
from support_families import reference_generate
from support_letter_tokenizers import EOS, letter_tokenizer
from support_tensor_ranks import DEVICE, FOLDER, PROMPTS, QUIET, RANK, error_of, over_references, sharded, whole_model
from transformers import LogitsProcessor, StoppingCriteria

from hf_batchllm import BatchGenerator, RankGenerator, accelerated, run_file

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20, "seed": 5}


@over_references
def family(name: str) -> Any:
    """Greedy as ``generate``, one prompt at a time; sampled as one process; on the plain backend as well."""
    model, whole = sharded(name), whole_model(name)
    wanted = [reference_generate(whole, prompt, max_new_tokens=6) for prompt in PROMPTS["nested"]]
    with BatchGenerator(model, page_size=16) as gen, BatchGenerator(whole, page_size=16) as one:
        result = gen.generate(PROMPTS["nested"], max_new_tokens=6, **QUIET)
        assert result.token_ids == wanted
        drawn, as_one = (each.generate(PROMPTS["nested"], max_new_tokens=6, **SAMPLED, **QUIET) for each in (gen, one))
        assert [replace(each, text=None) for each in drawn] == as_one  # some classes make a tokenizer of no files
    with BatchGenerator(model, backend="torch") as plain:
        assert plain.generate(PROMPTS["nested"], max_new_tokens=6, **QUIET).token_ids == wanted
    return str(result.report)


@over_references
def options(name: str) -> Any:
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["nested"]
    given: dict[str, dict[str, Any]] = {
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "sampled beams": {"num_beams": 2, "do_sample": True, "seed": 3},
        "samples": {**SAMPLED, "num_return_sequences": 3},
        "seeds": {**SAMPLED, "seed": list(range(len(prompts)))},
        "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
        "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        "own processor": {"logits_processor": [Shifted()]},
        "own criterion": {"stopping_criteria": [EndsAfterEven()]},
        "own processor of beams": {"num_beams": 3, "logits_processor": [Shifted()]},
        "own criterion of beams": {"num_beams": 3, "stopping_criteria": [EndsAfterEven()]},
        "long": {"max_new_tokens": 30},
    }
    with BatchGenerator(model, page_size=16) as gen, BatchGenerator(whole, page_size=16) as one:
        for kind, some in given.items():
            asked: dict[str, Any] = {"max_new_tokens": 6, **QUIET, **some}
            ours = gen.generate(prompts, **asked)
            with as_the_first():  # what its processors and criteria say counts
                wanted = one.generate(prompts, **asked)
            assert ours.token_ids == wanted.token_ids, kind
            for mine, other in zip(ours, wanted, strict=True):
                for place, at in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                    assert place == pytest.approx(at, abs=1e-4), kind
        rows = torch.tensor([prompt[:5] for prompt in prompts if len(prompt) >= 5], device=DEVICE)
        ours, wanted = (each.generate(input_ids=rows, max_new_tokens=5, **QUIET) for each in (gen, one))
        assert torch.equal(ours, wanted)
        long = gen.generate(prompts, max_new_tokens=60, **QUIET)
        assert long.token_ids == one.generate(prompts, max_new_tokens=60, **QUIET).token_ids
        with BatchGenerator(model, page_size=16, cuda_graphs=False) as eager:
            assert eager.generate(prompts, max_new_tokens=30, **QUIET).token_ids == [
                each[:30] for each in long.token_ids
            ]
        streamed = sorted(gen.stream(prompts, max_new_tokens=6), key=lambda each: each.index)
        assert streamed == one.generate(prompts, max_new_tokens=6, **QUIET)
    return str(long.report)


@over_references
def scores(name: str) -> Any:
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["nested"]
    continuations = [[[3, 4], [5]] for _ in prompts]
    with BatchGenerator(model, page_size=16) as gen, BatchGenerator(whole, page_size=16) as one:
        ours, wanted = (each.score(prompts, continuations, **QUIET) for each in (gen, one))
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert mine.is_greedy == other.is_greedy
    return True


@over_references
def grammars(name: str) -> Any:
    """The first rank alone knows them."""
    if find_spec("llguidance") is None:
        return "needs the extra `json`"
    tokenizer, prompts = letter_tokenizer(), PROMPTS["nested"][:3]
    asked: dict[str, Any] = {"regex": ["[ab]{3,9}", None, "(cd)+e"], "eos_token_id": EOS, "max_new_tokens": 12, **QUIET}
    with BatchGenerator(sharded(name), tokenizer) as gen, BatchGenerator(whole_model(name), tokenizer) as one:
        for more in ({}, SAMPLED):
            assert gen.generate(prompts, **asked, **more) == one.generate(prompts, **asked, **more)
    return True


@over_references
def drafts(name: str) -> Any:
    """Guessed by the first rank alone, and run by all."""
    prompts = [[1, 2, 3, 4] * 6, [5, 6, 7] * 5, [9, 8] * 3]
    asked: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 40, **QUIET}
    with pytest.MonkeyPatch.context() as patch:
        always_pay(patch)
        with BatchGenerator(sharded(name)) as gen, BatchGenerator(whole_model(name)) as one:
            for more in ({}, SAMPLED):
                ours = gen.generate(prompts, **asked, **more)
                assert ours == one.generate(prompts, **asked, **more)
                assert bool(ours.report.drafted_tokens) == (DEVICE == "cpu")
    return True


@over_references
def kept_prefixes(name: str) -> Any:
    """And preemption, in a cache for a few of the sequences."""
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["nested"]
    wanted = [reference_generate(whole, prompt, max_new_tokens=12) for prompt in prompts]
    with BatchGenerator(model, page_size=16, keep_prefixes=3) as gen:
        for _ in range(2):
            result = gen.generate(prompts, max_new_tokens=12, **QUIET)
            assert result.token_ids == wanted
        assert result.report is not None and result.report.cached_tokens > 0
    with BatchGenerator(model, page_size=16) as gen:
        page = gen.generate([[1]], max_new_tokens=2, **QUIET).report.kv_memory
    # With an end that may come at any time, more is let in than fits in the end.
    long: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": 96, **QUIET}
    with BatchGenerator(model, page_size=16, kv_memory=12 * page) as gen, BatchGenerator(whole, page_size=16) as one:
        result = gen.generate(prompts, **long)
        assert result.token_ids == one.generate(prompts, **long).token_ids
        assert result.report.preemptions > 0
    return True


_says = [RANK]


@contextmanager
def as_the_first() -> Iterator[None]:
    _says[0] = 0
    try:
        yield
    finally:
        _says[0] = RANK


class Shifted(LogitsProcessor):
    """Says something else on each rank."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.roll(1 + _says[0], dims=-1)


class EndsAfterEven(StoppingCriteria):
    """On the first rank, and after an odd one on the second."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 2 == _says[0]


def accelerates(name: str) -> Any:
    """``model.generate`` of a sharded model, its own and accelerated."""
    model, rows = sharded(name), torch.tensor([prompt[:5] for prompt in PROMPTS["nested"]], device=DEVICE)
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = model.generate(rows, **asked)
    with accelerated(model):
        ours = model.generate(rows, **asked)
    assert own.tolist() == ours.tolist()
    return model.last_report is None or model.last_report.steps


def elsewhere(name: str) -> Any:
    """Ways in that would give each rank a part of the work, or have each of them write."""
    model = sharded(name)
    with BatchGenerator(model) as gen:
        return [
            error_of(lambda: RankGenerator(model)),
            error_of(lambda: run_file(gen, FOLDER / "in.jsonl", FOLDER / "out.jsonl", max_new_tokens=3)),
        ]


def runs_the_model(name: str) -> Any:
    """What runs it between steps: the others would not, and it would wait for them."""
    model = sharded(name)

    def runs(ids: Any, scores: Any) -> Any:
        model(ids)
        return scores

    with BatchGenerator(model) as gen:
        asked: dict[str, Any] = {"max_new_tokens": 4, **QUIET}
        found = [
            error_of(lambda: gen.generate([[1, 2, 3]], logits_processor=[runs], **asked)),
            error_of(lambda: gen.generate([[1, 2, 3]], guidance_scale=1.5, **asked)),
        ]
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def refused(name: str) -> Any:
    return error_of(lambda: BatchGenerator(sharded(name)))


def with_adapters(name: str) -> Any:
    """Put beside its spread weights."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(copy.copy(sharded(name)), LoraConfig(r=2, target_modules=["q_proj"]))
    return error_of(lambda: BatchGenerator(adapted))
