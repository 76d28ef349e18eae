"""How fast continuations are scored, beside a plain loop over batches of the same model.

python -m hf_batchllm.bench.score --help
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..generator import BatchGenerator
from ..results.run_report import RunReport
from .batch_sizes import fastest_batch_size, speeds_line
from .contenders import NoTokenizer
from .head_to_head import (
    SLOWER,
    Contender,
    add_model_options,
    add_question_options,
    add_run_options,
    median_run,
    table,
)
from .models import load_model
from .shapes import SHAPES
from .timing import timed

_DESCRIPTION = """\
Scores the answers to multiple-choice questions, which all have the same examples before them. This library computes
what they share once; beside it runs a plain loop over batches, sorted by length, padded on the right, with logits only
where they are needed, at its best batch size. Both run in one process, after a warm-up; the median of several runs.
"""


@dataclass(frozen=True)
class Questions:
    """Questions of random tokens. Lengths vary by a quarter both ways, except that of the examples."""

    contexts: list[list[int]]
    continuations: list[list[list[int]]]

    @classmethod
    def of(cls, asked: argparse.Namespace, vocabulary: int) -> Questions:
        dice = random.Random(asked.seed)
        lowest = min(1000, vocabulary // 10)  # the lowest ids are mostly special tokens and bytes

        def text(length: int, vary: bool = True) -> list[int]:
            count = max(1, round(length * dice.uniform(0.75, 1.25))) if vary and length > 1 else length
            return [dice.randrange(lowest, vocabulary) for _ in range(count)]

        examples = text(asked.shots * (asked.question + asked.answer), vary=False)
        contexts = [examples + text(asked.question) for _ in range(asked.questions)]
        return cls(contexts, [[text(asked.answer) for _ in range(asked.choices)] for _ in contexts])

    def first(self, count: int) -> Questions:
        return Questions(self.contexts[:count], self.continuations[:count])

    @property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        pairs = zip(self.contexts, self.continuations, strict=True)
        return [(context, continuation) for context, several in pairs for continuation in several]


@dataclass
class Ours:
    model: PreTrainedModel
    report: RunReport | None = None

    def run(self, questions: Questions) -> list[float]:
        # A new generator each time, as a user who makes one call would pay.
        generator = BatchGenerator(self.model, NoTokenizer())
        result = generator.score(questions.contexts, questions.continuations, progress=False)
        self.report = result.report
        return result.logprobs


@dataclass
class Loop:
    """A plain loop over padded batches."""

    model: PreTrainedModel
    batch_size: int

    @torch.inference_mode()
    def run(self, questions: Questions) -> list[float]:
        rows = questions.rows
        found = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda place: len(rows[place][0]) + len(rows[place][1]))
        for begin in range(0, len(order), self.batch_size):
            places = order[begin : begin + self.batch_size]
            for place, total in zip(places, self.totals([rows[place] for place in places]), strict=True):
                found[place] = total
        return found

    def totals(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """The log-probability of each continuation, from one batch."""
        device = self.model.device
        ids = [context + continuation[:-1] for context, continuation in rows]
        width, first = max(map(len, ids)), min(len(context) for context, _ in rows) - 1
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=device)
        columns = torch.arange(first, width, device=device)
        logits = self.model(input_ids=padded, attention_mask=mask, use_cache=False, logits_to_keep=columns).logits
        totals = []
        for row, (context, continuation) in enumerate(rows):
            mine = logits[row, len(context) - 1 - first :][: len(continuation)].float().log_softmax(dim=-1)
            targets = torch.tensor(continuation, device=device)
            totals.append(mine.gather(-1, targets[:, None]).sum())
        sums: list[float] = torch.stack(totals).tolist()
        return sums


def best_batch_size(model: PreTrainedModel, questions: Questions, sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The size at which the loop is fastest, from one batch of each; and the rows/s of each size tried."""
    rows = questions.rows

    def speed_of(size: int) -> float:
        batch = Loop(model, size)
        seconds, _ = timed(model.device, lambda: batch.totals(rows[:size]))
        return size / seconds

    return fastest_batch_size("loop", sizes, len(rows), speed_of, slower=SLOWER)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if asked.threads:
        torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    logging.set_verbosity_error()
    model = load_model(asked.model, asked.config or (None if asked.model else "tiny"), device, dtype)
    every = Questions.of(asked, model.config.get_text_config().vocab_size)
    part = every.first(asked.rival_questions or asked.questions)
    print(
        f"{type(model).__name__}, {str(dtype).removeprefix('torch.')}, on {device}: {asked.questions:,} questions of "
        f"about {asked.question:,} tokens, {asked.choices:,} answers of about {asked.answer:,} to each, "
        f"{asked.shots:,} examples before them\n",
        flush=True,
    )
    ours = Ours(model)
    ours.run(every.first(2))
    seconds, totals = median_run("hf_batchllm", asked.runs, lambda: timed(device, lambda: ours.run(every)))
    size, speeds = best_batch_size(model, part, asked.batch_sizes)
    loop, name = Loop(model, size), f"loop, batches of {size}"
    loop_seconds, others = median_run(
        name, asked.rival_runs or asked.runs, lambda: timed(device, lambda: loop.run(part))
    )

    lines = (
        Contender("hf_batchllm", len(every.contexts), seconds),
        Contender(name, len(part.contexts), loop_seconds),
    )
    print(f"\n{table(*lines)}")
    largest = max(abs(one - other) for one, other in zip(totals, others, strict=False))
    print(f"\nlog-probabilities of answers differ by {largest:.1e} at most")
    print(speeds_line("loop", "rows/s", speeds))
    print(f"\n{ours.report}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_batchllm.bench.score",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="a folder or a name on the hub")
    which.add_argument("--config", help=f"random weights (default: tiny): {', '.join(SHAPES)}, or a config.json")
    add_model_options(parser)
    add_question_options(parser, questions=64)
    parser.add_argument(
        "--question", type=int, default=80, metavar="N", help="tokens of a question (default: %(default)s)"
    )
    parser.add_argument("--answer", type=int, default=8, metavar="N", help="tokens of an answer (default: %(default)s)")
    add_run_options(parser, "the loop", batch_sizes=[1, 4, 16, 64])
    return parser


if __name__ == "__main__":
    sys.exit(main())
