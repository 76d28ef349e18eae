"""One call at a time: others are told so, and a stream that is left in whatever way leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from functools import partial
from typing import Any

import pytest
from support_families import build
from support_interrupts import GIVEN, OPTIONS, assert_as_before, make, tokens
from support_interrupts import expected as expected  # a fixture
from support_parity import watched as watched  # a fixture
from support_untouched import FAMILY, fingerprint

from hf_batchllm import GeneratorBusyError

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
        assert fingerprint(build(FAMILY)) == before  # between two steps the model is its user's, too
        with pytest.raises(GeneratorBusyError, match="running"):
            generator.generate(GIVEN, max_new_tokens=1)
    leave(stream, how)
    del stream
    gc.collect()
    assert generator._resources.kv.cache is None
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
