"""How fast the evaluation harness is with ``hf-batchllm``, beside its own ``hf`` model.

python -m hf_batchllm.bench.harness --help
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from .batch_sizes import fastest_batch_size, speeds_line
from .head_to_head import (
    SLOWER,
    Contender,
    add_model_options,
    add_question_options,
    add_run_options,
    median_run,
    table,
)
from .timing import synchronize

_DESCRIPTION = """\
A multiple-choice task of the evaluation harness: small stories, each with a question and answers to choose from. The
harness makes the requests once. They go to `loglikelihood` of both models, in one process and with the same weights, so
the times cover encoding, the model and the log-probabilities. `hf` runs at its best batch size, found with the first
questions.
"""
_NAMES = "Ada Ben Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga Paul Rosa Simon".split()
_PLACES = [
    "the old harbour", "a bookshop in Lyon", "the station in Porto", "her uncle's farm", "the public library",
    "a market in Ghent", "the botanical garden", "the museum of clocks", "a bakery near the river", "the town hall",
]  # fmt: skip
_THINGS = [
    "a green umbrella", "three maps of the coast", "a bag of walnuts", "an old radio", "two tickets for the opera",
    "a jar of honey", "a blue bicycle", "a box of candles", "a pair of red boots", "the key of the cellar",
]  # fmt: skip
_REASONS = [
    "because it had begun to rain", "since the last bus had left", "as a present for a friend",
    "because the shop was about to close", "to have something for the evening", "without knowing why",
]  # fmt: skip
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def story(dice: random.Random, choices: int, letters: bool) -> dict[str, Any]:
    """One question of the task, as a record."""
    name, friend = dice.sample(_NAMES, 2)
    place, elsewhere = dice.sample(_PLACES, 2)
    things = dice.sample(_THINGS, choices)
    gold = dice.randrange(choices)
    text = (
        f"On {dice.choice(_DAYS)} morning {name} went to {place}, where {friend} was waiting already. They talked for "
        f"{dice.randrange(10, 60)} minutes. Before {name} left for {elsewhere}, {friend} asked for {things[gold]}, and "
        f"got it, {dice.choice(_REASONS)}. Later it was seen in a room with {dice.randrange(2, 9)} windows."
    )
    question = f"{text}\nQuestion: What did {name} give to {friend}?"
    if not letters:
        return {"question": question, "choices": things, "gold": gold}
    names = [chr(ord("A") + number) for number in range(choices)]
    listed = "\n".join(f"{letter}. {thing}" for letter, thing in zip(names, things, strict=True))
    return {"question": f"{question}\n{listed}", "choices": names, "gold": gold}


def make_requests(asked: argparse.Namespace) -> list[Any]:
    """The requests, made by the harness itself."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    dice = random.Random(asked.seed)
    shots, questions = (
        [story(dice, asked.choices, asked.letters) for _ in range(count)] for count in (asked.shots, asked.questions)
    )
    if asked.sampler == "default":  # each question draws its own examples out of many
        shots += [story(dice, asked.choices, asked.letters) for _ in range(10 * asked.shots)]
    splits = {"shots": Dataset.from_list(shots or questions), "questions": Dataset.from_list(questions)}
    task = ConfigurableTask(
        config={
            "task": "stories",
            "custom_dataset": lambda **_: splits,
            "output_type": "multiple_choice",
            "fewshot_split": "shots",
            "test_split": "questions",
            "num_fewshot": asked.shots,
            "fewshot_config": {"sampler": asked.sampler},
            "doc_to_text": "{{question}}\nAnswer:",
            "doc_to_target": "gold",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return list(task.instances)


def time_requests(lm: Any, requests: Sequence[Any]) -> tuple[float, list[tuple[float, bool]]]:
    """Seconds, and (log-probability, is_greedy) of each answer."""
    synchronize(lm.device)
    began = time.perf_counter()
    answers = lm.loglikelihood(list(requests), disable_tqdm=True)
    synchronize(lm.device)
    return time.perf_counter() - began, answers


def best_batch_size(lm: Any, requests: Sequence[Any], sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The size at which ``hf`` is fastest, from one batch of each; and the requests/s of each size tried."""

    def speed_of(size: int) -> float:
        lm.batch_size_per_gpu = size
        seconds, _ = time_requests(lm, requests[:size])
        return size / seconds

    return fastest_batch_size("hf", sizes, len(requests), speed_of, slower=SLOWER)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    from lm_eval.models.huggingface import HFLM

    from ..lm_eval import BatchLM

    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = asked.dtype or ("float32" if device == "cpu" else "bfloat16")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    given = {"device": device, "dtype": dtype, "softmax_dtype": "float32"}
    theirs = HFLM(pretrained=asked.model, **given)
    ours = BatchLM(theirs.model, tokenizer=theirs.tokenizer)

    requests = make_requests(asked)
    part = requests[: asked.choices * (asked.rival_questions or asked.questions)]
    context, answer = (sum(len(ours.tok_encode(each.args[place])) for each in part) / len(part) for place in (0, 1))
    kind = "letters" if asked.letters else f"about {answer:.0f} tokens"
    shared = "the same" if asked.sampler == "first_n" else "its own"
    print(
        f"{type(theirs.model).__name__}, {dtype}, on {device}: {asked.questions:,} questions, {asked.choices} answers "
        f"({kind}) to each; about {context:,.0f} tokens a question with {shared} {asked.shots} examples before it\n",
        flush=True,
    )
    few = part[: asked.choices]
    time_requests(ours, few)
    seconds, our_answers = median_run("hf-batchllm", asked.runs, lambda: time_requests(ours, requests))
    time_requests(theirs, few[:1])
    size, speeds = best_batch_size(theirs, part, asked.batch_sizes)
    theirs.batch_size_per_gpu = size
    name = f"hf, batches of {size}"
    their_seconds, their_answers = median_run(name, asked.rival_runs or asked.runs, lambda: time_requests(theirs, part))

    lines = (
        Contender("hf-batchllm", asked.questions, seconds),
        Contender(name, len(part) // asked.choices, their_seconds),
    )
    print(f"\n{table(*lines)}")
    pairs = list(zip(our_answers, their_answers, strict=False))
    largest = max(abs(one[0] - two[0]) for one, two in pairs)
    greedy = sum(one[1] != two[1] for one, two in pairs)
    print(f"\nlog-probabilities of answers differ by {largest:.1e} at most, is_greedy in {greedy} of {len(pairs):,}")
    print(speeds_line("hf", "requests/s", speeds))
    print(f"\n{ours.generator.last_report}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_batchllm.bench.harness",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a folder or a name on the hub")
    add_model_options(parser)
    add_question_options(parser, questions=48)
    parser.add_argument(
        "--letters", action="store_true", help="the answers are A, B, C ..., and the question lists what they stand for"
    )
    parser.add_argument(
        "--sampler",
        choices=("first_n", "default"),
        default="first_n",
        help="of examples: the same for all questions, as in MMLU, or drawn for each (default: %(default)s)",
    )
    add_run_options(parser, "hf", batch_sizes=[1, 4, 8, 16])
    return parser


if __name__ == "__main__":
    sys.exit(main())
