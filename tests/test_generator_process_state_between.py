"""What the caller enters or leaves between two results, or between two calls, changes nothing in what follows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support_families import build
from support_process_states import PROMPTS, STATES, State, assert_same, facts, made
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig

_AUTOCAST: dict[str, State] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast, float16": partial(torch.autocast, "cpu", torch.float16),
    "autocast, nothing cached": partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False),
    "no autocast": partial(torch.autocast, "cpu", enabled=False),
}
_ENTERED = {name: STATES[name] for name in ("inference mode", "bfloat16", "meta", "deterministic")} | _AUTOCAST
_SEED = 4
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_p": 0.9},
    "beams": {"num_beams": 2, "eos_token_id": [5, 17]},
    "watermark": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    "guidance": {"guidance_scale": 1.5},
}


def _configs(kind: str) -> list[GenerationConfig]:
    """Each prompt ends in another step."""
    return [GenerationConfig(max_new_tokens=2 + 2 * number, **_KINDS[kind]) for number in range(len(PROMPTS))]


def _all_at_once(kind: str, state: State = nullcontext) -> list[Any]:
    with state():
        rows = made(build("llama")).generate(PROMPTS, _configs(kind), seed=_SEED, progress=False)
    return [facts(row) for row in rows]


def _modes() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return *autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _one_by_one(kind: str, state_of: Callable[[int], AbstractContextManager[Any]]) -> list[Any]:
    """``state_of``: the state in which the caller asks for the result so numbered."""
    stream = made(build("llama")).stream(PROMPTS, _configs(kind), seed=_SEED)
    rows = []
    for number in range(len(PROMPTS)):
        with state_of(number):
            before = _modes()
            rows.append(next(stream))
            assert _modes() == before
    assert next(stream, None) is None
    return sorted((facts(row) for row in rows), key=lambda row: row[0])


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["greedy", "beams"])
@pytest.mark.parametrize("state", _ENTERED)
def test_entered_between_two_results(state: str, kind: str) -> None:
    ours = _one_by_one(kind, lambda number: _ENTERED[state]() if number % 2 else nullcontext())
    assert_same(ours, _all_at_once(kind))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", _KINDS)
def test_inference_mode_is_left_after_the_first_result(kind: str) -> None:
    ours = _one_by_one(kind, lambda number: torch.inference_mode() if number == 0 else nullcontext())
    assert_same(ours, _all_at_once(kind))


@pytest.mark.some_cases
@pytest.mark.parametrize("others", [nullcontext, *_AUTOCAST.values()])
@pytest.mark.parametrize("kind", ["greedy", "beams"])
def test_a_call_keeps_the_autocast_that_it_began_under(kind: str, others: State) -> None:
    ours = _one_by_one(kind, lambda number: _AUTOCAST["autocast"]() if number == 0 else others())
    assert_same(ours, _all_at_once(kind, _AUTOCAST["autocast"]))


def test_an_error_in_a_step_gives_the_callers_autocast_back() -> None:
    model = build("llama")
    stream = made(model).stream(PROMPTS, _configs("greedy"))
    next(stream)
    hook = model.model.norm.register_forward_hook(lambda *_: 1 // 0)
    try:
        with _AUTOCAST["autocast"]():
            before = _modes()
            with pytest.raises(ZeroDivisionError):
                next(stream)
            assert _modes() == before
    finally:
        hook.remove()


@pytest.mark.some_cases
@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("state", ["inference mode", "bfloat16", "meta"])
def test_calls_in_and_out_of_a_state(state: str, keep: int) -> None:
    """One generator, which keeps prefixes or does not."""
    model = build("gemma3")
    given: dict[str, Any] = {"max_new_tokens": 3, "logprobs": 1, "progress": False}
    known = [facts(row) for row in made(model).generate(PROMPTS, **given)]
    with made(model, keep_prefixes=keep) as generator:
        for inside in (True, False, True, False):
            with STATES[state]() if inside else nullcontext():
                result = generator.generate(PROMPTS, **given)
            assert_same([facts(row) for row in result], known)


def test_results_hold_no_graph_and_the_callers_grad_mode_stays() -> None:
    model = build("llama")
    ids = torch.tensor([PROMPTS[0]])
    with torch.enable_grad():
        out = made(model).generate(
            ids, max_new_tokens=2, return_dict_in_generate=True, output_scores=True, output_logits=True
        )
        assert not any(each.requires_grad for each in (*out.scores, *out.logits))
        stream = made(model).stream(PROMPTS, _configs("greedy"))
        for mode in (True, False, True, False):
            with torch.set_grad_enabled(mode):
                next(stream)
                assert torch.is_grad_enabled() is mode
        assert model(ids).logits.requires_grad
