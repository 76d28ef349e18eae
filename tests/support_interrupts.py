"""Calls that are broken off: by Ctrl-C at any line of the library, hit on purpose, or by whoever leaves a stream."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support_families import build
from support_parity import assert_parity
from support_untouched import FAMILY, NEW_TOKENS, fingerprint, prompts

import hf_batchllm
from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.patches.attention_swap import AttentionSwap

GIVEN = prompts(count=7)

OPTIONS = {"max_new_tokens": NEW_TOKENS}


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
    if generator._resources.kv.cache is not None:  # kept prefixes, and nothing else
        generator._resources.kv.cache.check_integrity(alive=[])
    result = generator.generate(GIVEN, **OPTIONS)
    assert tokens(result) == expected


def tokens(outcome: Any) -> dict[int, list[int]]:
    rows = outcome.result if isinstance(outcome, GenerationInterrupted) else outcome
    return {row.index: row.token_ids for row in rows}


class Stop:
    """A SIGINT at the ``at``-th line that is run in certain files: any place in the code, hit on purpose."""

    HERE = os.path.dirname(os.path.dirname(hf_batchllm.__file__))
    # Nothing has begun in these yet, or all is over: an interrupt there comes out as a plain KeyboardInterrupt.
    OUTSIDE = tuple(
        each.__code__
        for each in (BatchGenerator.generate, BatchGenerator.stream, BatchGenerator.score, BatchGenerator._collected)
    )

    def __init__(self, at: int, files: tuple[str, ...]) -> None:
        self.at, self.files, self.count, self.place = at, files, 0, ""
        unknown = [name for name in files if name != "contextlib.py" and not self._named(name)]
        assert not unknown, f"no module of the library is called {unknown}"

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._is_meant(frame.f_code) or _called_by(frame) == "__del__":  # where Python drops any error
            return self._pass
        if event in ("call", "line") and frame.f_code not in self.OUTSIDE and not _in_a_handler_of_contextlib(frame):
            self.count += 1
            if self.count == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self

    def _pass(self, frame: FrameType, event: str, arg: Any) -> None:
        return None

    def _is_meant(self, code: CodeType) -> bool:
        if os.path.basename(code.co_filename) == "contextlib.py":
            return not self.files or "contextlib.py" in self.files
        return code.co_filename in (self._named("") if not self.files else self._chosen)

    @cached_property
    def _chosen(self) -> set[str]:
        return set().union(*map(self._named, self.files))

    @classmethod
    @cache
    def _named(cls, ending: str) -> set[str]:
        """The library's modules whose path ends like this: "call.py" is "engine/call.py"."""
        parts = [os.path.join(cls.HERE, part) for part in ("hf_batchllm", "kernels", "patches")]
        every = {str(path) for part in parts for path in Path(part).rglob("*.py")}
        return {path for path in every if not ending or path.endswith(f"/{ending}")}

    def during(self, call: Callable[[], Any]) -> Any:
        before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self)
        try:
            return call()
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGINT, handler)


def _in_a_handler_of_contextlib(frame: FrameType) -> bool:
    """Raised there by a trace, an interrupt leaves an exception behind, from which all later ones seem to stem."""
    return sys.exc_info()[0] is StopIteration and os.path.basename(frame.f_code.co_filename) == "contextlib.py"


def _called_by(frame: FrameType) -> str:
    return "" if frame.f_back is None else frame.f_back.f_code.co_name


# Where a call is set up and put away: few of the lines that are run, and those that matter.
CRITICAL = (
    "contextlib.py",
    "hf_batchllm/generator.py",
    "engine/calls.py",
    "engine/generate_calls.py",
    "engine/call.py",
    "engine/call_memory.py",
    "engine/resources.py",
    "hf_batchllm/interrupts.py",
    "engine/stream.py",
    "model/control.py",
    "engine/wiring.py",
    "model/model_in_use.py",
    "model/runner.py",
    "patches/attention_swap.py",
    "patches/attention_interface.py",
    "engine/kv_memory.py",
)


def interrupted_or_whole(generator: BatchGenerator) -> Any:
    try:
        return generator.generate(GIVEN, **OPTIONS)
    except GenerationInterrupted as interrupt:
        return interrupt
