"""All-reduces. Here ranks are processes that share memory, and on a GPU two streams of one process."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_kernels import DEVICE, INTERPRETED, kernel

from hf_batchllm.kernels.reference import all_reduce_torch
from hf_batchllm.kernels.triton import all_reduce_triton
from hf_batchllm.parallel.peer_all_reduce import PeerAllReduce
from hf_batchllm.patches.all_reduced_rows import GroupAllReduce, all_reduced_forward

SIZES = [1, 4096, 4097, 3 * 8192 + 5]
TURNS = 6 if INTERPRETED else 50


class Ranks:
    """The memory of ``count`` ranks: two slots and the signals of each."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        def zeros(*shape: int, of: torch.dtype) -> list[torch.Tensor]:
            made = [torch.zeros(shape, dtype=of, device=DEVICE) for _ in range(count)]
            return [each.share_memory_() if DEVICE == "cpu" else each for each in made]

        self.count = count
        self.slots = [zeros(SIZES[-1], of=dtype), zeros(SIZES[-1], of=dtype)]
        self.signals = zeros(all_reduce_triton.MOST_PROGRAMS, count, of=torch.int32)
        ended = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.ended = ended.share_memory_() if DEVICE == "cpu" else ended.pin_memory()

    def sum(self, rank: int, turn: int, mine: torch.Tensor) -> torch.Tensor:
        parts = [slot[: len(mine)] for slot in self.slots[turn % 2]]
        parts[rank].copy_(mine)
        return all_reduce_triton.all_reduce_parts(parts, torch.empty_like(mine), self.signals, self.ended, rank)

    def on_each(self, run: Callable[[int], Any], folder: Path) -> list[Any]:
        """What ``run`` gives on each rank, all of which run at the same time."""
        if DEVICE != "cpu":
            over = self.ended.clone()
            self.ended.fill_(1)  # a first time without waiting: to load a kernel waits for those that run
            streams = [torch.cuda.Stream() for _ in range(self.count)]
            for ended in (self.ended, over):
                torch.cuda.synchronize()
                for signal in self.signals:
                    signal.zero_()
                torch.cuda.synchronize()
                self.ended.copy_(ended)
                made = []
                late = threading.Timer(60, self.ended.fill_, [1])  # a failure then, where the host would wait for ever
                late.start()
                for rank, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        made.append(run(rank))
                torch.cuda.synchronize()
                late.cancel()
            return made

        def in_process(rank: int) -> None:
            try:
                found = run(rank)
            except BaseException:
                found = traceback.format_exc()
            (folder / str(rank)).write_bytes(pickle.dumps(found))

        ranks = [
            multiprocessing.get_context("fork").Process(target=in_process, args=[each]) for each in range(self.count)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(120)
            each.kill()
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(self.count)]


@kernel
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_they_are_those_of_the_reference(count: int, dtype: torch.dtype, tmp_path: Path) -> None:
    ranks = Ranks(count, dtype)
    torch.manual_seed(1)
    drawn = [torch.randn(count, SIZES[turn % len(SIZES)], device=DEVICE).to(dtype) for turn in range(TURNS)]

    def run(rank: int) -> list[torch.Tensor]:
        return [ranks.sum(rank, turn, parts[rank]) for turn, parts in enumerate(drawn)]

    made = ranks.on_each(run, tmp_path)
    for turn, parts in enumerate(drawn):
        wanted = all_reduce_torch.all_reduce_parts(list(parts), torch.empty_like(parts[0]))
        for rank in range(count):
            assert torch.equal(made[rank][turn], made[0][turn]), "all ranks have the same"
            cut = INTERPRETED and dtype == torch.bfloat16  # the interpreter does not round to it
            assert torch.allclose(made[rank][turn], wanted, rtol=2**-7 if cut else 0.0, atol=0.0), (rank, turn)


@kernel
def test_all_have_read_what_was_there_when_they_have_met(tmp_path: Path) -> None:
    """One after the other in the same slot, which is only free once all ranks have met."""
    ranks = Ranks(2, torch.float32)

    def run(rank: int) -> list[float]:
        found = []
        for turn in range(TURNS):
            found.append(ranks.sum(rank, 0, torch.full((4097,), float(turn + rank), device=DEVICE)))
            all_reduce_triton.meet(ranks.signals, ranks.ended, rank)
        return found

    for made in ranks.on_each(run, tmp_path):
        assert [each.unique().tolist() for each in made] == [[2.0 * turn + 1] for turn in range(TURNS)]
    assert not any(each.any() for each in ranks.signals), "each signal has been seen"


@kernel
def test_products_go_through_two_slots_in_turn(tmp_path: Path) -> None:
    """Forward passes of several products; what is too large is the group's."""
    ranks, rows = Ranks(2, torch.uint8), [3, 1, 40, 7]
    torch.manual_seed(2)
    inputs = torch.randn(2, 40, 16, device=DEVICE)  # each rank's
    weights = torch.randn(2, 32, 16, device=DEVICE)

    def run(rank: int) -> list[torch.Tensor]:
        all_reduce = PeerAllReduce(ranks.slots, ranks.signals, rank, OtherAllReduce(), ranks.ended)
        made = []
        for _ in range(3):
            all_reduce.begin()
            made += [all_reduce.product(inputs[rank, :count], weights[rank]) for count in rows]
            made.append(all_reduce.total(inputs[rank, :5].clone()))
        assert all_reduce.made == 3 * (len(rows) + 1)
        assert all_reduce.product(torch.zeros(5000, 2, device=DEVICE), torch.zeros(32, 2, device=DEVICE)).item() == -1.0
        return made

    wanted = [sum(inputs[rank, :count] @ weights[rank].t() for rank in range(2)) for count in rows]
    wanted.append(inputs[0, :5] + inputs[1, :5])
    for made in ranks.on_each(run, tmp_path):
        assert isinstance(made, list), made
        for ours, right in zip(made, 3 * wanted, strict=True):
            torch.testing.assert_close(ours, right)


class OtherAllReduce(GroupAllReduce):
    def __init__(self) -> None:
        pass

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tensor(-1.0)  # on the host: nobody can wait for a stream whose kernels wait for other ranks


@kernel
def test_a_rank_that_does_not_come_is_waited_for_until_all_is_ended(tmp_path: Path) -> None:
    ranks = Ranks(2, torch.float32)
    ranks.ended.fill_(1)
    made = ranks.on_each(lambda rank: None if rank else ranks.sum(0, 0, torch.ones(5, device=DEVICE)), tmp_path)
    assert made[0] is not None and made[0].shape == (5,)


def test_an_all_reduce_counts_once_its_kernel_is_launched() -> None:
    """Ranks compare how many there were: what fails before, on one of them, the others wait for."""
    slots = [[torch.zeros(4096, dtype=torch.uint8)] for _ in range(2)]
    signals, ended = (
        torch.zeros(all_reduce_triton.MOST_PROGRAMS, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
    )
    all_reduce = PeerAllReduce(slots, [signals], 0, OtherAllReduce(), ended)
    with pytest.raises(RuntimeError, match="dtype"):
        all_reduce.product(torch.ones(2, 4), torch.ones(3, 4, dtype=torch.float16))
    assert all_reduce.made == 0


@torch.no_grad()
def test_rows_of_none() -> None:
    linear = torch.nn.Linear(4, 3)
    made = all_reduced_forward(linear, NoAllReduce())(torch.ones(1, 0, 4))
    assert made.shape == (1, 0, 3)


class NoAllReduce(OtherAllReduce):
    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()
