"""The tables of docs/generate.md, made of the table of options, between words that are written there.

``python -m hf_batchllm.inputs.option_docs docs/generate.md`` makes them anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from .option_row import Fate, OptionKind, OptionRow, PromptForm
from .option_table import TABLE

_HEAD = "| option | how | |\n|---|---|---|\n"
_HOW = {Fate.NO_EFFECT: "no effect", Fate.REFUSED: "refused"}


def renewed(page: str) -> str:
    """The page, with the table of each of its chapters made anew."""
    for chapter in dict.fromkeys(row.chapter for row in TABLE.values()):
        found = re.search(rf"^## {chapter}$.*?^{re.escape(_HEAD)}((?:\|[^\n]*\n)*)", page, re.MULTILINE | re.DOTALL)
        assert found is not None, f"the page lacks the chapter {chapter!r}, or its table"
        page = page[: found.start(1)] + _lines(chapter) + page[found.end(1) :]
    return page


def _lines(chapter: str) -> str:
    rows = [row for row in TABLE.values() if row.chapter == chapter]
    alike = groupby(rows, key=lambda row: (_how(row), _text(row)))
    return "".join(f"| {_names(each)} | {how} | {text} |\n" for (how, text), each in alike)


def _names(rows: Iterable[OptionRow]) -> str:
    return ", ".join(f"`{row.name}`{' *added*' if row.kind is OptionKind.ADDED else ''}" for row in rows)


def _how(row: OptionRow) -> str:
    return _HOW.get(row.fate) or (row.where.value if row.where else "")


def _text(row: OptionRow) -> str:
    text = row.doc
    if row.fate is Fate.REFUSED:  # written to follow the option's name in an error
        text = text.removeprefix("is ")
        text = f"{text[0].upper()}{text[1:]}."
    only = f"With {row.goes_with.value} only." if row.goes_with is not PromptForm.ANY and row.instead else ""
    each = f"Or {row.each}." if row.each else ""
    return " ".join(filter(None, (only, text, each))).replace("|", "\\|")


if __name__ == "__main__":
    written = Path(sys.argv[1])
    written.write_text(renewed(written.read_text("utf-8")), "utf-8")
