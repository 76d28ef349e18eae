"""One decode step, captured once, serves every mix of prefixes: what to do is read from lists that are filled again.

Ten mixes go through the same buffers one after the other, and each grows while its lists stay. On a GPU that is one
CUDA graph; without one, the references over the same lists, and a few mixes under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import ModuleType

import numpy as np
import pytest
import torch
from support_attention_cases import NAN, Tensors, Variant, assert_near
from support_decode_cases import DecodeCase, decode_case
from support_kernels import DEVICE, kernel, plain

from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.reference import decode_torch
from hf_batchllm.kernels.triton import decode_triton as ct


def mixes(variant: Variant, rows: int, most: int) -> list[DecodeCase]:
    """The first random cases that are what is asked for."""

    def first(fits: Callable[[DecodeCase], bool], *prefixes: float, up_to: int = rows) -> DecodeCase:
        cases = (decode_case(seed, variant, rows=up_to, most=most, prefixes=prefixes) for seed in count())
        return next(case for case in cases if fits(case))

    def sizes(case: DecodeCase) -> np.ndarray:
        return case.ranges.row_end - case.ranges.row_begin

    def many(case: DecodeCase) -> bool:
        return int((case.lengths > 0).sum()) > rows // 2

    made = [
        first(lambda case: many(case) and (sizes(case) == 1).all()),  # nothing is shared
        first(lambda case: many(case) and max(sizes(case)) == (case.lengths > 0).sum(), 1.0),  # one group of all
        first(lambda case: len(case.lengths) == 1, up_to=1),  # one row alone
        first(lambda case: many(case) and case.lengths[-2:].sum() == 0, 1.0, 0.5),  # padding rows
        first(lambda case: max(sizes(case)) > 1 and set(case.work().items) == {16}, 0.5),  # shared, by few rows
        first(many, 1.0, 1.0, 1.0),  # three levels
        *(decode_case(100 + seed, variant, rows=rows, most=most * (1 + seed) // 4) for seed in range(4)),
    ]
    assert set(made[0].work().items) == set(made[4].work().items) == {16}
    return made


class Step:
    """A decode step over buffers that stay where they are."""

    def __init__(
        self, kernels: ModuleType, variant: Variant, rows: int, pages: int, device: str, each: int = 20
    ) -> None:
        """``each``: how many items of work there is room for, by row. The interpreter takes time for each."""
        self.kernels, self.variant = kernels, variant
        items, parts = {16: 2 * each * rows, 64: each * rows}, 3 * each * rows
        self.work = wl.WorkLists.room(
            rows=rows, items=items, entries=50 * rows, parts=parts, device=device, direct=not variant.sinks
        )
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        shapes = [(rows, variant.heads, variant.qk_dim)]
        shapes += [(pages, variant.page, variant.kv_heads, dim) for dim in (variant.qk_dim, variant.v_dim)]
        buffers = [torch.full(shape, NAN, dtype=variant.dtype, device=device) for shape in shapes]
        sinks = torch.linspace(-1, 2, variant.heads, device=device) if variant.sinks else None
        self.tensors = Tensors(*buffers, sinks)
        self.out = torch.full((rows, variant.heads, variant.v_dim), NAN, dtype=variant.dtype, device=device)
        wide = {"dtype": torch.promote_types(variant.dtype, torch.float32), "device": device}
        self.part_out = torch.full((self.work.parts, variant.heads, variant.v_dim), NAN, **wide)
        self.part_lse = torch.full((self.work.parts, variant.heads), NAN, **wide)

    def attend(self, tile: int) -> None:
        self.kernels.attend_items(
            tile, self.tensors.q, self.tensors.k, self.tensors.v, self.out, self.part_out, self.part_lse,
            self.work, self.lengths, self.variant.scale, window=self.variant.window, softcap=self.variant.softcap,
        )  # fmt: skip

    def merge(self) -> None:
        self.kernels.merge_parts(self.out, self.part_out, self.part_lse, self.work, sinks=self.tensors.sinks)

    def __call__(self) -> None:
        self.attend(64)
        self.attend(16)
        self.merge()

    def capture(self) -> torch.cuda.CUDAGraph:
        """The two launches side by side, as they write to different places."""
        self()  # compiles
        torch.cuda.synchronize()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            assert main != side
            side.wait_stream(main)
            self.attend(64)
            with torch.cuda.stream(side):
                self.attend(16)
            main.wait_stream(side)
            self.merge()
        return graph

    def check(self, case: DecodeCase, run: Callable[[], None]) -> None:
        """Fill the buffers, ``run``, and see what came of it; three times with the same lists."""
        tensors = case.tensors(str(self.out.device))
        exact, rows = tensors.to(torch.float64), len(case.lengths)
        self.work.fill(case.work())
        for mine, its in ((self.tensors.q, tensors.q), (self.tensors.k, tensors.k), (self.tensors.v, tensors.v)):
            mine.fill_(NAN)
            mine[: len(its)] = its
        for lengths, going in case.stages():
            self.lengths.zero_()
            self.lengths[:rows] = torch.from_numpy(lengths)
            for each in (self.out, self.part_out, self.part_lse):
                each.fill_(NAN)
            run()
            going_on = torch.from_numpy(going).to(self.out.device)
            want = case.reference(exact, lengths)[going_on]
            assert_near(self.out[:rows][going_on], want, self.variant.dtype, f"{self.variant}")
            assert self.out.isfinite().all()
            assert (self.out[rows:] == 0).all(), "rows that this mix does not have"


PLAIN = [
    Variant(4, 2, 16, 16, 16, torch.float32),
    Variant(6, 2, 24, 8, 16, torch.float64, window=30, softcap=3.0),
    Variant(16, 2, 8, 8, 16, torch.float32, window=20, sinks=True),
]


@plain
@pytest.mark.parametrize("variant", PLAIN, ids=str)
def test_references(variant: Variant) -> None:
    step = Step(decode_torch, variant, rows=20, pages=400, device="cpu")
    for case in mixes(variant, rows=17, most=60):
        step.check(case, step)


@kernel
@pytest.mark.skipif(DEVICE != "cpu", reason="test_one_graph_for_all_mixes does more")
def test_kernels() -> None:
    variant = PLAIN[0]
    step = Step(ct, variant, rows=8, pages=200, device=DEVICE, each=4)
    cases = mixes(variant, rows=4, most=20)
    for case in cases[1:2]:
        step.check(case, step)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "variant",
    [
        Variant(32, 8, 128, 128),
        Variant(8, 4, 256, 256, window=150, softcap=50.0),
        Variant(64, 8, 64, 64, dtype=torch.float16, window=128, sinks=True),
    ],
    ids=str,
)
def test_one_graph_for_all_mixes(variant: Variant) -> None:
    step = Step(ct, variant, rows=50, pages=500, device=DEVICE)
    graph = step.capture()
    cases = mixes(variant, rows=45, most=600)
    for case in (*cases, *reversed(cases)):
        step.check(case, graph.replay)
