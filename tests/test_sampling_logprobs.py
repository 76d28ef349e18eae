"""``logprobs`` and ``prompt_logprobs``: those of a plain forward, whatever was shared, cut or run twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import up_to
from support_families import FAMILIES, build, random_prompts
from support_parity import CUTS, counted_tokens, each_config_with_some, pages_of_memory, tries, watched  # noqa: F401

from hf_batchllm import BatchConfig, BatchGenerator, BatchResult, Generation, GenerationInterrupted
from hf_batchllm.engine import extra_outputs
from hf_batchllm.errors import OptionValueError, UnsupportedOptionError
from hf_batchllm.kernels.likeliest_torch import likeliest
from hf_batchllm.sampling import logprobs as logprobs_module
from hf_batchllm.sampling.logprobs import log_probs, log_probs_of_tokens

FAMILY = "llama"
KINDS_OF_ATTENTION = ["llama", "gemma3", "gpt_oss", "opt"]  # windows, sinks, learned positions


def mixed_prompts(seed: int = 1, count: int = 14) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, "mixed", count)


def generate(family: str, prompts: Sequence[Sequence[int]], new_tokens: int = 5, **options: Any) -> BatchResult:
    config = {field.name: options.pop(field.name) for field in fields(BatchConfig) if field.name in options}
    generator = BatchGenerator(build(family), **{"min_shared_tokens": 1, **config})
    given = {"logprobs": 3, "prompt_logprobs": 2, "max_new_tokens": new_tokens, **options}
    return generator.generate(prompts, progress=False, **given)


def assert_right(family: str, result: Sequence[Generation], prompt_k: int | None = 2, k: int | None = 3) -> None:
    """Against one plain forward over each sequence."""
    for generation in result:
        prompt, ids = generation.prompt_token_ids, generation.prompt_token_ids + generation.token_ids
        with torch.no_grad():
            expected = build(family)(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
        if prompt_k is None:
            assert generation.prompt_logprobs is None
        else:
            assert len(generation.prompt_logprobs) == len(prompt) and generation.prompt_logprobs[0] is None
            for place in range(1, len(prompt)):
                assert_entry(generation.prompt_logprobs[place], ids[place], expected[place - 1], prompt_k)
        if k is None:
            assert generation.logprobs is None
        else:
            assert len(generation.logprobs) == len(generation.token_ids)
            for place, token in enumerate(generation.token_ids):
                assert_entry(generation.logprobs[place], token, expected[len(prompt) + place - 1], k)


def assert_entry(entry: dict[int, float] | None, token: int, expected: torch.Tensor, k: int) -> None:
    assert entry is not None and token in entry
    assert len(entry) in (k, k + 1) and (len(entry) == k or list(entry)[-1] == token)
    values = list(entry.values())
    assert values == sorted(values, reverse=True)
    assert all(type(other) is int and type(value) is float for other, value in entry.items())
    for other, value in entry.items():
        assert value == pytest.approx(expected[other].item(), abs=1e-4)
    assert values[:k] == pytest.approx(expected.topk(k).values.tolist(), abs=1e-4)


# -- as a plain forward gives them -----------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "config"), each_config_with_some(CUTS, 1, KINDS_OF_ATTENTION))
@pytest.mark.usefixtures("watched")
def test_shared_or_not_and_cut_anywhere(family: str, config: dict[str, Any]) -> None:
    result = generate(family, mixed_prompts(), **config)
    assert_right(family, result)


@given(tries(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 3, 5, 16, 512]), st.integers(0, 3))
@settings(max_examples=up_to(25))
def test_prompts_grown_on_one_another(prompts: list[list[int]], page_size: int, budget: int, fee: int) -> None:
    result = generate(FAMILY, prompts, 2, page_size=page_size, max_batch_tokens=budget, min_shared_tokens=fee)
    assert_right(FAMILY, result)


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "page_size"), [("llama", 8), ("gemma3", 1)])
@pytest.mark.usefixtures("watched")
def test_what_was_given_up_and_computed_again(family: str, page_size: int) -> None:
    rng = random.Random(2)
    prompts = [prompt for kind in ("nested", "distinct") for prompt in random_prompts(rng, 97, kind, 8)]
    memory = pages_of_memory(build(family), 160 // page_size, page_size)
    with head_rows(family) as rows:
        result = generate(family, prompts, 40, eos_token_id=1000, kv_memory=memory, page_size=page_size)
    report = result.report
    assert report is not None and report.preemptions > 0 and report.recomputed_tokens > 0
    assert_right(family, result)
    assert sum(rows) == report.plan.computed_tokens + 39 * len(prompts), "a position was asked for again"


def test_a_request_that_fits_only_without_its_prefixes() -> None:
    page = pages_of_memory(build(FAMILY), 1, 16)
    prompts = [[5] * 17 + [7], [5] * 17 + [8]]
    with pytest.warns(UserWarning, match="only alone"):
        result = generate(FAMILY, prompts, 15, page_size=16, kv_memory=2 * page)
    assert_right(FAMILY, result)


def test_samples_of_a_prompt() -> None:
    prompts = mixed_prompts(3, 7)
    options = {"do_sample": True, "num_return_sequences": 3, "temperature": 3.0, "top_k": 20, "seed": 5}
    with counted_tokens(build(FAMILY)) as sizes:
        result = generate(FAMILY, prompts, **options)
    assert result.report is not None
    assert sum(sizes) == result.report.plan.computed_tokens + 4 * len(result)
    assert len({tuple(generation.token_ids) for generation in result}) > len(prompts)
    assert_right(FAMILY, result)
    long = max(result, key=lambda generation: len(generation.prompt_token_ids))
    first, second = (each.prompt_logprobs for each in result if each.index == long.index and each.sample < 2)
    assert first is not second and first == second
    assert all(one is other for one, other in zip(first[:-1], second[:-1], strict=True)), "they take their room once"
    plain = generate(FAMILY, prompts, logprobs=None, prompt_logprobs=None, **options)
    assert plain.token_ids == result.token_ids


def test_they_are_of_raw_logits_whatever_is_done_to_them() -> None:
    options = {"repetition_penalty": 5.0, "min_new_tokens": 3, "eos_token_id": list(range(50)), "suppress_tokens": [60]}
    result = generate(FAMILY, mixed_prompts(), 8, **options)
    assert_right(FAMILY, result)
    lengths = {len(generation.token_ids) for generation in result}
    assert len(lengths) > 1 and min(lengths) >= 3
    assert any(len(entry) == 4 for each in result for entry in each.logprobs), (
        "no token was chosen that is not among the likeliest"
    )


@pytest.mark.some_cases
@pytest.mark.parametrize("k", [0, 1, 100, 101, 1000])
def test_how_many(k: int) -> None:
    prompts = mixed_prompts(2, 7)
    result = generate(FAMILY, prompts, logprobs=k, prompt_logprobs=None)
    assert_right(FAMILY, result, None, min(k, 101))
    result = generate(FAMILY, prompts, logprobs=None, prompt_logprobs=k)
    assert_right(FAMILY, result, min(k, 101), None)
    if k == 0:
        entries = [entry for each in result for entry in each.prompt_logprobs[1:]]
        assert all(len(entry) == 1 for entry in entries)


def test_of_half_precision_in_float32() -> None:
    model = FAMILIES[FAMILY]().to(torch.bfloat16)
    prompts = mixed_prompts(2, 7)
    seen: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out[0]))
    out = BatchGenerator(model).generate(prompts, max_new_tokens=1, logprobs=2, max_length=None)
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
    assert torch.equal(likeliest(scores, k)[1], expected)
    for row in range(7):
        (entry,) = log_probs(scores[row : row + 1], np.array([0]), [int(expected[row, 0])], k)
        assert list(entry) == expected[row].tolist()


@pytest.mark.parametrize("k", [0, 1, 5])
def test_as_the_device_notes_them(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens are picked on the device, all log-probabilities are found as there; here with the twin."""
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
    prompts = mixed_prompts()
    with counted_tokens(build(FAMILY)) as sizes, head_rows(FAMILY) as rows:
        result = generate(FAMILY, prompts, **config)
    assert result.report is not None
    computed, decoded = result.report.plan.computed_tokens, 4 * len(prompts)
    assert sum(sizes) == sum(rows) == computed + decoded
    assert max(sizes) <= config.get("max_batch_tokens", 2048)
    with head_rows(FAMILY) as rows:
        generate(FAMILY, prompts, prompt_logprobs=None, **config)
    assert sum(rows) == len(prompts) + decoded


