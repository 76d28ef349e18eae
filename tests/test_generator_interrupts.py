"""Ctrl-C acts in the next layer or when a step ends: what had finished comes along, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_cases import up_to
from support_families import build
from support_interrupts import (
    CRITICAL,
    GIVEN,
    OPTIONS,
    Stop,
    assert_as_before,
    interrupted_or_whole,
    make,
    the_swap,
    tokens,
)
from support_interrupts import expected as expected  # a fixture
from support_parity import watched as watched  # a fixture
from support_untouched import FAMILY, fingerprint
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.model.inspection import code_in_use
from hf_batchllm.patches import attention_swap
from hf_batchllm.patches.attention_swap import AttentionSwap

# -- at any line -----------------------------------------------------------------------------------------------


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
        done: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            stop.during(lambda done=done: done.extend(generator.stream(GIVEN, **OPTIONS)))
        assert tokens(done).items() <= expected.items()
        assert_as_before(generator, before, expected)


# -- by a signal -----------------------------------------------------------------------------------------------


def press(times: int = 1) -> None:
    """Ctrl-C, from within the process: its handler has run when this returns."""
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


class Layers:
    """Counts the layers that run, and presses Ctrl-C in some of them."""

    def __init__(self, presses: dict[int, int]) -> None:
        self.presses, self.ran, self.after = presses, 0, 0

    def __call__(self, *_: Any) -> None:
        self.ran += 1
        self.after += any(self.ran > at for at in self.presses)
        press(self.presses.get(self.ran, 0))
        self.after += self.presses.get(self.ran, 0) > 1  # a second one would have been raised


@contextlib.contextmanager
def hooked(hook: Callable[..., None]) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(hook) for layer in build(FAMILY).model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def interrupted(generator: BatchGenerator, streamed: bool, done: list[Any], **options: Any) -> BaseException:
    call = generator.stream if streamed else generator.generate
    with pytest.raises(KeyboardInterrupt) as caught:
        done.extend(call(GIVEN, **OPTIONS, **options))
    if not streamed:
        assert isinstance(caught.value, GenerationInterrupted)
        assert generator.interrupted is caught.value.result
        done.extend(caught.value.result)
    assert caught.value.__context__ is caught.value.__cause__ is None
    return caught.value


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("at", "streamed", "keep"), [(1, False, 0), (2, True, 2), (26, False, 2), (39, True, 0)])
def test_in_a_layer_it_acts_in_the_next_one(
    at: int, streamed: bool, keep: int, expected: dict[int, list[int]], watched: list[Any]
) -> None:
    before, generator = fingerprint(build(FAMILY)), make(keep)
    layers, done = Layers({at: 1}), []
    with hooked(layers):
        interrupted(generator, streamed, done)
    assert layers.after <= 1, "layers went on"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(done).items() <= expected.items() and bool(done) == (at > 30)
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
def test_a_second_one_acts_at_once(expected: dict[int, list[int]]) -> None:
    before, generator, layers = fingerprint(build(FAMILY)), make(), Layers({7: 2})
    with hooked(layers):
        interrupted(generator, False, [])
    assert layers.ran == 7 and not layers.after
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("streamed", [False, True])
def test_between_two_steps_it_acts_before_the_next_one(streamed: bool, expected: dict[int, list[int]]) -> None:
    before, generator, layers = fingerprint(build(FAMILY)), make(), Layers({})
    made: list[int] = []

    def told(*_: Any) -> None:  # as the last layer's result leaves the model
        made.append(layers.ran)
        if len(made) == 12:
            press()

    handle = build(FAMILY).register_forward_hook(told)
    done: list[Any] = []
    with hooked(layers):
        interrupted(generator, streamed, done)
    handle.remove()
    assert layers.ran == made[-1] and len(made) == 12
    assert tokens(done).items() <= expected.items()
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("place", ["processor", "criterion", "streamer", "allowed tokens", "beams"])
def test_code_of_the_users_is_interrupted_as_ever(place: str, expected: dict[int, list[int]]) -> None:
    before, generator, calls = fingerprint(build(FAMILY)), make(), iter(range(99))

    def pressed() -> None:
        if next(calls) == 5:
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            press()
            raise AssertionError("it has not been interrupted")

    class Streamer:
        def put(self, _: Any) -> None:
            pressed()

        def end(self) -> None:
            pass

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        pressed()
        return scores

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        pressed()
        return torch.zeros(len(ids), dtype=torch.bool)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        pressed()
        return list(range(90))

    options: dict[str, dict[str, Any]] = {
        "processor": {"logits_processor": [processor]},
        "criterion": {"stopping_criteria": [criterion]},
        "streamer": {"streamer": Streamer()},
        "allowed tokens": {"prefix_allowed_tokens_fn": allowed},
        "beams": {"logits_processor": [processor], "num_beams": 2, "do_sample": False},
    }
    with pytest.raises(GenerationInterrupted):
        generator.generate(GIVEN[:1] if place == "streamer" else GIVEN, **OPTIONS, **options[place])
    assert next(calls) == 6
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
def test_who_reads_a_stream_is_interrupted_as_ever(expected: dict[int, list[int]]) -> None:
    before, generator = fingerprint(build(FAMILY)), make()
    stream, done = generator.stream(GIVEN, **OPTIONS), []
    for count, row in enumerate(stream):
        done.append(row)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if count < 3:
            with pytest.raises(KeyboardInterrupt):
                press()
    assert tokens(done) == expected  # the stream itself goes on
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
def test_a_handler_of_the_users_may_return(expected: dict[int, list[int]]) -> None:
    before, generator, came = fingerprint(build(FAMILY)), make(), []

    def handler(number: int, _: Any) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, handler)
    with hooked(Layers({5: 1, 9: 2})):
        assert tokens(generator.generate(GIVEN, **OPTIONS)) == expected
    assert len(came) >= 2 and signal.getsignal(signal.SIGINT) is handler
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_no_handler_is_python_code_none_is_installed(handler: Any, expected: dict[int, list[int]]) -> None:
    signal.signal(signal.SIGINT, handler)
    seen = []
    with hooked(lambda *_: seen.append(signal.getsignal(signal.SIGINT))):
        assert tokens(make().generate(GIVEN, **OPTIONS)) == expected
    assert set(seen) == {handler}


@pytest.mark.usefixtures("interruptible")
def test_a_call_in_another_thread_is_not_interrupted(expected: dict[int, list[int]]) -> None:
    generator, running, over, found = make(), threading.Event(), threading.Event(), []

    def pause(*_: Any) -> None:
        running.set()
        over.wait(60)

    with hooked(pause):
        worker = threading.Thread(target=lambda: found.append(tokens(generator.generate(GIVEN, **OPTIONS))))
        worker.start()
        running.wait(60)
        with pytest.raises(KeyboardInterrupt):
            press()  # the main thread's own
        over.set()
        worker.join()
    assert found == [expected]


@pytest.mark.usefixtures("interruptible")
def test_what_is_put_back_is_not_interrupted(monkeypatch: pytest.MonkeyPatch, expected: dict[int, list[int]]) -> None:
    before, generator = fingerprint(build(FAMILY)), make()
    restore = AttentionSwap.restore

    def pressed(self: AttentionSwap) -> None:
        press(3)
        restore(self)
        press(3)

    with hooked(Layers({9: 2})), monkeypatch.context() as patch:
        patch.setattr(AttentionSwap, "restore", pressed)
        interrupted(generator, False, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_as_before(generator, before, expected)


@pytest.mark.usefixtures("interruptible")
def test_one_that_comes_too_late_to_act_gives_all_results(expected: dict[int, list[int]]) -> None:
    before, generator = fingerprint(build(FAMILY)), make()
    steps = []
    handle = build(FAMILY).register_forward_hook(lambda *_: steps.append(1))
    generator.generate(GIVEN, **OPTIONS)
    last, steps[:] = len(steps), []
    other = build(FAMILY).register_forward_hook(lambda *_: press(len(steps) == last))
    done: list[Any] = []
    interrupted(generator, False, done)
    handle.remove()
    other.remove()
    assert tokens(done) == expected
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
            outcome = generator.generate(GIVEN, **OPTIONS)
            timer.join()  # the signal comes here if the call was faster than the last time
            time.sleep(0)
        except GenerationInterrupted as interrupt:
            outcome = interrupt
        except KeyboardInterrupt:  # after the call, or just before it
            pass
        finally:
            timer.join()
        assert tokens(outcome).items() <= expected.items()
        assert_as_before(generator, before, expected)


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


def test_before_it_began_what_an_earlier_call_left_stays() -> None:
    generator = BatchGenerator(build("llama"), Faint(4))
    with pytest.raises(GenerationInterrupted) as caught:
        generator.generate(["w5", "w6", "w7 w8"], max_new_tokens=2)
    tokenizer = generator.tokenizer
    tokenizer.left = 1
    with pytest.raises(GenerationInterrupted, match="before the first sequence began"):
        generator.generate(["w5"], max_new_tokens=2)
    assert generator.interrupted is caught.value.result and len(caught.value.result) == 2


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


@pytest.mark.usefixtures("interruptible")
def test_inside_no_grad_and_inference_mode_the_mode_stays() -> None:
    generator = make()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            enabled = torch.is_grad_enabled()
            for presses in ({9: 1}, {9: 2}, {}):
                with contextlib.suppress(KeyboardInterrupt), hooked(Layers(presses)):
                    generator.generate(GIVEN, **OPTIONS)
                assert torch.is_grad_enabled() == enabled
