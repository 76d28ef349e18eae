"""Runs of a contender on a workload, and the figures they give."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .contenders import Ours, Prompts, Tokens, end_tokens
from .floor import Floor, Shape, floor_of
from .machine_rates import Rates, measure_rates
from .matrices import Matrices, NoFloorError, matrices_of
from .on_gpus import OnGpus
from .recording_scheduler import StepSize
from .routing_shares import with_measured_shares
from .timing import free_memory, timed
from .workload import Mix, Workload

WARM_UP = {"cuda": (32, 32)}  # prompts and new tokens: enough to compile the kernels and to capture a graph
BRIEF_WARM_UP = 2, 2


@dataclass
class Measurement:
    """The runs of a contender on a workload."""

    name: str
    workload: Workload | Mix
    runs: list[float] = field(default_factory=list)  # seconds of each run
    tokens: Tokens = field(default_factory=list)  # new tokens of each prompt in the last run
    made: list[int] = field(default_factory=list)  # number of new tokens of each run
    error: str = ""
    peak_bytes: int = 0  # of the device, weights included; 0 on a CPU, where PyTorch does not count
    floor: Floor | None = None
    processes: int = 1  # that ran it, each on a machine of its own as far as the floor goes

    @property
    def requests(self) -> int:
        return self.workload.requests

    @property
    def seconds(self) -> float:
        return statistics.median(self.runs)

    @property
    def prompts_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def new_tokens_per_second(self) -> float:
        return statistics.median(made / seconds for made, seconds in zip(self.made, self.runs, strict=True))

    @property
    def share_of_floor(self) -> float | None:
        return self.floor.seconds / self.processes / self.seconds if self.floor and self.runs else None

    def times_faster_than(self, other: Measurement) -> float:
        """Compares new tokens per second: a rival that got fewer prompts may have had longer or shorter answers."""
        return self.new_tokens_per_second / other.new_tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"name": self.name, "requests": self.requests, "new": self.workload.new}
        if self.error:
            return {**figures, "error": self.error}
        figures |= {
            "runs": self.runs,
            "seconds": self.seconds,
            "prompts_per_second": self.prompts_per_second,
            "new_tokens_per_second": self.new_tokens_per_second,
        }
        if self.peak_bytes:
            figures["peak_device_bytes"] = self.peak_bytes
        if self.floor:
            figures["floor_seconds"] = self.floor.seconds
            figures["share_of_floor"] = self.share_of_floor
        return figures


def measure(contender: Any, workload: Workload | Mix, prompts: Prompts, runs: int) -> Measurement:
    device = contender.model.device
    row = Measurement(contender.name, workload, processes=getattr(contender, "processes", 1))
    print(f"{contender.name} ...", end=" ", flush=True)
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        few, new = _warm_up(contender)
        answers = workload.answers
        contender.run(prompts[:few], [min(new, answer) for answer in answers[:few]])  # kernels are compiled
        for _ in range(runs):
            torch.manual_seed(0)  # a contender that draws its tokens draws the same ones each time
            took, row.tokens = timed(device, lambda: contender.run(prompts, answers))
            row.runs.append(took)
            row.made.append(sum(map(len, row.tokens)))
            print(f"{took:.2f} s", end=" ", flush=True)
    except Exception as error:  # a rival that fails gets a line that says so
        if isinstance(contender, Ours):
            raise
        row.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(row.error[:100])
        return row
    if device.type == "cuda":
        row.peak_bytes = torch.cuda.max_memory_allocated(device)
    print(flush=True)
    return row


def _warm_up(contender: Any) -> tuple[int, int]:
    """Prompts, and new tokens of each."""
    if isinstance(contender, OnGpus):
        few, new = WARM_UP.get(contender.kind, BRIEF_WARM_UP)
        return few * contender.processes, new
    return WARM_UP.get(contender.model.device.type, BRIEF_WARM_UP) if isinstance(contender, Ours) else BRIEF_WARM_UP


class Floors:
    """The floor of any workload on this model and machine."""

    def __init__(self, model: PreTrainedModel, ran: Measurement) -> None:
        """``ran`` has the prompts and answers by which the share of each expert is counted, if there are experts."""
        self.shape: Shape | None = None
        self.rates: Rates | None = None
        self.reason = ""  # why there is no floor
        try:
            matrices = matrices_of(model)
            self.shape = Shape.of(model, matrices)
        except NoFloorError as error:
            self.reason = str(error)
            return
        print("rates of the machine ...", end=" ", flush=True)
        self.rates = measure_rates(model.device, model.dtype)
        print(self.rates, flush=True)
        if matrices.mixtures:
            self.shape = _with_routing(model, matrices, self.shape, ran)

    def of(self, workload: Workload | Mix) -> Floor | None:
        if self.shape is None or self.rates is None:
            return None
        return floor_of(self.shape, workload.as_groups(), self.rates)


def _with_routing(model: PreTrainedModel, matrices: Matrices, shape: Shape, ran: Measurement) -> Shape:
    print("routing of the run ...", end=" ", flush=True)
    free_memory(model.device)
    prompts = ran.workload.prompts(model.config.get_text_config().vocab_size)
    try:
        mixtures, tokens = with_measured_shares(model, matrices.mixtures, prompts, ran.tokens)
    except Exception as error:  # out of memory, for example: the other figures stand
        print(f"{type(error).__name__}; experts are taken to be chosen equally often")
        return shape
    print(f"counted over {tokens:,} tokens", flush=True)
    return replace(shape, mixtures=tuple(mixtures), routed_tokens=tokens)


@dataclass(frozen=True)
class Reads:
    """What the decode steps of a run had to read, averaged over the whole run."""

    bytes_per_second: float
    weight_steps: int  # steps without prompts, which read the weights for decode rows alone

    @classmethod
    def of(cls, row: Measurement, shape: Shape, sizes: list[StepSize]) -> Reads | None:
        if row.floor is None:
            return None
        rows = np.array([size.rows for size in sizes if not size.chunk_tokens], dtype=int)
        weights = float(shape.step_bytes(rows).sum())
        return cls((row.floor.needs.kv_bytes + weights) / row.seconds, len(rows))


def agreement(ours: Measurement, theirs: Measurement | None, vocabulary: int) -> tuple[int, int] | None:
    """(prompts with the same tokens from ``generate`` as from us, prompts compared)."""
    if theirs is None or theirs.error:
        return None
    mine, others = (_by_prompt(row, vocabulary) for row in (ours, theirs))
    return sum(mine[prompt] == tokens for prompt, tokens in others.items()), len(others)


def _by_prompt(row: Measurement, vocabulary: int) -> dict[tuple[int, ...], list[int]]:
    prompts = row.workload.prompts(vocabulary)
    return {tuple(prompt): answer for prompt, answer in zip(prompts, row.tokens, strict=True)}


def is_greedy(model: PreTrainedModel) -> bool:
    return not end_tokens(model)
