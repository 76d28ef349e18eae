"""The sweep's processes: one for each class, so that one which hangs, crashes or takes all memory ends alone."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import transformers
from support_sweep_compare import NOT_BUILT, Outcome, in_short, outcomes
from support_sweep_models import Case

SECONDS = 300  # for a class with all its patterns
MEMORY = 8 << 30


@dataclass(frozen=True)
class Row:
    """What became of one class."""

    case: Case
    outcomes: dict[str, Outcome]  # by pattern
    seconds: float


class Kept:
    """Rows in a file, one a line: a sweep that was interrupted goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> dict[Case, Row]:
        text = self.path.read_text("utf-8") if self.path.exists() else ""
        whole, _, cut_off = text.rpartition("\n")
        if cut_off:  # as it was interrupted: what is added goes on a line of its own
            self.path.write_text(f"{whole}\n" if whole else "", "utf-8")
        return {row.case: row for row in map(_from_json, whole.splitlines())}

    def add(self, row: Row) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def _from_json(line: str) -> Row:
    made = json.loads(line)
    found = {pattern: Outcome(**outcome) for pattern, outcome in made["outcomes"].items()}
    return Row(Case(**made["case"]), found, made["seconds"])


@dataclass
class _Running:
    case: Case
    process: BaseProcess
    answer: Connection
    began: float


def swept(cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """The rows as they are finished."""
    forks = multiprocessing.get_context("fork")  # everything is imported by now
    waiting, running = list(reversed(cases)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.pop()
                answer, end = forks.Pipe(duplex=False)
                process = forks.Process(target=_sweep_one, args=(case, end))
                process.start()
                end.close()
                running.append(_Running(case, process, answer, time.monotonic()))
            wait([each.answer for each in running], timeout=1)
            for each in list(running):
                row = _row(each)
                if row is not None:
                    running.remove(each)
                    yield row
    finally:
        for each in running:
            each.process.kill()


def _row(running: _Running) -> Row | None:
    took = time.monotonic() - running.began
    if running.answer.poll():
        try:
            found = running.answer.recv()
        except EOFError:
            running.process.join()
            found = _alone(f"its process ended with {running.process.exitcode}")
    elif took > SECONDS:
        running.process.kill()
        found = _alone(f"not done after {SECONDS} seconds")
    else:
        return None
    running.process.join()
    running.answer.close()
    return Row(running.case, found, took)


def _alone(why: str) -> dict[str, Outcome]:
    return {"default": Outcome(NOT_BUILT, why)}


def _sweep_one(case: Case, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    quiet()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            found = outcomes(case)
        except Exception as error:
            found = _alone(f"the sweep itself raises {in_short(error)}")
    answer.send(found)
    answer.close()


def quiet() -> None:
    """Tiny models with strange configs make transformers talk."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
