"""Two contenders on the same questions: the runs, the table and the options that score.py and harness.py share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
SLOWER = 1.05  # larger batch sizes are not tried once one is slower than the best by this factor


@dataclass(frozen=True)
class Contender:
    """A line of the table."""

    name: str
    questions: int
    seconds: float

    @property
    def questions_per_second(self) -> float:
        return self.questions / self.seconds


def median_run(name: str, runs: int, run: Callable[[], tuple[float, T]]) -> tuple[float, T]:
    """The median seconds of several runs, and the answers of the last one. ``run`` returns seconds and answers."""
    print(f"{name} ...", end=" ", flush=True)
    times: list[float] = []
    for _ in range(runs):
        seconds, answers = run()
        times.append(seconds)
        print(f"{seconds:.2f} s", end=" ", flush=True)
    print(flush=True)
    return statistics.median(times), answers


def table(ours: Contender, rival: Contender) -> str:
    lines = [f"{'':<24}{'questions':>10}{'seconds':>10}{'questions/s':>13}   {ours.name} is"]
    for contender in (ours, rival):
        line = f"{contender.name:<24}{contender.questions:>10,}{contender.seconds:>10.2f}"
        line += f"{contender.questions_per_second:>13.2f}"
        if contender is rival:
            line += f"   {ours.questions_per_second / rival.questions_per_second:.2f} x as fast"
        lines.append(line)
    return "\n".join(lines)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, else bfloat16"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads on a CPU")


def add_question_options(parser: argparse.ArgumentParser, questions: int) -> None:
    """``questions``: the default number of them."""
    parser.add_argument("--questions", type=int, default=questions, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--choices", type=int, default=4, metavar="N", help="answers to each question (default: %(default)s)"
    )
    parser.add_argument(
        "--shots", type=int, default=5, metavar="N", help="examples before each question (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the questions (default: %(default)s)")


def add_run_options(parser: argparse.ArgumentParser, rival: str, batch_sizes: Sequence[int]) -> None:
    """``batch_sizes``: those that the rival is tried with by default."""
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each contender (default: %(default)s)")
    parser.add_argument("--rival-runs", type=int, metavar="N", help=f"runs of {rival} (default: as --runs)")
    parser.add_argument("--rival-questions", type=int, metavar="N", help=f"give {rival} only the first N questions")
    parser.add_argument(
        "--batch-sizes",
        type=lambda text: [int(number) for number in text.split(",")],
        default=list(batch_sizes),
        metavar="N,N,...",
        help=f"batch sizes that {rival} is tried with (default: {','.join(map(str, batch_sizes))})",
    )
