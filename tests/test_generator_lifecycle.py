"""However a call ends, the model is its user's again, every page is free, and the next call is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_families import FAMILIES, build
from support_parity import assert_parity, counted_tokens
from support_parity import watched as watched  # a fixture
from support_untouched import FAMILY, NEW_TOKENS, assert_untouched, fingerprint, prompts
from torch import nn

from hf_batchllm import BatchGenerator, GenerationInterrupted, GeneratorBusyError, UnsupportedModelError
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.scheduler import GroupScheduler


class Boom(RuntimeError):
    pass


def answered(generator: BatchGenerator, given: list[list[int]], new_tokens: int = NEW_TOKENS) -> Any:
    """The report of a call, the answers of which are those of ``generate``."""
    result = generator.generate(given, max_new_tokens=new_tokens)
    assert_parity(FAMILY, given, result, new_tokens)
    return result.report


def break_off(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException, inside: bool = True) -> None:
    """Let the model fail in its ``after``-th step: in the middle of its layers, or as the step begins."""
    step, count = ModelRunner.step, 0

    def failing(self: ModelRunner, batch: Any, *latest: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count != after:
            return step(self, batch, *latest)
        if not inside:
            raise error

        def raise_it(*args: Any) -> None:
            raise error

        handle = self.model.get_output_embeddings().register_forward_pre_hook(raise_it)
        try:
            return step(self, batch, *latest)
        finally:
            handle.remove()

    monkeypatch.setattr(ModelRunner, "step", failing)


def test_after_a_call_the_model_is_as_it_was(watched: list[Any]) -> None:
    before = fingerprint(build(FAMILY))
    with BatchGenerator(build(FAMILY)) as generator:
        assert fingerprint(build(FAMILY)) == before
        generator.generate(prompts(), max_new_tokens=NEW_TOKENS)
        assert_untouched(generator, before, watched)
    assert fingerprint(build(FAMILY)) == before
    with pytest.raises(GeneratorBusyError, match="closed"):
        generator.generate(prompts(), max_new_tokens=2)


@pytest.mark.some_cases
@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("keep", [0, 4])
def test_after_an_exception(after: int, keep: int, watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(build(FAMILY))
    generator = BatchGenerator(build(FAMILY), keep_prefixes=keep, min_shared_tokens=4)
    if keep:
        generator.generate(prompts(), max_new_tokens=NEW_TOKENS)
    break_off(monkeypatch, after, Boom())
    with pytest.raises(Boom):
        generator.generate(prompts(), max_new_tokens=NEW_TOKENS)
    assert_untouched(generator, before, watched if not keep else [])


@pytest.mark.some_cases
@pytest.mark.parametrize("after", random.Random(5).sample(range(1, 19), 12))
def test_after_an_interrupt_what_had_finished_is_kept(
    after: int, watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(build(FAMILY))
    # A small budget spreads the prompts over many steps, so that some have finished when others begin.
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=24, page_size=8, scheduler=GroupScheduler())
    break_off(monkeypatch, after, KeyboardInterrupt(), inside=bool(after % 2))
    with pytest.raises(GenerationInterrupted) as caught:
        generator.generate(prompts(), max_new_tokens=NEW_TOKENS)
    assert isinstance(caught.value, KeyboardInterrupt)
    for generation in caught.value.result:
        assert generation.prompt_token_ids == prompts()[generation.index]
        assert len(generation.token_ids) == NEW_TOKENS
    report = caught.value.result.report
    assert report.finished == len(caught.value.result) < report.sequences == len(prompts())
    assert str(report).startswith(f"interrupted: {report.finished} of {report.sequences} sequences")
    assert report.saving == pytest.approx(generator.plan(prompts()).saving)  # not of the part that was run
    if after > 14:
        assert 0 < len(caught.value.result) < len(prompts())
    assert_untouched(generator, before, watched)


def test_a_stream_gives_what_generate_gives() -> None:
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=24)
    streamed = list(generator.stream(prompts(), max_new_tokens=NEW_TOKENS))
    assert sorted(streamed, key=lambda generation: generation.index) == list(
        generator.generate(prompts(), max_new_tokens=NEW_TOKENS)
    )
    recorded = list(generator.stream([[], [5, 6]], max_new_tokens=2, on_error="record"))
    assert [generation.finish_reason for generation in recorded] == ["error", "length"]
    with pytest.raises(ValueError, match="max_new_tokens"):
        generator.stream(prompts(), max_new_tokens=0)  # at once, not when the first result is asked for


def test_a_stream_that_was_refused_can_be_asked_again() -> None:
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=24)
    first, second = (generator.stream(prompts(), max_new_tokens=NEW_TOKENS) for _ in range(2))
    streamed = [next(first)]
    for _ in range(2):
        with pytest.raises(GeneratorBusyError, match="a stream is still open"):
            list(second)
    streamed += first
    assert list(second) == streamed and len(streamed) == len(prompts())
    assert not list(first) and not list(second), "each result is given once"
    unasked = generator.stream(prompts(), max_new_tokens=NEW_TOKENS)
    generator.close()
    for _ in range(2):
        with pytest.raises(GeneratorBusyError, match="closed"):
            list(unasked)


@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_user_does_to_results_does_not_get_into_the_report(streamed: bool) -> None:
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=24)
    new_tokens = 0
    options = {"max_new_tokens": NEW_TOKENS}
    for generation in generator.stream(prompts(), **options) if streamed else generator.generate(prompts(), **options):
        new_tokens += len(generation.token_ids)
        generation.token_ids.clear()
        generation.prompt_token_ids.clear()
    assert generator.last_report is not None and generator.last_report.new_tokens == new_tokens
    again = generator.generate(prompts(), **options)
    assert sum(map(len, again.token_ids)) == new_tokens


# -- prefixes kept from one call to the next -------------------------------------------------------------------


def document(seed: int, length: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(length)]


def questions(text: list[int], count: int = 3, seed: int = 9) -> list[list[int]]:
    rng = random.Random(seed)
    return [[*text, *(rng.randrange(3, 97) for _ in range(3 + index))] for index in range(count)]


@pytest.mark.some_cases
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_a_kept_prefix_is_not_computed_again(page_size: int, watched: list[Any]) -> None:
    text = document(1)
    generator = BatchGenerator(build(FAMILY), keep_prefixes=2, page_size=page_size)
    with counted_tokens(build(FAMILY)) as sizes:
        first = generator.generate(questions(text), max_new_tokens=NEW_TOKENS)
        assert first.report.cached_tokens == 0
        for again in (questions(text, seed=10), questions(text, 1, seed=11), questions(text[:37], seed=12)):
            shared = 37 if len(again[0]) < 50 else 60
            sizes.clear()
            report = answered(generator, again)
            own = sum(len(prompt) - shared for prompt in again)
            assert sizes[0] == own  # the first step holds all prompts, and no token of the document
            assert (report.cached_tokens, report.computed_tokens) == (shared, own)
    # Between calls there is memory for the kept prefix and for nothing else.
    home = generator._resources.kv
    assert home.cache is not None and home.storage is not None
    assert home.cache.num_pages == -(-60 // page_size) and home.cache.free_pages == 0
    assert home.storage.bytes == home.cache.num_pages * home.page_bytes
    generator.forget_prefixes()
    assert home.storage is None
    assert generator.generate(questions(text), max_new_tokens=2).report.cached_tokens == 0


def test_the_least_recently_used_prefix_goes_first() -> None:
    texts = [document(seed) for seed in range(3)]
    generator = BatchGenerator(build(FAMILY), keep_prefixes=2)

    # As texts[0] comes again, texts[2] goes.
    for number, cached in ((0, 0), (1, 0), (2, 0), (1, 60), (0, 0), (1, 60), (2, 0)):
        assert answered(generator, questions(texts[number], 2), 2).cached_tokens == cached


def test_nested_prefixes_are_kept_and_the_inner_one_is_found() -> None:
    text = document(1)
    branches = [text + document(seed, 40) for seed in (5, 6)]
    given = [prompt for branch in branches for prompt in questions(branch)]
    generator = BatchGenerator(build(FAMILY), keep_prefixes=8)
    generator.generate(given, max_new_tokens=2)
    assert answered(generator, questions(branches[1], 1, seed=3)).cached_tokens == 100
    assert answered(generator, given).cached_tokens == 60 + 2 * 40


def refused(**options: Any) -> Callable[..., None]:
    def ask(generator: BatchGenerator, given: list[list[int]]) -> None:
        with pytest.raises(ValueError, match="max_new_token"):
            generator.generate(given, **options)

    return ask


def abandon(generator: BatchGenerator, given: list[list[int]]) -> None:
    stream = generator.stream([given[0], [], given[1]], max_new_tokens=2, on_error="record")
    assert next(stream).finish_reason == "error"


def fail(generator: BatchGenerator, given: list[list[int]]) -> None:
    def no_memory(self: KVStorage, num_pages: int, num_slots: int) -> None:
        raise torch.OutOfMemoryError("injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVStorage, "grow", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            generator.generate(given, max_new_tokens=NEW_TOKENS)


# What happens between two calls, and whether prefixes outlive it.
EVENTS: dict[str, tuple[Callable[..., None], bool]] = {
    "a call with an unknown option": (refused(max_new_token=2), True),
    "a call that memory is too small for": (refused(max_new_tokens=1 << 20), True),
    "a stream abandoned among its errors": (abandon, True),
    "a set-up that fails": (fail, False),
}


@pytest.mark.parametrize("event", EVENTS)
def test_what_kept_prefixes_outlive(event: str, watched: list[Any]) -> None:
    """Changes of a model are those of test_engine_kept_prefixes.py, and of adapters in test_engine_adapters.py."""
    generator, given = BatchGenerator(build(FAMILY), keep_prefixes=2, kv_memory="4MiB"), questions(document(1))
    assert [answered(generator, given, 2).cached_tokens for _ in range(2)] == [0, 60]
    happens, outlived = EVENTS[event]
    happens(generator, given)
    for cache in watched:
        cache.check_integrity(alive=[])
    for cached in (60 if outlived else 0, 60):
        assert answered(generator, given).cached_tokens == cached


def test_prefixes_of_weights_made_in_inference_mode_which_have_no_versions_are_kept() -> None:
    with torch.inference_mode():
        model = FAMILIES[FAMILY]()
    generator, given = BatchGenerator(model, keep_prefixes=2), questions(document(1))
    assert [generator.generate(given, max_new_tokens=2).report.cached_tokens for _ in range(2)] == [0, 60]


def test_kept_prefixes_give_way_when_memory_is_short(watched: list[Any]) -> None:
    model = build(FAMILY)
    page_bytes = BatchGenerator(model).architecture.kv_bytes_per_token * 4
    generator = BatchGenerator(model, keep_prefixes=8, page_size=4, kv_memory=30 * page_bytes)
    for seed in range(4):
        answered(generator, questions(document(seed, 80), 2))
    short = questions(document(3, 80)[:20], 2)  # stands on a kept prefix that is far longer than what is read of it
    answered(generator, [*short, *questions(document(7, 90), 1)])


def test_each_report_counts_its_own_call() -> None:
    model = build(FAMILY)
    page_bytes = BatchGenerator(model).architecture.kv_bytes_per_token * 4
    generator = BatchGenerator(model, keep_prefixes=2, page_size=4, kv_memory=34 * page_bytes)
    given = questions(document(1), 4)
    first = generator.generate(given, max_new_tokens=40, eos_token_id=1000).report
    second = generator.generate(given, max_new_tokens=2).report
    assert first.preemptions > 0 < first.recomputed_tokens
    assert (second.preemptions, second.recomputed_tokens) == (0, 0)
    assert second.computed_tokens == sum(map(len, given)) - 4 * 60
    assert 0 < second.peak_memory < first.peak_memory


# -- others at the same model ----------------------------------------------------------------------------------


class OwnAttention(nn.Module):
    """What somebody may put in the place of a layer's attention: it asks nobody."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_layer_that_was_replaced_is_noticed() -> None:
    model = FAMILIES[FAMILY]()
    model.model.layers[1].self_attn = OwnAttention(model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedModelError, match="has 3 layers, and attends 2 times"):
        BatchGenerator(model).generate(prompts(), max_new_tokens=2)


def test_what_a_user_changes_between_calls_is_seen() -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    generator.generate([[5, 6]], max_new_tokens=2)
    model.resize_token_embeddings(120)
    assert len(generator.generate([[110, 6]], max_new_tokens=2)) == 1
    model.double()
    prompt = prompts()[3]
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, pad_token_id=0)
    assert generator.generate([prompt] * 3, max_new_tokens=4).token_ids == [expected[0, len(prompt) :].tolist()] * 3


@pytest.mark.parametrize("name", ["model", "config"])
def test_a_generator_keeps_what_it_was_made_with(name: str) -> None:
    generator = BatchGenerator(build(FAMILY))
    with pytest.raises(AttributeError, match=f"keeps the {name} it was made with: make a new one"):
        setattr(generator, name, None)
