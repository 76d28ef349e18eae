"""Mixers that carry a state, over packed rows of several sequences: as over each sequence by itself."""

from __future__ import annotations

import functools
import sys
import threading
import types
from typing import Any

import pytest
import torch
from support_kernels import plain
from support_state_mixers import HIDDEN, MIXERS, References, mixer_of, run

from hf_batchllm.errors import UnsupportedModelError
from hf_batchllm.patches.state_functions import StateFunctions, mixers, state_context
from hf_batchllm.patches.swap import _after_a_fork

pytestmark = plain
# A sequence: its tokens. Steps: (sequence, tokens, slot that its state comes from, slot that it goes to).
LENGTHS = {"prefix": 9, "stranger": 7, "one": 12, "other": 14}
STEPS: list[list[tuple[str, int, int, int]]] = [
    [("prefix", 5, -1, 0), ("stranger", 2, -1, 1)],
    [("prefix", 4, 0, 0), ("stranger", 1, 1, 1)],
    [("one", 1, 0, 2), ("other", 3, 0, 3)],  # both begin on the prefix
    [("one", 1, 2, 2), ("other", 1, 3, 3), ("stranger", 4, 1, 1)],
    [("other", 1, 3, 3), ("one", 1, 2, 2)],
]


def functions_of(mixer: Any) -> dict[str, Any]:
    home = sys.modules[type(mixer).__module__]
    ((_, _, names),) = mixers(mixer)
    return {name: vars(home)[name] for name in names}


@pytest.mark.parametrize("family", MIXERS)
def test_a_packed_row_is_as_each_sequence_by_itself(family: str) -> None:
    mixer = mixer_of(family)
    generator = torch.Generator().manual_seed(1)
    given = {name: torch.randn(tokens, HIDDEN, generator=generator) for name, tokens in LENGTHS.items()}
    for member in ("one", "other"):
        given[member][: LENGTHS["prefix"]] = given["prefix"]
    want = {name: run(mixer, states) for name, states in given.items()}
    before, references = functions_of(mixer), References(4)
    at = dict.fromkeys(LENGTHS, 0) | {"one": LENGTHS["prefix"], "other": LENGTHS["prefix"]}
    with StateFunctions(mixer).applied():
        assert functions_of(mixer).values() != before.values()
        for step in STEPS:
            names, counts, source, target = (list(column) for column in zip(*step, strict=True))
            parts = [slice(at[name], at[name] + count) for name, count in zip(names, counts, strict=True)]
            references.step(counts, source, target)
            with state_context(references):
                made = run(mixer, torch.cat([given[name][part] for name, part in zip(names, parts, strict=True)]))
            for name, part, ours in zip(names, parts, made.split(counts), strict=True):
                theirs = want[name][part]
                assert (ours - theirs).abs().max() <= 2e-5 * max(1.0, float(theirs.abs().max())), (name, part)
                at[name] = part.stop
        assert torch.equal(run(mixer, given["one"]), want["one"]), "without a context, the own function runs"
    assert functions_of(mixer) == before
    assert at["prefix"] == LENGTHS["prefix"] and at["stranger"] == LENGTHS["stranger"]


def test_two_models_and_an_error_leave_no_trace() -> None:
    mixer, other = mixer_of("mamba2"), mixer_of("mamba2")
    before = functions_of(mixer)
    with StateFunctions(mixer).applied():
        inside = functions_of(mixer)
        with pytest.raises(ZeroDivisionError), StateFunctions(other).applied():
            _ = 1 // 0
        assert functions_of(mixer) == inside and inside["causal_conv1d_fn"] is not before["causal_conv1d_fn"]
    assert functions_of(mixer) == before


def test_a_forked_process_has_the_own_functions() -> None:
    """It has none of the threads that would put them back."""
    mixer = mixer_of("mamba2")
    before, swap = functions_of(mixer), StateFunctions(mixer)
    swap.apply()
    assert functions_of(mixer) != before
    _after_a_fork()
    assert functions_of(mixer) == before
    swap.restore()
    assert functions_of(mixer) == before


