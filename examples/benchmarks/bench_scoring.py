"""How fast continuations are scored, beside a plain loop over batches of the same model.

    python examples/benchmarks/bench_scoring.py --model .models/gemma-3-270m --questions 32

The answers to multiple-choice questions of random tokens, which all have the same examples before them. Lengths vary by
a quarter both ways. The loop's batches are sorted by length and padded on the right, with logits only where they are
needed, at its best batch size. Both run in one process, after a warm-up; the median of several runs counts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import common
import torch

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.contenders import fastest_batch_size, padded
from hf_batchllm.bench.floor import timed
from hf_batchllm.bench.workload import words_of

Question = tuple[list[int], list[list[int]]]  # with the examples before it, and its answers


def questions(asked: Any, vocabulary: int) -> list[Question]:
    dice = random.Random(asked.seed)
    lowest = min(1000, vocabulary // 10)  # the lowest ids are mostly special tokens and bytes

    def text(length: int, vary: bool = True) -> list[int]:
        count = max(1, round(length * dice.uniform(0.75, 1.25))) if vary and length > 1 else length
        return [dice.randrange(lowest, vocabulary) for _ in range(count)]

    examples = text(asked.shots * (asked.question + asked.answer), vary=False)
    contexts = [examples + text(asked.question) for _ in range(asked.questions)]
    return [(context, [text(asked.answer) for _ in range(asked.choices)]) for context in contexts]


@torch.inference_mode()
def by_a_loop(model: Any, size: int, asked: Sequence[Question]) -> list[float]:
    """The log-probability of each answer."""
    rows = [(context, answer) for context, answers in asked for answer in answers]
    order = sorted(range(len(rows)), key=lambda place: sum(map(len, rows[place])))
    found = [0.0] * len(rows)
    for begin in range(0, len(order), size):
        places = order[begin : begin + size]
        some = [rows[place] for place in places]
        ids, mask = padded([context + answer[:-1] for context, answer in some], model.device, "right")
        width, first = mask.shape[1], min(len(context) for context, _ in some) - 1
        columns = torch.arange(first, width, device=model.device)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=columns).logits
        for row, (place, (context, answer)) in enumerate(zip(places, some, strict=True)):
            mine = logits[row, len(context) - 1 - first :][: len(answer)].float().log_softmax(dim=-1)
            found[place] = mine.gather(-1, torch.tensor(answer, device=model.device)[:, None]).sum()  # type: ignore[call-overload]
    return torch.stack(found).tolist()  # type: ignore[arg-type,no-any-return]


def main(arguments: Sequence[str] | None = None) -> None:
    sizes = {"nargs": "+", "type": int, "default": [1, 4, 16, 64], "help": "that the loop is tried with"}
    asked = common.read(
        __doc__, arguments, {"--batch-sizes": sizes}, model="", questions=(64, "questions"),
        choices=(4, "answers to each"), shots=(5, "examples"), question=(80, "tokens of a question"),
        answer=(8, "tokens of an answer"), seed=(0, "seed"), runs=common.RUNS,
        rival_questions=(0, "for the loop; 0: all"),
    )  # fmt: skip
    model = common.model_of(asked)
    device, every, reports = model.device, questions(asked, words_of(model)), []
    part = every[: asked.rival_questions or None]

    def ours(some: Sequence[Question]) -> list[float]:
        # A new generator each time, as a user who makes one call would pay.
        result = BatchGenerator(model).score(*map(list, zip(*some, strict=True)), progress=False)
        reports.append(result.report)
        return result.logprobs

    def speed_of(size: int) -> float:
        few = part[: -(-size // asked.choices)]
        return len(few) * asked.choices / timed(device, lambda: by_a_loop(model, size, few))[0]

    ours(every[:2])
    seconds, scores = common.median_run("hf_batchllm", asked.runs, device, lambda: ours(every))
    size, _ = fastest_batch_size("loop", asked.batch_sizes, len(part) * asked.choices, speed_of, 1.05)
    name = f"loop, batches of {size}"
    loop_seconds, others = common.median_run(name, asked.runs, device, lambda: by_a_loop(model, size, part))
    common.print_pair(("hf_batchllm", len(every), seconds), (name, len(part), loop_seconds))
    largest = max(abs(one - other) for one, other in zip(scores, others, strict=False))
    print(f"log-probabilities of answers differ by {largest:.1e} at most\n\n{reports[-1]}")


if __name__ == "__main__":
    main()
