"""``logprobs`` and ``prompt_logprobs``: those of a plain forward, whatever was shared, cut or run twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import up_to
from support_families import FAMILIES, build, random_prompts
from support_logprobs import assert_right, generated, right_result
from support_parity import CUTS, counted_tokens, each_config_with_some, pages_of_memory, tries, watched  # noqa: F401
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.engine import extra_outputs
from hf_batchllm.engine.extra_outputs import ExtraOutputs
from hf_batchllm.errors import OptionValueError
from hf_batchllm.kernels.reference.top_logprobs_torch import most_likely
from hf_batchllm.sampling import logprobs as logprobs_module
from hf_batchllm.sampling.logprobs import log_probs, log_probs_of_tokens

FAMILY = "llama"
KINDS_OF_ATTENTION = ["llama", "gemma3", "gpt_oss", "opt"]  # windows, sinks, learned positions


def mixed_prompts(seed: int = 2, count: int = 7) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, "mixed", count)


MANY = mixed_prompts(1, 14)


# -- as a plain forward gives them -----------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "config"), each_config_with_some(CUTS, 1, KINDS_OF_ATTENTION))
@pytest.mark.usefixtures("watched")
def test_shared_or_not_and_cut_anywhere(family: str, config: dict[str, Any]) -> None:
    right_result(family, MANY, **config)


@given(tries(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 3, 5, 16, 512]), st.integers(0, 3))
@settings(max_examples=up_to(25))
def test_prompts_grown_on_one_another(prompts: list[list[int]], page_size: int, budget: int, fee: int) -> None:
    right_result(FAMILY, prompts, 2, page_size=page_size, max_batch_tokens=budget, min_shared_tokens=fee)


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "page_size"), [("llama", 8), ("gemma3", 1)])
@pytest.mark.usefixtures("watched")
def test_what_was_given_up_and_computed_again(family: str, page_size: int) -> None:
    rng = random.Random(2)
    prompts = [prompt for kind in ("nested", "distinct") for prompt in random_prompts(rng, 97, kind, 8)]
    memory = pages_of_memory(build(family), 160 // page_size, page_size)
    with head_rows(family) as rows:
        result = generated(family, prompts, 40, eos_token_id=1000, kv_memory=memory, page_size=page_size)
    report = result.report
    assert report is not None and report.preemptions > 0 and report.recomputed_tokens > 0
    assert_right(build(family), result)
    assert sum(rows) == report.plan.computed_tokens + 39 * len(prompts), "a position was asked for again"


def test_a_request_that_fits_only_without_its_prefixes() -> None:
    page = pages_of_memory(build(FAMILY), 1, 16)
    with pytest.warns(UserWarning, match="only alone"):
        right_result(FAMILY, [[5] * 17 + [7], [5] * 17 + [8]], 15, page_size=16, kv_memory=2 * page)


def test_samples_of_a_prompt() -> None:
    prompts = mixed_prompts(3)
    options = {"do_sample": True, "num_return_sequences": 3, "temperature": 3.0, "top_k": 20, "seed": 5}
    with counted_tokens(build(FAMILY)) as sizes:
        result = right_result(FAMILY, prompts, **options)
    assert result.report is not None
    assert sum(sizes) == result.report.plan.computed_tokens + 4 * len(result)
    assert len({tuple(generation.token_ids) for generation in result}) > len(prompts)
    long = max(result, key=lambda generation: len(generation.prompt_token_ids))
    first, second = (each.prompt_logprobs for each in result if each.index == long.index and each.sample < 2)
    assert first is not second and first == second
    assert all(one is other for one, other in zip(first[:-1], second[:-1], strict=True)), "they take their room once"
    plain = right_result(FAMILY, prompts, logprobs=None, prompt_logprobs=None, **options)
    assert plain.token_ids == result.token_ids


def test_they_are_of_raw_logits_whatever_is_done_to_them() -> None:
    options = {"repetition_penalty": 5.0, "min_new_tokens": 3, "eos_token_id": list(range(50)), "suppress_tokens": [60]}
    result = right_result(FAMILY, MANY, 8, **options)
    lengths = {len(generation.token_ids) for generation in result}
    assert len(lengths) > 1 and min(lengths) >= 3
    assert any(len(entry) == 4 for each in result for entry in each.logprobs), (
        "no token was chosen that is not among the most likely"
    )


@pytest.mark.some_cases
@pytest.mark.parametrize("k", [None, 0, 1, 100, 101, 1000])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_how_many_if_any(name: str, k: int | None) -> None:
    right_result(FAMILY, mixed_prompts(), **({"logprobs": None, "prompt_logprobs": None} | {name: k}))


def test_of_half_precision_in_float32() -> None:
    model = FAMILIES[FAMILY]().to(torch.bfloat16)
    seen: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out[0]))
    out = BatchGenerator(model).generate(mixed_prompts(), max_new_tokens=1, logprobs=2, max_length=None)
    handle.remove()
    rows = torch.cat(seen).float().log_softmax(dim=-1).amax(dim=-1)
    best = torch.tensor([next(iter(generation.logprobs[0].values())) for generation in out])
    torch.testing.assert_close(best.sort().values, rows.sort().values)


@pytest.mark.parametrize("letters", [2, 40, 10_000])
@pytest.mark.parametrize("k", [1, 5, 80])
def test_of_equals_the_lowest_are_named(letters: int, k: int) -> None:
    """However many are as good as the last one that is asked for, and whatever else is in the step."""
    generator = torch.Generator().manual_seed(letters + k)
    scores = torch.randint(letters, (7, 3000), generator=generator).float()
    scores[3, 7:] = scores[4, : 3000 - k // 2] = -torch.inf  # little is left to choose from
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(most_likely(scores, k)[1], expected)
    for row in range(7):
        (entry,) = log_probs(scores[row : row + 1], np.array([0]), [int(expected[row, 0])], k)
        assert list(entry) == expected[row].tolist()


@pytest.mark.parametrize("k", [0, 1, 5])
def test_as_the_device_notes_them(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens are picked on the device, all log-probabilities are found as there; here with the reference."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(9, 300, generator=generator)
    rows, tokens = np.array([8, 0, 1, 1, 2, 3, 7, 4]), [5, 6, 7, 8, 9, 299, 0, 1]
    found = log_probs(logits, rows, tokens, k)
    scored = log_probs_of_tokens(logits, np.sort(rows), np.array(tokens))
    monkeypatch.setattr(logprobs_module, "may_pick_on", lambda device: True)
    monkeypatch.setattr(logprobs_module, "LOGITS_AT_ONCE", 900)
    noted = log_probs(logits, rows, tokens, k)
    assert [list(entry) for entry in noted] == [list(entry) for entry in found]
    for one, other in zip(noted, found, strict=True):
        assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-5)
    for one, other in zip(log_probs_of_tokens(logits, np.sort(rows), np.array(tokens)), scored, strict=True):
        torch.testing.assert_close(one, other)


# -- what it costs ---------------------------------------------------------------------------------------------


@contextmanager
def head_rows(family: str) -> Iterator[list[int]]:
    """The rows of each run of the LM head."""
    rows: list[int] = []
    head = build(family).get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2]))
    try:
        yield rows
    finally:
        handle.remove()


@pytest.mark.parametrize("config", [{}, {"max_batch_tokens": 5}, {"share_prefixes": False}], ids=str)
def test_each_token_is_run_once_and_the_head_only_where_it_is_asked(config: dict[str, Any]) -> None:
    with counted_tokens(build(FAMILY)) as sizes, head_rows(FAMILY) as rows:
        result = generated(FAMILY, MANY, **config)
    assert result.report is not None
    computed, decoded = result.report.plan.computed_tokens, 4 * len(MANY)
    assert sum(sizes) == sum(rows) == computed + decoded
    assert max(sizes) <= config.get("max_batch_tokens", 2048)
    with head_rows(FAMILY) as rows:
        generated(FAMILY, MANY, prompt_logprobs=None, **config)
    assert sum(rows) == len(MANY) + decoded


@pytest.mark.parametrize(("asked", "most", "least"), [(2, 9, 9), (None, 2048, 51)])
def test_steps_are_small_where_the_vocabulary_is_large(
    asked: int | None, most: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If log-probabilities of prompts are asked for."""
    monkeypatch.setattr(extra_outputs, "MOST_LOGITS", 9 * 101 + 100)
    monkeypatch.setattr(logprobs_module, "LOGITS_AT_ONCE", 2 * 101)
    with counted_tokens(build(FAMILY)) as sizes:
        right_result(FAMILY, MANY, prompt_logprobs=asked)
    assert least <= max(sizes) <= most


