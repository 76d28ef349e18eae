"""How fast continuations are scored, beside a plain loop over batches of the same model.

python -m hf_batchllm.bench.score --help
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..generator import BatchGenerator
from ..results.run_report import RunReport
from .contenders import NoTokenizer, timed
from .models import SHAPES, load_model

_DESCRIPTION = """\
Questions with answers to choose from, each with the same examples before it: this library, which computes what they
share once, beside a loop that pads batches of questions with their answers on the right (at its best batch size, sorted
by length, logits where they are looked at). Both in one process, after a warm-up, the median of several runs.
"""
_SLOWER = 1.05  # by so much a batch size must be slower than the best before larger ones are not tried


@dataclass(frozen=True)
class Questions:
    """Random tokens. Lengths vary by a quarter both ways, but that of the examples."""

    contexts: list[list[int]]
    continuations: list[list[list[int]]]

    @classmethod
    def of(cls, asked: argparse.Namespace, vocabulary: int) -> Questions:
        dice = random.Random(asked.seed)
        lowest = min(1000, vocabulary // 10)  # special tokens and bytes stand at the beginning, as a rule

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
        # What a user of one call would pay: the generator is made anew.
        generator = BatchGenerator(self.model, NoTokenizer())
        result = generator.score(questions.contexts, questions.continuations, progress=False)
        self.report = result.report
        return result.logprobs


@dataclass
class Loop:
    model: PreTrainedModel
    batch_size: int

    @torch.inference_mode()
    def run(self, questions: Questions) -> list[float]:
        rows = questions.rows
        found = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda place: len(rows[place][0]) + len(rows[place][1]))
        for begin in range(0, len(order), self.batch_size):
            places = order[begin : begin + self.batch_size]
            for place, total in zip(places, self._batch([rows[place] for place in places]), strict=True):
                found[place] = total
        return found

    def _batch(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
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
        return torch.stack(totals).tolist()


def best_batch_size(model: PreTrainedModel, questions: Questions, sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The one at which the loop is fastest, from one batch of each; and rows a second of those tried."""
    rows = questions.rows
    speeds: dict[int, float] = {}
    for size in sorted({min(size, len(rows)) for size in sizes}):
        batch = Loop(model, size)
        try:
            seconds, _ = timed(model.device, lambda batch=batch, size=size: batch._batch(rows[:size]))
        except Exception as error:  # mostly for want of memory, of which larger ones need more
            if not speeds:
                raise
            print(f"batch {size}: {type(error).__name__}")
            break
        speeds[size] = size / seconds
        if speeds[size] * _SLOWER < max(speeds.values()):
            break
    return max(speeds, key=speeds.__getitem__), speeds


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
    mine, totals = _measured("hf_batchllm", ours, every, asked.runs)
    size, speeds = best_batch_size(model, part, asked.batch_sizes)
    theirs, others = _measured(f"loop, batches of {size}", Loop(model, size), part, asked.rival_runs or asked.runs)

    print(f"\n{'':<24}{'questions':>10}{'seconds':>10}{'questions/s':>13}{'ours is':>10}")
    for name, questions, seconds in (("hf_batchllm", every, mine), (f"loop, batches of {size}", part, theirs)):
        speed = len(questions.contexts) / seconds
        ratio = "" if questions is every and name == "hf_batchllm" else f"{len(every.contexts) / mine / speed:.2f} x"
        print(f"{name:<24}{len(questions.contexts):>10,}{seconds:>10.2f}{speed:>13.2f}{ratio:>10}")
    apart = max(abs(one - other) for one, other in zip(totals, others, strict=False))
    print(f"\nlog-probabilities of answers differ by {apart:.1e} at most")
    print(f"loop, rows/s by batch size: {', '.join(f'{each}: {speed:.2f}' for each, speed in speeds.items())}")
    print(f"\n{ours.report}")
    return 0


def _measured(name: str, contender: Ours | Loop, questions: Questions, runs: int) -> tuple[float, list[float]]:
    print(f"{name} ...", end=" ", flush=True)
    took, found = [], []
    for _ in range(runs):
        seconds, found = timed(contender.model.device, lambda: contender.run(questions))
        took.append(seconds)
        print(f"{seconds:.2f} s", end=" ", flush=True)
    print(flush=True)
    return statistics.median(took), found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_batchllm.bench.score",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="a folder or a name on the hub")
    which.add_argument("--config", help=f"random weights (default: tiny): {', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--questions", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--choices", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--shots", type=int, default=5, metavar="N", help="examples (default: %(default)s)")
    parser.add_argument("--question", type=int, default=80, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=8, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--rival-runs", type=int, metavar="N", help="fewer runs of the loop")
    parser.add_argument("--rival-questions", type=int, metavar="N", help="give the loop only the first so many")
    parser.add_argument(
        "--batch-sizes",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[1, 4, 16, 64],
        metavar="N,N,...",
        help="those that the loop is tried with (default: 1,4,16,64)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
