"""Bars over what comes before the first step: texts become tokens, stop strings are prepared, the plan is made.

They go away again when it is done. ``bars_wanted`` says for a block of code whether there are any: what makes tokens of
texts is called from many places, most of which know nothing of bars. It also says where the time of ``loading`` goes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

from tqdm.std import tqdm as Bar

with warnings.catch_warnings():
    # Its first import advises to install ipywidgets. Without them bars are text, which does as well.
    warnings.filterwarnings("ignore", "IProgress not found")
    from tqdm.auto import tqdm

_LONG_WORK = {  # from how many on there is a bar, and what it says
    "texts": (2048, "making tokens of prompts {n:,} / {total:,}"),
    "images": (32, "reading images of chats {n:,} / {total:,}"),  # an image takes a tenth of a second
    "plan": (10_000, "planning what {total:,} prompts share ..."),
    "stop strings": (100_000, "preparing stop strings ..."),  # each token of a vocabulary is decoded
    "grammars": (100_000, "preparing the tokenizer for grammars ..."),
}
_PATIENCE = 0.5  # seconds before a bar appears
_SECONDS_BETWEEN_LINES = 30.0  # of a log
_SHARE_BETWEEN_LINES = 0.05  # of the time that has passed: a run of a day prints no more than some hundred lines

_During = Callable[[str], AbstractContextManager[object]]  # a phase's name -> a block whose time counts for it

_wanted: ContextVar[bool | None] = ContextVar("_wanted", default=None)
_during: ContextVar[_During] = ContextVar("_during", default=nullcontext)


@contextmanager
def bars_wanted(wanted: bool | None, during: _During = nullcontext) -> Iterator[None]:
    """``wanted``: as ``progress`` of ``generate``. ``during``: the call's timekeeper, for the report."""
    tokens = _wanted.set(wanted), _during.set(during)
    try:
        yield
    finally:
        _wanted.reset(tokens[0])
        _during.reset(tokens[1])


def loading() -> AbstractContextManager[object]:
    """Around what is done once and kept for later calls."""
    return _during.get()("loading")


def open_bar(shown: bool, **options: Any) -> tqdm:
    """A bar of tqdm's, where a notebook shows it in the colours of text; in a log file, lines instead."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and "IPKernelApp" in shell.config:  # this process is a notebook's kernel
        return tqdm(disable=not shown, file=sys.stdout, **options)
    return (tqdm if _on_terminal() else LogBar)(disable=not shown, **options)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def bars_shown(wanted: bool | None, many: bool) -> bool:
    """None shows a bar where there are many, if transformers' bars are on."""
    if wanted is not None:
        return wanted
    # Not imported for this: a plan needs no transformers, and where it is not loaded nobody has switched its bars off.
    logging = sys.modules.get("transformers.utils.logging")
    return many and (logging is None or logging.is_progress_bar_enabled())


@contextmanager
def _bar_over(work: str, count: int) -> Iterator[Callable[[int], object]]:
    """While one of ``_LONG_WORK`` is done. The function that comes is told of each few, where they are counted."""
    many, text = _LONG_WORK[work]
    options: dict[str, Any] = {"bar_format": text}
    if "{n" in text:
        form = f"{{percentage:3.0f}}%|{{bar}}| {text} [{{elapsed}}<{{remaining}}]"
        options = {"bar_format": form, "delay": _PATIENCE}
    with open_bar(count >= many and bars_shown(_wanted.get(), True), total=count, leave=False, **options) as bar:
        yield bar.update


tokenizing_bar = partial(_bar_over, "texts")
images_bar = partial(_bar_over, "images")
planning_bar = partial(_bar_over, "plan")
vocabulary_bar = partial(_bar_over, "stop strings")
grammar_bar = partial(_bar_over, "grammars")


class LogBar(Bar):
    """A bar where nothing can be drawn over, in a pipe or a log file: it prints whole lines, few of them.

    The first line comes at once, the last one when the bar is closed, with what it had come to.
    """

    disable: bool
    monitor_interval = 0  # no thread: nothing waits for a line
    _due = 0.0
    _printed = ""

    def __init__(self, *, bar_format: str, **options: Any) -> None:
        super().__init__(bar_format=bar_format.replace("|{bar}|", ""), mininterval=1.0, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        now = self._time()
        if now < self._due:
            return False
        self._print_line()
        passed = now - getattr(self, "start_t", now)  # tqdm sets it after the first line
        self._due = now + max(_SECONDS_BETWEEN_LINES, _SHARE_BETWEEN_LINES * passed)
        return True

    def close(self) -> None:
        if self.disable:
            return
        if self.leave:
            self._print_line()
        self.disable = True
        self._decr_instances(self)

    def _print_line(self) -> None:
        line = str(self).rstrip()
        if line != self._printed:
            self._printed = line
            self.fp.write(f"{line}\n")
            self.fp.flush()