def test_nothing_is_held_of_prompts_that_were_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ExtraOutputs] = []

    class Noted(ExtraOutputs):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("hf_batchllm.engine.generate_calls.ExtraOutputs", Noted)
    generator = BatchGenerator(build(FAMILY), kv_memory=pages_of_memory(build(FAMILY), 10, 8), page_size=8)
    prompts = random_prompts(random.Random(1), 97, "distinct", 12)
    stream = generator.stream(prompts, max_new_tokens=3, logprobs=1, prompt_logprobs=1)
    for count, _ in enumerate(stream, start=1):
        (outputs,) = made
        assert outputs._prompts is not None and outputs._new_tokens is not None
        assert len(outputs._prompts._chains) == len(prompts) - count
        assert len(outputs._prompts._known) <= len(prompts) - count
        assert len(outputs._new_tokens._entries) <= len(prompts) - count


# -- kept prefixes ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("watched")
def test_kept_prefixes_are_not_made_use_of_and_stay() -> None:
    model = build(FAMILY)
    generator = BatchGenerator(model, keep_prefixes=4, min_shared_tokens=4, page_size=4)
    document, other = list(range(5, 45)), list(range(60, 90))
    first = [[*document, 50 + more] for more in range(3)]
    generator.generate([*first, [*other, 7], [*other, 8]], max_new_tokens=3)

    def kept() -> list[tuple[int, ...]]:
        assert generator._resources.kv.cache is not None
        return sorted(tuple(prefix.ids.tolist()) for prefix in generator._resources.kv.cache._kept)

    before = kept()
    # One prompt parts from the document half-way, where a kept prefix would be cut.
    prompts = [*first, [*document[:17], 3], [*document[:17], 4], [*document, 51, 52]]
    with counted_tokens(model) as sizes:
        result = generator.generate(prompts, max_new_tokens=3, logprobs=3, prompt_logprobs=2)
    assert_right(model, result)
    report = result.report
    assert report is not None and report.cached_tokens == 0
    assert sum(sizes) == report.plan.computed_tokens + 2 * len(prompts)
    assert kept() == before
    again = generator.generate(first, max_new_tokens=3, logprobs=3)
    assert again.report is not None and again.report.cached_tokens == len(document)
    assert_right(model, again, None)


