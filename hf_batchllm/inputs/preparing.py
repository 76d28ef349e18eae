"""Bars over what comes before the first step: texts become tokens, stop strings are prepared, the plan is made.

They go away again when it is done. ``bars_wanted`` says for a block of code whether there are any: what makes tokens of
texts is called from many places, most of which know nothing of bars. It also says where the time of ``loading`` goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from ..results.notebook import in_notebook, tqdm
from .log_bar import LogBar

_MANY_TEXTS = 2048  # fewer are tokens soon
_MANY_CHATS_WITH_IMAGES = 32  # an image takes a tenth of a second
_MANY_PROMPTS = 10_000  # fewer are planned soon
_LARGE_VOCABULARY = 100_000  # tokens; fewer are decoded soon
_PATIENCE = 0.5  # seconds before a bar appears

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
    if in_notebook():
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
def tokenizing_bar(texts: int) -> Iterator[Callable[[int], object]]:
    """Over texts that become tokens. The function that comes is told of each few."""
    shown = texts >= _MANY_TEXTS and bars_shown(_wanted.get(), True)
    form = "{percentage:3.0f}%|{bar}| making tokens of prompts {n:,} / {total:,} [{elapsed}<{remaining}]"
    with open_bar(shown, total=texts, bar_format=form, leave=False, delay=_PATIENCE) as bar:
        yield bar.update


@contextmanager
def images_bar(chats: int) -> Iterator[Callable[[int], object]]:
    """Over chats whose images are loaded and made ready."""
    shown = chats >= _MANY_CHATS_WITH_IMAGES and bars_shown(_wanted.get(), True)
    form = "{percentage:3.0f}%|{bar}| reading images of chats {n:,} / {total:,} [{elapsed}<{remaining}]"
    with open_bar(shown, total=chats, bar_format=form, leave=False, delay=_PATIENCE) as bar:
        yield bar.update


@contextmanager
def planning_bar(prompts: int) -> Iterator[None]:
    """While the plan is made, which takes a few seconds for many prompts."""
    shown = prompts >= _MANY_PROMPTS and bars_shown(_wanted.get(), True)
    with open_bar(shown, total=1, bar_format=f"planning what {prompts:,} prompts share ...", leave=False):
        yield


@contextmanager
def vocabulary_bar(tokens: int) -> Iterator[None]:
    """While each token of a vocabulary is decoded, in which stop strings are to be found."""
    shown = tokens >= _LARGE_VOCABULARY and bars_shown(_wanted.get(), True)
    with open_bar(shown, total=1, bar_format="preparing stop strings ...", leave=False):
        yield


@contextmanager
def grammar_bar(tokens: int) -> Iterator[None]:
    """While a tokenizer is prepared for grammars."""
    shown = tokens >= _LARGE_VOCABULARY and bars_shown(_wanted.get(), True)
    with open_bar(shown, total=1, bar_format="preparing the tokenizer for grammars ...", leave=False):
        yield
