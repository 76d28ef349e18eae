"""The progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers.utils import logging

_LONG = 32  # sequences from which on a bar is shown unasked


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the new tokens of each sequence that has finished."""
    show = total >= _LONG and logging.is_progress_bar_enabled() if wanted is None else wanted
    tokens = 0
    with tqdm(total=total, unit="seq", disable=not show) as bar:

        def advance(new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            elapsed = bar.format_dict["elapsed"] if show else 0
            if elapsed:
                bar.set_postfix_str(f"{tokens / elapsed:,.0f} tokens/s", refresh=False)
            bar.update()

        yield advance