@pytest.mark.usefixtures("watched")
def test_prefixes_of_such_a_call_are_kept_for_the_next() -> None:
    generator = BatchGenerator(build(FAMILY), keep_prefixes=4, min_shared_tokens=4)
    prompts = [[*range(5, 35), more] for more in range(3)]
    assert_right(build(FAMILY), generator.generate(prompts, max_new_tokens=3, logprobs=3, prompt_logprobs=2))
    again = generator.generate(prompts, max_new_tokens=3)
    assert again.report is not None and again.report.cached_tokens == 30


# -- how calls go ----------------------------------------------------------------------------------------------


def test_streams_give_them_too() -> None:
    generator = BatchGenerator(build(FAMILY), min_shared_tokens=1)
    rows = list(generator.stream(MANY, max_new_tokens=5, logprobs=3, prompt_logprobs=2))
    assert sorted(generation.index for generation in rows) == list(range(len(MANY)))
    assert_right(build(FAMILY), rows)


def test_prompts_that_cannot_be_run_have_none() -> None:
    result = right_result(FAMILY, [[5, 6, 7], [], [5, 6, 8]], on_error="record")
    assert result[1].finish_reason == "error" and result[1].logprobs is None and result[1].prompt_logprobs is None
    with pytest.raises(OptionValueError):
        BatchGenerator(build(FAMILY)).generate([[]], on_error="record", logprobs=-1, max_new_tokens=2)


def test_what_had_finished_before_an_interrupt_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def interrupted(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise KeyboardInterrupt
        return log_probs(*args)

    monkeypatch.setattr(logprobs_module, "log_probs", interrupted)
    generator = BatchGenerator(build(FAMILY), kv_memory=pages_of_memory(build(FAMILY), 10, 8), page_size=8)
    prompts = random_prompts(random.Random(1), 97, "distinct", 14)
    with pytest.raises(GenerationInterrupted) as caught:
        generator.generate(prompts, max_new_tokens=2, logprobs=3)
    finished = caught.value.result
    assert 0 < len(finished) < len(prompts)
    for rows in (finished, generator.generate(prompts, max_new_tokens=2, logprobs=3)):  # and nothing is left of it
        assert_right(build(FAMILY), rows, None)


def test_settings_of_each_prompt() -> None:
    prompts = mixed_prompts()
    configs = [GenerationConfig(max_new_tokens=2 + place % 3) for place in range(len(prompts))]
    result = BatchGenerator(build(FAMILY)).generate(prompts, configs, logprobs=3, prompt_logprobs=2)
    assert [len(generation.token_ids) for generation in result] == [config.max_new_tokens for config in configs]
    assert_right(build(FAMILY), result)