def test_steps_are_small_where_the_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_outputs, "MOST_LOGITS", 9 * 101 + 100)
    monkeypatch.setattr(logprobs_module, "LOGITS_AT_ONCE", 2 * 101)
    with counted_tokens(build(FAMILY)) as sizes:
        result = generate(FAMILY, mixed_prompts())
    assert max(sizes) == 9
    assert_right(FAMILY, result)
    with counted_tokens(build(FAMILY)) as sizes:
        assert_right(FAMILY, generate(FAMILY, mixed_prompts(), prompt_logprobs=None), None)
    assert max(sizes) > 50


def test_nothing_is_held_of_prompts_that_were_handed_out() -> None:
    generator = BatchGenerator(build(FAMILY), kv_memory=pages_of_memory(build(FAMILY), 10, 8), page_size=8)
    prompts = random_prompts(random.Random(1), 97, "distinct", 12)
    stream = generator.stream(prompts, max_new_tokens=3, logprobs=1, prompt_logprobs=1)
    for count, _ in enumerate(stream, start=1):
        running = generator._turns.running
        assert running is not None and running.call is not None
        outputs = running.call.outputs
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
        assert generator._kv.cache is not None
        return [tuple(prefix.ids.tolist()) for prefix in generator._kv.cache._kept]

    before = kept()
    # One prompt parts from the document half-way, where a kept prefix would be cut.
    prompts = [*first, [*document[:17], 3], [*document[:17], 4], [*document, 51, 52]]
    with counted_tokens(model) as sizes:
        result = generator.generate(prompts, max_new_tokens=3, logprobs=3, prompt_logprobs=2)
    assert_right(FAMILY, result)
    report = result.report
    assert report is not None and report.cached_tokens == 0
    assert sum(sizes) == report.plan.computed_tokens + 2 * len(prompts)
    assert sorted(kept()) == sorted(before)
    again = generator.generate(first, max_new_tokens=3, logprobs=3)
    assert again.report is not None and again.report.cached_tokens == len(document)
    assert_right(FAMILY, again, None)


