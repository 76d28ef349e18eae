"""How fast the evaluation harness is with ``hf-batchllm``, beside its own ``hf`` model. Needs the extra `lm-eval`.

    python examples/benchmarks/bench_harness.py --model .models/gemma-3-270m --questions 32 --rival-questions 8

A multiple-choice task: small stories, each with a question and answers to choose from. The harness makes the requests
once. They go to `loglikelihood` of both models, in one process and with the same weights, so the times cover encoding,
the model and the log-probabilities. `hf` runs at its best batch size, found with the first questions.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Sequence
from typing import Any

import common
import torch
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from hf_batchllm.bench.contenders import fastest_batch_size
from hf_batchllm.bench.floor import timed
from hf_batchllm.lm_eval import BatchLM

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


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--model": {"required": True, "help": "a folder or a name on the hub"},
        "--dtype": {"help": "default: float32 on a CPU, else bfloat16"},
        "--threads": {"type": int, "help": "torch's threads on a CPU"},
        "--letters": {"action": "store_true", "help": "answers are A, B, C ..., which the question explains"},
        "--sampler": {"choices": ("first_n", "default"), "default": "first_n",
                      "help": "of examples: the same for all questions, as in MMLU, or drawn for each"},
        "--batch-sizes": {"nargs": "+", "type": int, "default": [1, 4, 8, 16], "help": "that `hf` is tried with"},
    }  # fmt: skip
    asked = common.read(
        __doc__, arguments, flags, questions=(48, "questions"), choices=(4, "answers to each"), shots=(5, "examples"),
        seed=(0, "of the stories"), runs=common.RUNS, rival_questions=(0, "for `hf`; 0: all"),
    )  # fmt: skip
    if asked.threads:
        torch.set_num_threads(asked.threads)
    dtype = asked.dtype or ("float32" if asked.device == "cpu" else "bfloat16")
    logging.disable(logging.WARNING)
    theirs = HFLM(pretrained=asked.model, device=asked.device, dtype=dtype, softmax_dtype="float32")
    ours = BatchLM(theirs.model, tokenizer=theirs.tokenizer)
    requests = make_requests(asked)
    part = requests[: asked.choices * (asked.rival_questions or asked.questions)]
    context, answer = (sum(len(ours.tok_encode(each.args[place])) for each in part) / len(part) for place in (0, 1))
    print(f"{type(theirs.model).__name__}, {dtype}, on {asked.device}: {asked.questions:,} questions of about", end=" ")
    print(
        f"{context:,.0f} tokens, {asked.choices} answers of about {answer:.0f} to each, {asked.shots} examples before"
    )
    device = theirs.device

    def answers_of(lm: Any, some: Sequence[Any]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = lm.loglikelihood(list(some), disable_tqdm=True)
        return found

    def speed_of(size: int) -> float:
        theirs.batch_size_per_gpu = size
        return size / timed(device, lambda: answers_of(theirs, part[:size]))[0]

    answers_of(ours, part[: asked.choices])
    seconds, mine = common.median_run("hf-batchllm", asked.runs, device, lambda: answers_of(ours, requests))
    answers_of(theirs, part[:1])
    size, _ = fastest_batch_size("hf", asked.batch_sizes, len(part), speed_of, 1.05)
    theirs.batch_size_per_gpu, name = size, f"hf, batches of {size}"
    their_seconds, others = common.median_run(name, asked.runs, device, lambda: answers_of(theirs, part))
    common.print_pair(("hf-batchllm", asked.questions, seconds), (name, len(part) // asked.choices, their_seconds))
    pairs = list(zip(mine, others, strict=False))
    largest, greedy = max(abs(one[0] - two[0]) for one, two in pairs), sum(one[1] != two[1] for one, two in pairs)
    print(f"log-probabilities of answers differ by {largest:.1e} at most, is_greedy in {greedy} of {len(pairs):,}")
    print(f"\n{ours.generator.last_report}")


if __name__ == "__main__":
    main()
