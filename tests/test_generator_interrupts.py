"""Ctrl-C at any moment: what had finished comes along, and nothing else of the call stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import support_interrupts
import torch
from support_cases import up_to
from support_families import build
from support_interrupts import CRITICAL, GIVEN, OPTIONS, Stop, interrupted_or_whole
from support_parity import assert_parity
from support_parity import watched as watched  # a fixture
from support_untouched import FAMILY, NEW_TOKENS, fingerprint
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, Generation, GenerationInterrupted, GeneratorBusyError
from hf_batchllm.engine.call import Call
from hf_batchllm.model import code_in_use
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.patches import attention_swap
from hf_batchllm.patches.attention_swap import AttentionSwap


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """What each prompt of ``GIVEN`` becomes."""
    result = BatchGenerator(build(FAMILY)).generate(GIVEN, **OPTIONS)
    assert_parity(FAMILY, GIVEN, result, NEW_TOKENS)
    return tokens(result)


@cache
def the_swap() -> AttentionSwap:
    """Of the model. Its lock lives as long as a swap does: this one is that of every call."""
    return AttentionSwap(build(FAMILY))


def make(keep: int = 0) -> BatchGenerator:
    the_swap()
    # A small budget spreads the prompts over many steps, so that some have finished when others begin.
    return BatchGenerator(build(FAMILY), max_batch_tokens=24, page_size=8, min_shared_tokens=4, keep_prefixes=keep)


def assert_as_before(generator: BatchGenerator, before: Any, expected: dict[int, list[int]]) -> None:
    assert fingerprint(build(FAMILY)) == before
    with contextlib.suppress(RuntimeError):
        the_swap()._lock.release()
        raise AssertionError("the model's lock is still held")
    if generator._kv.cache is not None:  # kept prefixes, and nothing else
        generator._kv.cache.check_integrity(alive=[])
    result = generator.generate(GIVEN, **OPTIONS)
    assert tokens(result) == expected


def some_lines(run: Callable[[], Any], files: tuple[str, ...], seed: int, count: int = 12) -> Iterator[Stop]:
    """Interrupts, each at one of the lines that ``run`` runs."""
    every = Stop(0, files)
    every.during(run)
    return (Stop(at, files) for at in random.Random(seed).sample(range(1, every.count), up_to(count)))


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("files", [(), CRITICAL], ids=["anywhere", "critical"])
def test_at_any_line(files: tuple[str, ...], keep: int, expected: dict[int, list[int]]) -> None:
    before, generator = fingerprint(build(FAMILY)), make(keep)
    for stop in some_lines(lambda: generator.generate(GIVEN, **OPTIONS), files, len(files) + keep):
        outcome = stop.during(lambda: interrupted_or_whole(generator))
        assert isinstance(outcome, GenerationInterrupted) == bool(stop.place)  # fewer lines are run on kept prefixes
        assert tokens(outcome).items() <= expected.items(), stop.place
        assert_as_before(generator, before, expected)


def test_at_any_line_of_a_stream(expected: dict[int, list[int]]) -> None:
    before, generator = fingerprint(build(FAMILY)), make()
    for stop in some_lines(lambda: list(generator.stream(GIVEN, **OPTIONS)), CRITICAL, 3):
        done: list[Generation] = []
        with pytest.raises(KeyboardInterrupt):
            stop.during(lambda done=done: done.extend(generator.stream(GIVEN, **OPTIONS)))
        assert tokens(done).items() <= expected.items()
        assert_as_before(generator, before, expected)


def test_at_any_line_of_making_one() -> None:
    """The architecture is looked at, and for some models by a pass over two tokens."""
    files = ("architecture.py", "attention_swap.py", "attention_interface.py", "mask_probe.py")
    before, random_state = fingerprint(build(FAMILY)), torch.get_rng_state()
    make()  # the first look at a class runs more lines: what it finds is kept for the next
    for stop in some_lines(make, files, 6, 15):
        with pytest.raises(KeyboardInterrupt):
            stop.during(make)
        assert fingerprint(build(FAMILY)) == before
        assert torch.equal(torch.get_rng_state(), random_state)


# In which call of what an interrupt comes: once that has run, or before.
MOMENTS: dict[str, tuple[Any, str, int, bool]] = {
    "as gradients are turned off, when nothing else turns them on again": (torch.no_grad, "__enter__", 1, True),
    "as gradients are turned off in a step": (torch.no_grad, "__enter__", 9, True),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_at_a_moment(streamed: bool, moment: str, expected: dict[int, list[int]]) -> None:
    owner, name, at, has_run = MOMENTS[moment]
    before, generator = fingerprint(build(FAMILY)), make()
    call, left = getattr(owner, name), [at]

    def interrupted(self: Any) -> None:
        left[0] -= 1
        if has_run or left[0]:
            call(self)
        if not left[0]:
            left[0] = -1
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt if streamed else GenerationInterrupted):
            list(generator.stream(GIVEN, **OPTIONS) if streamed else generator.generate(GIVEN, **OPTIONS))
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
def test_by_a_signal_at_random_moments(expected: dict[int, list[int]]) -> None:
    """A real SIGINT, over all of a call: it comes out as GenerationInterrupted, unless the call was over."""
    before, generator = fingerprint(build(FAMILY)), make()
    began = time.perf_counter()
    generator.generate(GIVEN, **OPTIONS)
    duration = time.perf_counter() - began
    rng = random.Random(20)
    moments = up_to(12)
    for moment in range(moments):
        delay = duration * (moment + rng.random()) / moments
        outcome: Any = []
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            outcome = interrupted_or_whole(generator)
            timer.join()  # the signal comes here if the call was faster than the last time
            time.sleep(0)
        except KeyboardInterrupt as plain:
            innermost = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(plain.__traceback__)][-1]
            assert innermost in (__file__, support_interrupts.__file__, threading.__file__), (
                "a plain KeyboardInterrupt escaped from generate()"
            )
        finally:
            timer.join()
        assert tokens(outcome).items() <= expected.items()
        assert_as_before(generator, before, expected)


def tokens(outcome: Any) -> dict[int, list[int]]:
    rows = outcome.result if isinstance(outcome, GenerationInterrupted) else outcome
    return {row.index: row.token_ids for row in rows}


# -- moments of their own --------------------------------------------------------------------------------------


class Faint:
    """A tokenizer that is interrupted in the ``at``-th of its calls."""

    def __init__(self, at: int) -> None:
        self.inner, self.left = word_tokenizer(), at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def __call__(self, texts: list[str]) -> Any:
        self._count()
        return self.inner(texts)

    def decode(self, ids: list[int], **options: Any) -> Any:
        self._count()
        return self.inner.decode(ids, **options)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_while_text_is_encoded_or_decoded(at: int) -> None:
    generator = BatchGenerator(build("llama"), Faint(at))
    with pytest.raises(GenerationInterrupted) as caught:
        generator.generate(["w5", "w6", "w7 w8"], max_new_tokens=2)
    assert len(caught.value.result) == max(at - 2, 0)
    says = {1: "before the first sequence began", 2: "none of 3 sequences had finished", 4: "2 of 3 sequences had"}
    assert says[at] in str(caught.value)
    assert (caught.value.result.report is None) == (at == 1)
    assert len(generator.generate(["w5"], max_new_tokens=2)) == 1


def test_while_prompts_are_made() -> None:
    def prompts_of_somebody() -> Iterator[list[int]]:
        yield [5, 6]
        raise KeyboardInterrupt

    generator = make()
    with pytest.raises(GenerationInterrupted, match="before the first sequence began"):
        generator.generate(prompts_of_somebody(), **OPTIONS)
    assert len(generator.generate([[5, 6]], **OPTIONS)) == 1


def test_twice(monkeypatch: pytest.MonkeyPatch, expected: dict[int, list[int]]) -> None:
    """The second while the first is being answered."""
    before, generator = fingerprint(build(FAMILY)), make()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "step", interrupted)
        patch.setattr(Call, "_abandon", interrupted)
        with pytest.raises(GenerationInterrupted):
            generator.generate(GIVEN, **OPTIONS)
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
def test_while_it_waits_for_another_thread(expected: dict[int, list[int]]) -> None:
    """Before the call begins, where it looks at the model; a step would wait just so."""
    before, generator = fingerprint(build(FAMILY)), make()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with the_swap()._lock:
            held.set()
            over.wait(60)

    def interrupt() -> None:
        main = threading.main_thread().ident
        while not over.wait(0.2):  # again and again: what comes while Python runs a collector's callback is swallowed
            frame = sys._current_frames().get(main or 0)
            if frame is not None and frame.f_code.co_filename in (attention_swap.__file__, code_in_use.__file__):
                os.kill(os.getpid(), signal.SIGINT)
                over.wait(5)

    threads = [threading.Thread(target=job) for job in (hold, interrupt)]
    threads[0].start()
    held.wait(60)
    threads[1].start()
    try:
        with pytest.raises(GenerationInterrupted, match="before the first sequence began"):
            generator.generate(GIVEN, **OPTIONS)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert_as_before(generator, before, expected)


# -- two at one generator --------------------------------------------------------------------------------------


def test_a_second_thread_is_told_that_the_first_is_at_work(expected: dict[int, list[int]]) -> None:
    generator = make()
    running, over = threading.Event(), threading.Event()

    def pause(*args: Any) -> None:
        running.set()
        over.wait(60)

    handle = build(FAMILY).get_output_embeddings().register_forward_pre_hook(pause)
    result: list[Any] = []
    first = threading.Thread(target=lambda: result.extend(generator.generate(GIVEN, **OPTIONS)))
    first.start()
    try:
        running.wait(60)
        calls = [partial(call, GIVEN, **OPTIONS) for call in (generator.generate, generator.stream)]
        for call in (*calls, generator.close, generator.forget_prefixes):
            with pytest.raises(GeneratorBusyError, match="a call is running already"):
                call()
        assert len(generator.plan(GIVEN).order) == len(GIVEN)
    finally:
        over.set()
        first.join()
        handle.remove()
    assert tokens(result) == expected


def test_a_call_from_a_hook_is_refused_and_the_outer_one_goes_on(expected: dict[int, list[int]]) -> None:
    before, generator, refused = fingerprint(build(FAMILY)), make(), []

    def nosy(*args: Any) -> None:
        try:
            generator.generate([[5, 6]], max_new_tokens=1)
        except GeneratorBusyError as error:
            refused.append(error)

    handle = build(FAMILY).get_output_embeddings().register_forward_pre_hook(nosy)
    result = generator.generate(GIVEN, **OPTIONS)
    handle.remove()
    assert refused and tokens(result) == expected
    assert_as_before(generator, before, expected)


# -- streams that are left -------------------------------------------------------------------------------------


def leave(stream: Any, how: str) -> None:
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError())
    elif how == "exit":
        with pytest.raises(GeneratorExit):
            stream.throw(GeneratorExit())
    elif how == "break":
        for _ in stream:
            break
    elif how in ("error", "interrupt"):
        with contextlib.suppress(KeyError, KeyboardInterrupt):
            for _ in stream:
                raise KeyError if how == "error" else KeyboardInterrupt


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("how", "results"),
    [("close", 0), ("close", 3), ("throw", 1), ("exit", 3), ("break", 1), ("error", 1), ("interrupt", 0),
     ("interrupt", 1), ("del", 0), ("del", 1)],
)  # fmt: skip
def test_a_stream_that_is_left(how: str, results: int, expected: dict[int, list[int]], watched: list[Any]) -> None:
    before, generator = fingerprint(build(FAMILY)), make()
    stream = generator.stream(GIVEN, **OPTIONS)
    for _ in range(results):
        next(stream)
        assert fingerprint(build(FAMILY)) == before  # between two steps the model is its owner's, too
        with pytest.raises(GeneratorBusyError, match="running"):
            generator.generate(GIVEN, max_new_tokens=1)
    leave(stream, how)
    del stream
    gc.collect()
    assert generator._kv.cache is None
    for each in watched:
        each.check_integrity()
        assert each.free_pages == each.num_pages
    assert_as_before(generator, before, expected)


def test_a_block_left_by_an_error_while_a_stream_is_open_passes_that_error_on() -> None:
    generator = make()
    stream = generator.stream(GIVEN, **OPTIONS)
    with pytest.raises(ZeroDivisionError), generator:
        next(stream).index / 0
    with pytest.raises(GeneratorBusyError, match=r"a stream is still open: .* then close\(\)"), generator:
        pass
    stream.close()
    generator.close()


def test_inside_no_grad_and_inference_mode_the_mode_stays() -> None:
    generator = make()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            enabled = torch.is_grad_enabled()
            for stop in (Stop(60, ("runner.py",)), Stop(900, ()), Stop(0, ())):
                with contextlib.suppress(KeyboardInterrupt):
                    stop.during(lambda: generator.generate(GIVEN, **OPTIONS))
                assert torch.is_grad_enabled() == enabled
