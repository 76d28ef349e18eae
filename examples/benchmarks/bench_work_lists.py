"""How long the host takes to make a step's work lists, from units and their readers to one block of memory.

    python examples/benchmarks/bench_work_lists.py
    python examples/benchmarks/bench_work_lists.py --rows 4000 --segments 300

Prefixes have 500 to 4,000 tokens, and a third of them lie inside another one; each row owns 100 to 500 tokens. Medians
of 200 runs. No GPU is needed: lists are made before anything is sent to one.
"""

from __future__ import annotations

import argparse
import time

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
import numpy as np

from hf_batchllm.kernels.ranges import Readers, Units, make_ranges
from hf_batchllm.kernels.work_lists import build_work

PAGE = 64


def tree(rows: int, segments: int) -> tuple[Units, Readers]:
    rng = np.random.default_rng(0)
    shared, own = rng.integers(500, 4000, segments), rng.integers(100, 500, rows)
    outer = segments * 2 // 3
    base = np.concatenate([np.full(outer, -1), rng.integers(0, max(outer, 1), segments - outer)])
    start = np.where(base >= 0, shared[base], 0)
    # Neighbours in the tree are neighbours in the batch.
    order = np.argsort(np.where(base >= 0, base, np.arange(segments)), kind="stable")
    below = order[np.sort(rng.integers(0, segments, rows))] if segments else np.full(rows, -1)
    ends = start + shared
    row_start = ends[below] if segments else np.zeros(rows, dtype=np.int64)
    pages = -(-np.concatenate([shared, own]) // PAGE)
    page_begin = np.concatenate([[0], np.cumsum(pages)])
    units = Units(
        np.concatenate([base, below]),
        np.concatenate([start, row_start]),
        page_begin,
        rng.permutation(int(page_begin[-1])),
    )
    row = np.arange(rows)
    return units, Readers(segments + row, row, np.ones(rows, dtype=np.int64), row_start + own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--segments", type=int, default=150)
    parser.add_argument("--window", type=int, help="the lists of layers with a sliding window")
    options = parser.parse_args()
    cases = [(options.rows, options.segments)] if options.rows else [(256, 16), (1000, 0), (2000, 150), (4000, 300)]
    print(f"{'rows':>6} {'segments':>9} {'pages':>7} {'items':>6} {'ranges, ms':>11} {'lists, ms':>10} {'both':>7}")
    for rows, segments in cases:
        units, readers = tree(rows, segments)
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            ranges = make_ranges(units, readers, page_size=PAGE, window=options.window)
            between = time.perf_counter()
            work = build_work(
                ranges,
                readers.end,
                kv_heads=8,
                group=4,
                page_size=PAGE,
                multiprocessors=132,
                window=options.window,
            )
            times.append((between - begin, time.perf_counter() - between))
        first, second = np.median(times, axis=0) * 1e3
        items = sum(len(items) for items in work.items.values())
        print(
            f"{rows:6} {segments:9} {len(ranges.page):7} {items:6} {first:11.3f} {second:10.3f} {first + second:7.3f}"
        )


if __name__ == "__main__":
    main()