@pytest.mark.usefixtures("watched")
def test_prefixes_of_such_a_call_are_kept_for_the_next() -> None:
    generator = BatchGenerator(build(FAMILY), keep_prefixes=4, min_shared_tokens=4)
    prompts = [[*range(5, 35), more] for more in range(3)]
    assert_right(FAMILY, generator.generate(prompts, max_new_tokens=3, logprobs=3, prompt_logprobs=2))
    again = generator.generate(prompts, max_new_tokens=3)
    assert again.report is not None and again.report.cached_tokens == 30


# -- how calls go ----------------------------------------------------------------------------------------------


def test_streams_give_them_too() -> None:
    prompts = mixed_prompts()
    generator = BatchGenerator(build(FAMILY), min_shared_tokens=1)
    rows = list(generator.stream(prompts, max_new_tokens=5, logprobs=3, prompt_logprobs=2))
    assert sorted(generation.index for generation in rows) == list(range(len(prompts)))
    assert_right(FAMILY, rows)


def test_without_asking_there_are_none() -> None:
    result = generate(FAMILY, mixed_prompts(2, 7), logprobs=None, prompt_logprobs=None)
    assert_right(FAMILY, result, None, None)


def test_prompts_that_cannot_be_run_have_none() -> None:
    prompts: list[Any] = [[5, 6, 7], [], [5, 6, 8]]
    result = generate(FAMILY, prompts, on_error="record")
    assert result[1].finish_reason == "error" and result[1].logprobs is None and result[1].prompt_logprobs is None
    assert_right(FAMILY, [result[0], result[2]])
    all_bad = BatchGenerator(build(FAMILY)).generate
    with pytest.raises(OptionValueError):
        all_bad([[]], on_error="record", logprobs=-1, max_new_tokens=2)


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
    assert_right(FAMILY, finished, None)
    assert_right(FAMILY, generator.generate(prompts, max_new_tokens=2, logprobs=3), None)  # and nothing is left of it


def test_settings_of_each_prompt() -> None:
    from transformers import GenerationConfig

    prompts = mixed_prompts(2, 7)
    configs = [GenerationConfig(max_new_tokens=2 + place % 3) for place in range(len(prompts))]
    result = BatchGenerator(build(FAMILY)).generate(prompts, configs, logprobs=3, prompt_logprobs=2)
    assert [len(generation.token_ids) for generation in result] == [config.max_new_tokens for config in configs]
    assert_right(FAMILY, result)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 2.5, "5", [1]])
def test_what_is_no_number_of_tokens_is_said(name: str, value: Any) -> None:
    with pytest.raises(OptionValueError, match=rf"`{name}` must be"):
        BatchGenerator(build(FAMILY)).generate([[5, 6]], max_new_tokens=2, **{name: value})


def test_tensors_have_no_place_for_them() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"`logprobs` goes with a list of prompts.*`output_logits=True`"):
        BatchGenerator(build(FAMILY)).generate(input_ids=torch.tensor([[5, 6]]), logprobs=1, max_new_tokens=2)


def test_likeliest_first_also_among_equals() -> None:
    logits = torch.zeros(3, 7)
    logits[1, 4] = 2.0
    entries = log_probs(logits, torch.tensor([0, 1, 1, 2]).numpy(), [6, 4, 5, 0], 2)
    assert all(len(entry) in (2, 3) for entry in entries)
    assert next(iter(entries[1])) == next(iter(entries[2])) == 4 and list(entries[2])[-1] == 5
    assert [entry[token] for entry, token in zip(entries, [6, 4, 5, 0], strict=True)] == pytest.approx(
        [logits.log_softmax(-1)[row, token].item() for row, token in [(0, 6), (1, 4), (1, 5), (2, 0)]]
    )
