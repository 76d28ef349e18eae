"""What tests of a pool share: small models in processes of their own, some of which are late, slow or lost."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_batchllm import GeneratorPool
from hf_batchllm.pool.worker_handle import NUMBER


@dataclass(frozen=True)
class Load:
    """Loads the family's model, in each process by itself. Numbers are those of processes."""

    family: str = "llama"
    late: Mapping[int, float] = field(default_factory=dict)  # seconds before it begins to load
    waits_for: Mapping[int, Path] = field(default_factory=dict)  # a file; it begins to load once that is there
    slow: Mapping[int, float] = field(default_factory=dict)  # seconds that each step takes longer
    fails: Mapping[int, BaseException] = field(default_factory=dict)
    fails_at_work: Mapping[int, BaseException] = field(default_factory=dict)  # in its second step
    other_weights: tuple[int, ...] = ()
    other_rows: tuple[int, ...] = ()  # some of the embeddings'
    other_frequencies: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __call__(self) -> Any:
        from support_families import build

        number = int(os.environ[NUMBER])
        time.sleep(self.late.get(number, 0.0))
        while number in self.waits_for and not self.waits_for[number].exists():
            time.sleep(0.02)
        if number in self.fails:
            raise self.fails[number]
        model = copy.deepcopy(build(self.family)).to(self.dtype)
        if number in self.other_weights:
            torch.nn.init.ones_(model.lm_head.weight)
        if number in self.other_rows:
            model.get_input_embeddings().weight.data[30:33] *= 2
        if number in self.other_frequencies:
            next(each for name, each in model.named_buffers() if name.endswith("inv_freq")).mul_(1.5)
        if number in self.slow:
            seconds = self.slow[number]
            model.register_forward_pre_hook(lambda *given: time.sleep(seconds))
        if number in self.fails_at_work:
            steps = []

            def failing(*given: Any) -> None:
                steps.append(1)
                if len(steps) > 1:
                    raise self.fails_at_work[number]

            model.register_forward_pre_hook(failing)
        return model


def is_running(process_id: int) -> bool:
    state = Path(f"/proc/{process_id}/stat")
    try:
        return state.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def none_left_behind() -> Iterator[list[int]]:
    """The processes whose numbers are put into the list have ended a little after the block."""
    started: list[int] = []
    yield started
    until = time.monotonic() + 20
    while any(map(is_running, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [each for each in started if is_running(each)]


@contextmanager
def ready_pool(load: Load, processes: int = 2, **settings: Any) -> Iterator[GeneratorPool]:
    """All of its processes have loaded the model, and none of them is there a little after the block."""
    with none_left_behind() as started, GeneratorPool(load, gpus=["cpu"] * processes, **settings) as pool:
        pool.wait()
        started += process_ids(pool)
        yield pool


def process_ids(pool: GeneratorPool) -> list[int]:
    return [worker.process_id for worker in pool._crew.workers]


@contextmanager
def all_heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield heard
