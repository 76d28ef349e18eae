"""Which constants of the decode kernels' work lists suit this GPU: tables, and the values that they suggest.

    python examples/benchmarks/calibrate_attention.py            # some 80 s
    python examples/benchmarks/calibrate_attention.py --quick    # a smaller grid

**Splits** (BLOCKS and MIN_PAGES in kernels/lists/work_lists.py): a batch's time with its ranges cut by the rule, with
items of at most a fixed number of pages, and with other constants in the rule.

**The gate** (GATE and GATE_MERGED in kernels/lists/ranges.py): 256 rows in groups, each of which shares a prefix. The
time with the prefixes as segments / with each prefix joined to its rows' own tokens, and the length from which a
segment pays. Once where no other prefix makes the rows merge, once below a prefix of 2,000 tokens that all rows share,
which is a segment either way. Both again with a sliding window of 1,024, where only the tokens still in sight count.

A gate has the form ``tokens * (rows - 1) / rows >= GATE``. The suggested gate is the one whose worst choice costs
least, against the better way in each cell. Every cell is checked before it is timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import common
import numpy as np
import torch
from attention import EVERY, NEVER, Problem, decode_batch
from bench_decode_attention import measure

from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.lists.ranges import GATE, GATE_MERGED

SPLIT_BATCHES = [
    *("16x16:2000+250", "64x4:2000+250", "1x64:32000+128", "1x256:2000+250", "4x64:2000+250", "2x128:4000+250"),
    *("32x1:0+8000~", "8x1:0+32000", "4x1:0+2000", "256x1:0+1024", "random:40"),
]
MOST_PAGES = [8, 16, 32, 64, 10**6]
SHORT = {"BLOCKS[16]": "B16", "BLOCKS[64]": "B64", "MIN_PAGES": "MIN"}
TILES = {"BLOCKS[16]": 16, "BLOCKS[64]": 64}
VALUES = {"BLOCKS[16]": [2, 3, 4, 5, 6], "BLOCKS[64]": [1, 2, 3, 4], "MIN_PAGES": [2, 4, 8]}
ROWS, WINDOW = 256, 1024
Make = Callable[..., Problem]  # takes how a batch is written, and a window


@dataclass(frozen=True)
class Cell:
    """The time of one size of prefix, as a segment and joined."""

    rows: int  # that share it
    tokens: int
    segment: float  # ms
    joined: float  # ms

    @property
    def weight(self) -> float:
        return self.tokens * (self.rows - 1) / self.rows

    def loss(self, gate: float) -> float:
        """How much slower the gate's choice is than the better way."""
        chosen = self.segment if self.weight >= gate else self.joined
        return chosen / min(self.segment, self.joined) - 1


def best_gate(cells: list[Cell]) -> int:
    """The gate whose worst choice costs least (to 0.1 %); among equals, the one whose choices cost least in total."""
    candidates = range(16, int(max(cell.weight for cell in cells)) + 16, 8)

    def cost(gate: int) -> tuple[float, float]:
        losses = [cell.loss(gate) for cell in cells]
        return round(max(losses), 3), sum(losses)

    return min(candidates, key=cost)


def break_even(cells: list[Cell]) -> float:
    """The number of tokens from which segments pay, interpolated; all cells have the same number of rows."""
    below = None
    for cell in sorted(cells, key=lambda cell: cell.tokens):
        gain = cell.joined - cell.segment
        if gain >= 0:
            if below is None:
                return cell.tokens
            low, loss = below
            return low + (cell.tokens - low) * loss / (loss + gain)
        below = cell.tokens, -gain
    return np.inf


@contextmanager
def constant(name: str, value: int) -> Iterator[None]:
    """The rule with another constant."""
    before = wl.BLOCKS, wl.MIN_PAGES
    try:
        if name in TILES:
            wl.BLOCKS = wl.BLOCKS | {TILES[name]: value}
        else:
            wl.MIN_PAGES = value
        yield
    finally:
        wl.BLOCKS, wl.MIN_PAGES = before


def in_force(name: str) -> int:
    return wl.BLOCKS[TILES[name]] if name in TILES else wl.MIN_PAGES


def splits(make: Make, names: list[str]) -> dict[str, Any]:
    columns = [f"<= {pages}" if pages < 10**6 else "whole" for pages in MOST_PAGES]
    columns += [f"{SHORT[name]}={value}" for name in VALUES for value in VALUES[name]]
    print("\nSplits: ms with the rule, with items of so many pages, with other constants in it (B16: BLOCKS[16])")
    table = common.Table({"batch": ">16", **dict.fromkeys(("rule", *columns), "7.4f")})
    now = {name: in_force(name) for name in VALUES}
    ratios: dict[tuple[str, int], list[float]] = {}
    for text in names:
        inputs = make(text)
        rule = measure(inputs)["ms"]
        limited = [measure(inputs, most_pages=pages)["ms"] for pages in MOST_PAGES]
        others = {}
        for name, values in VALUES.items():
            for value in values:
                with constant(name, value):
                    others[name, value] = rule if value == now[name] else measure(inputs)["ms"]
        best = min(rule, *limited, *others.values())
        for key, ms in others.items():
            ratios.setdefault(key, []).append(ms / best - 1)
        table.add({"batch": text, "rule": rule, **dict(zip(columns, (*limited, *others.values()), strict=True))})
        del inputs
    worst = {key: max(losses) for key, losses in ratios.items()}
    suggested = {}
    for name in VALUES:
        suggested[name] = min(VALUES[name], key=lambda value, name=name: round(worst[name, value], 3))
    return {"rows": table.rows, "worst": worst, "suggested": suggested}


