"""The attention benches' batches: what they are read as, what they count, and what they hand to kernels and rivals."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from hf_batchllm.kernels.lists.work_lists import Ranges

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "benchmarks"))

import attention_libraries as libraries
import attention_rivals as rivals
import calibrate_attention as calibrate
from attention import (
    EVERY,
    NEVER,
    PAGE,
    Batch,
    Problem,
    decode_batch,
    decode_of,
    floor_ms,
    operations,
    prefill_batch,
    reference,
    unique_bytes,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # no GPU: no need
HEADS, KV_HEADS, DIM = 4, 2, 16
SMALL = ["3x4:200+30", "3x4:200+30~", "6x1:0+90~", "2x1:100+20", "150/2x3:70+9", "random:2@5"]
GATES = [(EVERY, EVERY), (NEVER, NEVER), (EVERY, NEVER), (128, 64)]


def tensors(pages: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(pages, PAGE, KV_HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.randn(rows, HEADS, DIM, generator=generator, dtype=torch.float64), k, v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One row [heads, dim] against its keys [keys, kv_heads, dim]."""
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    weights = (torch.einsum("hd,khd->hk", q, k) * DIM**-0.5).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v)


def attend_slots(batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    out = []
    for slots, rows in zip(batch.slots, batch.readers.rows, strict=True):
        for row in range(rows):
            seen = torch.from_numpy(slots[: len(slots) - rows + 1 + row])
            out.append(attend(q[len(out)], k[seen], v[seen]))
    return torch.stack(out)


def attend_ranges(
    ranges: Ranges, lengths: np.ndarray, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """As the kernels read them: full pages, but for what is behind a single row's length."""
    out = []
    for row, length in enumerate(lengths):
        keys, values = [], []
        for i in np.flatnonzero((ranges.row_begin <= row) & (row < ranges.row_end)):
            for page in range(ranges.page_begin[i], ranges.page_begin[i + 1]):
                many = ranges.tokens[page]
                if ranges.row_end[i] - ranges.row_begin[i] == 1:
                    many = min(many, length - ranges.first[page])
                keys.append(k[ranges.page[page], :many])
                values.append(v[ranges.page[page], :many])
        out.append(attend(q[row], torch.cat(keys), torch.cat(values)))
    return torch.stack(out)


def small_random() -> Batch:
    """A mix that is cheap to attend to."""
    return decode_of("mix", np.array([3, 1, 5]), np.array([130, 64, 17]), np.arange(20, 29))


def own(batch: Batch) -> np.ndarray:
    return batch.tokens[1 + len(batch.degrees) :]


def test_a_batch_is_what_its_notation_says() -> None:
    batch = decode_batch("16x8:2000+250")
    assert batch.total_rows == 128 and set(batch.lengths) == {2250} and batch.unique_tokens == 16 * 2000 + 128 * 250
    assert str(batch) == "16x8:2000+250" and batch.shares
    outer = decode_batch("2000/3x2:100+10")
    assert set(outer.lengths) == {2110} and outer.unique_tokens == 2000 + 300 + 60
    ragged = decode_batch("16x8:2000+250~")
    assert ragged.prefixes.min() >= 400 and ragged.prefixes.max() <= 3600 and len(np.unique(own(ragged))) > 50
    assert not decode_batch("256x1:0+1024").shares


def test_a_random_mix_covers_its_ranges_and_repeats() -> None:
    mix = decode_batch("random:40")
    assert len(mix.degrees) == len(mix.prefixes) == 40 and len(own(mix)) == mix.degrees.sum()
    for drawn, least, most, spread in (
        (mix.degrees, 1, 64, 40),
        (mix.prefixes, 100, 8000, 5000),
        (own(mix), 20, 500, 0),
    ):
        assert drawn.min() >= least and drawn.max() <= most and np.ptp(drawn) > spread
    assert np.array_equal(mix.lengths, decode_batch("random:40").lengths)
    assert not np.array_equal(mix.degrees, decode_batch("random:40@1").degrees)


@pytest.mark.parametrize("text", ["", "16x16", "16x16:2000", "random", "random:", "random:4+1", "/3x2:1+1", "4x2048"])
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="GROUPSxROWS"):
        decode_batch(text)
    with pytest.raises(ArgumentTypeError, match="CHUNKSxROWS"):
        prefill_batch("8x" + text)


PREFILL = {"3x70": {0}, "2x100+3x20": {0, 100}, "1x33@90": {90}, "2x70+1x40@10": {10, 80}}  # first positions


@pytest.mark.parametrize("text", [*SMALL, *PREFILL])
def test_tokens_and_pairs_are_those_that_the_rows_read(text: str) -> None:
    """A row sees its prefixes, and of what it owns as far as itself."""
    batch = prefill_batch(text) if text in PREFILL else decode_batch(text)
    pairs = zip(batch.slots, batch.readers.rows, strict=True)
    seen = [set(slots[: len(slots) - rows + 1 + row]) for slots, rows in pairs for row in range(rows)]
    assert len(seen) == batch.total_rows and batch.pairs == sum(map(len, seen)), "a row meets a slot twice"
    assert batch.unique_tokens == len(set().union(*seen))
    assert max(set().union(*seen)) < batch.pages * PAGE and str(batch) == text
    assert [len(set(slots)) for slots in batch.slots] == batch.lengths.tolist()
    if text in PREFILL:
        assert set(batch.lengths - batch.readers.rows) == PREFILL[text]


def test_the_floor_is_the_larger_of_reading_and_computing() -> None:
    batch = small_random()
    computed = sum(2 * HEADS * DIM * 2 for slots in batch.slots for _ in slots)  # a product and a sum, twice
    assert operations(batch.pairs, HEADS, DIM) == computed
    moved = sum(torch.empty(2, KV_HEADS, DIM, dtype=torch.bfloat16).nbytes for _ in set().union(*map(set, batch.slots)))
    assert unique_bytes(batch.unique_tokens, KV_HEADS, DIM) == moved
    assert floor_ms(4_000, 10, copy=1e6, matmul=1e4) == pytest.approx(4)
    assert floor_ms(4_000, 100, copy=1e6, matmul=1e4) == pytest.approx(10)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("text", [*SMALL[:-1], "mix"])
def test_ranges_give_each_row_all_that_it_sees(text: str, gates: tuple[float, float]) -> None:
    batch = small_random() if text == "mix" else decode_batch(text)
    q, k, v = tensors(batch.pages, batch.total_rows)
    found = attend_ranges(batch.ranges(*gates), batch.lengths, q, k, v)
    torch.testing.assert_close(found, attend_slots(batch, q, k, v))


def test_gates_choose_the_segments() -> None:
    def segments(text: str, *gates: float) -> int:
        ranges = decode_batch(text).ranges(*gates)
        return int((ranges.row_end - ranges.row_begin > 1).sum())

    assert segments("3x4:200+30", EVERY, EVERY) == 3
    assert segments("3x4:200+30", NEVER, NEVER) == 0
    assert segments("150/2x3:70+9", EVERY, EVERY) == 3
    assert segments("150/2x3:70+9", EVERY, NEVER) == 1, "what all rows share stays a segment"
    ones = decode_batch("4x1:300+30").ranges(EVERY, EVERY)
    assert len(ones.row_begin) == 4, "a row alone reads its prefix with what it owns"


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("batch", [small_random(), decode_batch("2x3:100+30~"), prefill_batch("2x50+2x20")])
def test_other_pages_hold_the_same(batch: Batch, size: int) -> None:
    paging = rivals.repage(batch.slots, size)
    for i, slots in enumerate(batch.slots):
        mine = paging.source[paging.page[paging.begin[i] : paging.begin[i + 1]]].ravel()
        assert np.array_equal(mine[: len(mine) - size + paging.last[i]], slots)
    assert sorted(set(paging.page)) == list(range(len(paging.source)))
    paging = rivals.repage(decode_batch("2x3:100+30").slots, 16)  # prefixes are shared as far as their pages are full
    assert len(paging.source) == 2 * (6 + 3 * 3)  # 6 full pages of a prefix; 4 + 30 tokens for each row


def problem(batch: Batch) -> Problem:
    q, k, v = tensors(batch.pages, batch.total_rows)
    pair = (k.float(), v.float())
    return Problem(batch, q.float(), [pair, pair], attend_slots(batch, q, k, v))


@pytest.mark.parametrize("text", ["3x4:200+30~", "150/2x3:70+9", "2x50+2x20", "1x40@90"])
def test_what_results_are_checked_against(text: str) -> None:
    given = problem(decode_batch(text) if ":" in text else prefill_batch(text))
    found = reference(given.batch, given.q, *given.caches[0], None)
    torch.testing.assert_close(found.double(), given.want, rtol=1e-4, atol=1e-5)
    near = reference(given.batch, given.q, *given.caches[0], 50)
    last, slots = len(near) - 1, torch.from_numpy(given.batch.slots[-1][-50:])
    k, v = (each.flatten(0, 1)[slots] for each in given.caches[0])
    torch.testing.assert_close(near[last], attend(given.q[last], k, v), rtol=1e-4, atol=1e-5)


PLAIN, RAGGED, PROMPTS = decode_batch("2x3:70+20"), small_random(), prefill_batch("2x40")
MATH = SDPBackend.MATH


@pytest.mark.parametrize(
    ("way", "batch"),
    [
        (partial(rivals.flash_decode, packed=True), PLAIN),
        (partial(rivals.flash_decode, packed=False), PLAIN),
        (partial(rivals.padded_decode, backend=MATH, packed=True), PLAIN),
        (partial(rivals.padded_decode, backend=MATH, packed=False), RAGGED),
        (rivals.flex_decode, PLAIN),
        (rivals.flex_decode, RAGGED),
        (partial(rivals.sdpa_prefill, backend=MATH), PROMPTS),
        (rivals.flex_prefill, PROMPTS),
    ],
)
def test_rivals_in_torch_solve_batches(way: rivals.Way, batch: Batch) -> None:
    given = problem(batch)
    step, pairs = way(given)
    for pair in pairs:
        given.check(step(*pair))
    if batch is PROMPTS:
        with pytest.raises(rivals.Unfit, match="one length"):
            way(problem(prefill_batch("1x40@9")))


def test_a_cascade_meets_prefix_pages_and_rows_pages() -> None:
    given = problem(small_random())
    paging = rivals.repage(given.batch.slots, 16)
    shared, own = libraries.cascade_levels(given, paging)
    assert shared[0].tolist() == [0, 3, 4, 9] and np.diff(shared[1]).tolist() == [8, 4, 1]
    for row, slots in enumerate(given.batch.slots):
        group = np.searchsorted(shared[0], row, side="right") - 1
        pages = [*shared[2][shared[1][group] : shared[1][group + 1]], *own[2][own[1][row] : own[1][row + 1]]]
        assert np.array_equal(paging.source[pages].ravel()[: len(slots)], slots)


def test_rivals_are_chosen_by_name_and_missing_ones_named() -> None:
    names, missing = libraries.chosen("all", libraries.DECODE)
    assert {"sdpa-flash", "sdpa-cudnn", "flex"} <= set(names) and not set(names) & set(missing)
    assert set(names) | set(missing) == set(libraries.DECODE)
    assert libraries.chosen("none", libraries.DECODE) == ([], [])
    names, missing = libraries.chosen("flashinfer", libraries.DECODE)
    assert {*names, *missing} == {"flashinfer", "cascade"}
    with pytest.raises(SystemExit, match="no flesh; there are sdpa-flash"):
        libraries.chosen("flesh", libraries.DECODE)


def test_a_rival_that_fails_says_why_in_a_line() -> None:
    def broken(given: Problem) -> Any:
        raise RuntimeError("no kernel\nfor this card")

    def wrong(given: Problem) -> Any:
        return lambda k, v: torch.zeros_like(given.q), given.caches

    given = problem(decode_batch("1x2:0+9"))
    outcome = rivals.time_rival({"one way": broken, "another": wrong}, given, 1)
    assert str(outcome) == "failed" and outcome.notes[0] == "one way: RuntimeError: no kernel / for this card"
    assert "its result is wrong: relative error 1.0" in outcome.notes[1]
    outcome = rivals.time_rival({"causal": rivals.flex_prefill}, problem(prefill_batch("1x8@3")), 1)
    assert str(outcome) == "-" and outcome.unfit


def test_a_gate_is_suggested_between_what_pays_and_what_does_not() -> None:
    cells = [calibrate.Cell(2, tokens, 1.0, 0.5 + tokens / 400) for tokens in (100, 160, 240, 400)]
    assert calibrate.break_even(cells) == pytest.approx(200)
    gate = calibrate.best_gate(cells)
    assert 80 < gate <= 120 and max(cell.loss(gate) for cell in cells) == 0
    assert calibrate.break_even(cells[:2]) == np.inf and calibrate.break_even(cells[2:]) == 240
