"""The fuzzer: a few of its cases, and whether it finds what is planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import support_fuzz_relations
from support_fuzz_cases import MOVES_PROMPTS, STAYS, Case, draw_case
from support_fuzz_check import check, smaller
from support_fuzz_models import missing
from support_fuzz_options import ARGUMENTS, BEAMS, CHANGES_SCORES, ELSEWHERE, LENGTHS, SAMPLING
from support_fuzz_relations import RELATIONS

from hf_batchllm.engine.computed_with import ComputedWith
from hf_batchllm.inputs.option_row import Fate, OptionKind
from hf_batchllm.inputs.option_table import TABLE
from hf_batchllm.model.attention.torch_attention import CascadePlan
from hf_batchllm.sampling import noise
from hf_batchllm.sampling.host_sampler import HostSampler

SEED = 12  # all kinds and most relations within a few small cases


@pytest.mark.some_cases
@pytest.mark.parametrize("first", range(0, 16, 4))
def test_some_cases(first: int) -> None:
    for number in range(first, first + 4):
        case = draw_case(SEED, number)
        if missing(case.family, case.device_loop):
            continue
        outcome = check(case)
        assert not outcome.error, f"{outcome.error}\n{case}"


def test_every_honoured_option_is_drawn() -> None:
    honoured = {row.name for row in TABLE.values() if row.fate is Fate.HONOURED and row.kind is not OptionKind.ADDED}
    drawn = CHANGES_SCORES.keys() | ARGUMENTS.keys() | SAMPLING.keys() | BEAMS.keys() | LENGTHS
    assert honoured == drawn | ELSEWHERE and not drawn & ELSEWHERE
    assert {*MOVES_PROMPTS, *STAYS} == RELATIONS.keys()


def test_a_number_is_always_the_same_case() -> None:
    assert str(draw_case(1, 5)).partition(" at 0x")[0] == str(draw_case(1, 5)).partition(" at 0x")[0]
    assert str(draw_case(1, 5)) != str(draw_case(2, 5)) != str(draw_case(1, 6))


# -- planted -------------------------------------------------------------------------------------------------------


def found(wanted: Callable[[Case], bool], most: int, **fixed: Any) -> tuple[Case, str]:
    """The first of so many cases of a kind that fails, and what it says."""
    tried = number = 0
    while tried < most:
        case = replace(draw_case(SEED, number), device_loop=False, **fixed)
        number += 1
        if wanted(case) and not missing(case.family, device_loop=False):
            tried += 1
            if error := check(case).error:
                return case, error
    raise AssertionError(f"not found within {most} cases")


def test_a_token_off_by_one_in_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pick = HostSampler.__call__

    def off_by_one(self: HostSampler, logits: Any, requests: Any) -> list[int]:
        tokens = pick(self, logits, requests)
        return [*tokens[:-1], (tokens[-1] + 1) % 97] if len(tokens) == 3 else tokens

    monkeypatch.setattr(HostSampler, "__call__", off_by_one)
    case, error = found(lambda case: case.kind != "beams" and len(case.asks) > 2, 8, every_row=True)
    assert "generate" in error
    less = smaller(case, seconds=2)
    assert check(less).error and len(less.asks) <= len(case.asks) and len(less.options) <= len(case.options)


def test_a_window_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CascadePlan.run

    def without_window(self: CascadePlan, *given: Any, **named: Any) -> Any:
        return run(self, *given, **{**named, "window": None})

    monkeypatch.setattr(CascadePlan, "run", without_window)
    found(lambda case: any(len(ask.ids) > 20 for ask in case.asks), 8, family="mistral")


def test_noise_that_depends_on_the_place_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "noise_key", lambda seeds, index: (7, index))
    found(lambda case: case.relation == "permuted" and case.kind == "sampled" and len(case.asks) > 2, 5)


def test_prefixes_kept_from_before_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if weights that were changed in place had not been noticed."""
    monkeypatch.setattr(ComputedWith, "holds_for", lambda *_: True)

    def flip(model: Any, dice: Any) -> tuple[str, Any, Any]:
        weight = model.get_input_embeddings().weight
        before = weight.detach().clone()
        weight.data.copy_(before.flip(-1))
        return "the embedding", weight.data, before

    monkeypatch.setattr(support_fuzz_relations, "_change", flip)
    _, error = found(
        lambda case: case.relation == "kept" and len(case.asks) > 3 and case.tokens > 40, 12, family="llama"
    )
    assert "the embedding was changed" in error