def gate_table(make: Make, title: str, text: Callable[[int, int], str], rows: list[int], tokens: list[int],
               gates: tuple[float, float], window: int | None = None) -> list[Cell]:  # fmt: skip
    """``gates`` join the prefixes; with both at EVERY they are segments."""
    print(f"\n{title}: ms as a segment / joined")
    print(f"{'rows':>5}" + "".join(f" {each:>15}" for each in tokens) + f" {'pays from':>10}")
    cells: list[Cell] = []
    for count in rows:
        line = []
        for size in tokens:
            inputs = make(text(count, size), window)
            both = [measure(inputs, gate=gate, gate_merged=merged)["ms"] for gate, merged in ((EVERY, EVERY), gates)]
            line.append(Cell(count, size, *both))
            del inputs
        pays = break_even(line)
        print(f"{count:5}" + "".join(f" {cell.segment:7.4f}/{cell.joined:7.4f}" for cell in line), end="")
        print(f" {pays:10.0f}", flush=True)
        cells += line
    return cells


def conclude(found: dict[str, Any], tables: dict[str, list[Cell]]) -> dict[str, Any]:
    print("\nSuggested, beside what is in force (in brackets: how much slower than the best tried, at worst)")
    for name, value in found["suggested"].items():
        now = in_force(name)
        print(f"{name:>12}: {value} ({found['worst'][name, value]:.1%}), in force {now}", end="")
        print(f" ({found['worst'][name, now]:.1%})")
    suggested: dict[str, Any] = dict(found["suggested"])
    for name, now, sources in (("GATE", GATE, ("alone", "alone, window")),
                               ("GATE_MERGED", GATE_MERGED, ("merged", "merged, window"))):  # fmt: skip
        gate = best_gate(tables[sources[0]])
        suggested[name] = gate
        for value, word in ((gate, ""), (now, "in force ")):
            each = []
            for source in sources:
                losses = [cell.loss(value) for cell in tables[source]]
                each.append(f"{source}: {max(losses):.1%} at worst, {np.mean(losses):.2%} on average")
            print(f"{name:>12}: {word}{value} ({'; '.join(each)})")
        print(f"{'':>14}with a window alone: {best_gate(tables[sources[1]])}")
    return suggested


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.read(
        __doc__, arguments, {"--quick": {"action": "store_true", "help": "a smaller grid"}}, on="gpu", figures=True,
        heads=(32, "query heads"), kv_heads=(8, "KV heads"), dim=(128, "of a head"),
        own=(250, "tokens of each row's own, where there is no window"),
    )  # fmt: skip
    torch.manual_seed(0)
    begin = time.perf_counter()
    gc.freeze()  # capturing a graph may collect garbage first, and there are some 400 graphs
    common.warm_branches()
    print(f"{common.card()}; {options.heads} / {options.kv_heads} heads of {options.dim}")

    def make(text: str, window: int | None = None) -> Problem:
        return Problem.make(decode_batch(text), options.heads, options.kv_heads, options.dim, caches=2, window=window)

    few, own = options.quick, options.own
    rows = [2, 16] if few else [2, 4, 8, 16, 64]
    tokens = [64, 192, 512] if few else [32, 64, 128, 192, 256, 384, 512]
    seen = [64, 256, 512] if few else [64, 128, 192, 256, 512]
    found = splits(make, SPLIT_BATCHES[:3] if few else SPLIT_BATCHES)
    alone, merged = (NEVER, NEVER), (EVERY, NEVER)
    each: dict[str, tuple[str, Callable[[int, int], str], list[int], tuple[float, float], int | None]] = {
        "alone": ("The gate: nothing but this prefix makes rows merge",
                  lambda count, size: f"{ROWS // count}x{count}:{size}+{own}", tokens, alone, None),
        "merged": ("The gate where rows merge anyway: below 2,000 tokens that all share",
                   lambda count, size: f"2000/{ROWS // count}x{count}:{size}+{own}", tokens, merged, None),
        "alone, window": (f"A window of {WINDOW}, so many of a prefix's 4,000 tokens in sight",
                          lambda count, size: f"{ROWS // count}x{count}:4000+{WINDOW - size}", seen, alone, WINDOW),
        "merged, window": (f"A window of {WINDOW} where rows merge anyway: below 4,000 tokens that all share, 128 of "
                           "their own", lambda count, size: f"4000/{ROWS // count}x{count}:{size}+128",
                           seen, merged, WINDOW),
    }  # fmt: skip
    tables = {
        name: gate_table(make, title, text, rows, sizes, gates, window)
        for name, (title, text, sizes, gates, window) in each.items()
    }
    suggested = conclude(found, tables)
    print(f"{time.perf_counter() - begin:.0f} s")
    written = {
        "splits": found | {"worst": {f"{name}={value}": loss for (name, value), loss in found["worst"].items()}},
        "gates": {name: [asdict(cell) for cell in cells] for name, cells in tables.items()},
        "suggested": suggested,
    }
    common.write_json(options.json, written)


if __name__ == "__main__":
    main()