def test_other_threads_run_their_own() -> None:
    mixer, states, found = mixer_of("qwen3_next"), torch.randn(5, HIDDEN), []
    want, references = run(mixer, states), References(1)
    references.step([2, 3], [-1, -1], [-1, -1])
    with StateFunctions(mixer).applied(), state_context(references):
        thread = threading.Thread(target=lambda: found.append(run(mixer, states)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], want)


def test_what_is_not_understood_is_refused() -> None:
    mixer, references = mixer_of("qwen3_next"), References(1)
    references.step([5], [-1], [-1])
    with StateFunctions(mixer).applied(), state_context(references):
        function = functions_of(mixer)["causal_conv1d_fn"]
        x, weight = torch.zeros(1, 4, 5), torch.zeros(4, 3)
        with pytest.raises(UnsupportedModelError, match="`seq_idx` is handed to `causal_conv1d_fn`"):
            function(x, weight, seq_idx=torch.zeros(1, 5))
        with pytest.raises(UnsupportedModelError, match="`mask` is handed to"):
            function(x, weight, mask=torch.zeros(1, 5))
        with pytest.raises(UnsupportedModelError, match="a batch of 2 sequences"):
            function(x.repeat(2, 1, 1), weight)
        rule = functions_of(mixer)["torch_chunk_gated_delta_rule"]
        with pytest.raises(UnsupportedModelError, match="`initial_state` is handed to"):
            rule(*[torch.zeros(1, 5, 2, 4)] * 3, *[torch.zeros(1, 5, 2)] * 2, initial_state=torch.zeros(1, 2, 4, 4))
        function(x, weight, position_ids=torch.zeros(1, 5), chunk=3)
    mixer, references = mixer_of("mamba"), References(1)
    references.step([5], [-1], [-1])
    with StateFunctions(mixer).applied(), state_context(references):
        scan, rows, keys = functions_of(mixer)["mamba_selective_scan"], torch.ones(1, 4, 5), torch.ones(1, 3, 5)
        for ways in ({}, {"use_mambapy": True, "use_associative_scan": True}):
            assert scan(rows, rows, -torch.ones(4, 3), keys, keys, **ways).shape == rows.shape
        with pytest.raises(UnsupportedModelError, match="`return_last_state` is handed to `mamba_selective_scan`"):
            scan(rows, rows, -torch.ones(4, 3), keys, keys, return_last_state=True)


@pytest.mark.parametrize(
    ("family", "name"), [("mamba", "mamba_inner_fn"), ("mamba2", "mamba2_split_conv1d_scan_combined")]
)
def test_a_kernel_for_a_whole_mixer_in_train_mode_is_passed_over(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer, states, references = mixer_of(family), torch.randn(5, HIDDEN), References(1)
    home = vars(sys.modules[type(mixer).__module__])
    want = torch.cat([run(mixer, states[:2]), run(mixer, states[2:])])
    # As with mamba-ssm: transformers' own function, with a kernel behind it.
    there = {**globals(), "__name__": "transformers.integrations.hub_kernels"}
    kernel = types.FunctionType((lambda *_, **__: torch.zeros(1, 5, HIDDEN)).__code__, there)
    kernel = functools.wraps(home[name])(kernel)
    monkeypatch.setitem(home, name, kernel)
    mixer.train()
    assert not run(mixer, states).any()
    references.step([2, 3], [-1, -1], [-1, -1])
    with StateFunctions(mixer).applied(), state_context(references):
        assert (run(mixer, states) - want).abs().max() <= 2e-5 * max(1.0, float(want.abs().max()))
    assert home[name] is kernel


def test_a_function_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = mixer_of("lfm2")
    monkeypatch.setattr(sys.modules[type(mixer).__module__], "causal_conv1d_fn", lambda x, *_, **__: x)
    assert list(mixers(mixer)) == []
