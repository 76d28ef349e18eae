"""Compiles every kernel for every generation of cards, without a card, and writes docs/kernels-by-card.md.

    make kernel-page

The figures are those of the Triton that is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import triton
from support_card_compiler import TARGETS, Compiled, card_of, compiled_for, named
from support_kernel_recipes import RECIPES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels-by-card.md"
HEAD = """# What each kernel takes on chip, by card

This page is made by `make kernel-page`, which compiles every kernel for every generation of cards. It needs no card.
The figures are those of Triton {version}. They say that a kernel fits; they say nothing of its answers or its speed.
`kernels/cards.py` has the launches, and [cards.md](cards.md) tells what has run where.

- *shared* is the memory on chip that a block takes, in KB. The most that a block may have is {limits}.
- *registers* and *spilled* are of a thread. Spilled bytes lie in slow memory.
- *blocks* are those that a multiprocessor has room for at once. It is not worked out for AMD's cards.
"""


def lines() -> Iterator[str]:
    limits = [f"{card_of(target).shared_memory >> 10} ({named(target)})" for target in TARGETS]
    yield HEAD.format(version=triton.__version__, limits=", ".join(limits))
    for recipe, launch in RECIPES.items():
        yield f"## {recipe}\n"
        yield "| card | kernel | warps | shared | registers | spilled | blocks |"
        yield "|---|---|---|---|---|---|---|"
        for target in TARGETS:
            with compiled_for(target) as made:
                launch()
            yield from dict.fromkeys(map(line, made))
        yield ""


def line(kernel: Compiled) -> str:
    fields = [named(kernel.target), f"`{kernel.kernel}`", kernel.warps, f"{kernel.shared / 1024:.1f}"]
    fields += [kernel.registers, kernel.spilled, "" if kernel.blocks is None else kernel.blocks]
    return f"| {' | '.join(map(str, fields))} |"


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()).rstrip() + "\n")
