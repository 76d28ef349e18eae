"""How fast the evaluation harness is with ``hf-batchllm``, beside its own ``hf`` model.

python -m hf_batchllm.bench.harness --help
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

_DESCRIPTION = """\
A multiple-choice task of the evaluation harness: small stories, each with a question and answers to choose from. Its
requests are made once, by the harness, and go to `loglikelihood` of both models, in one process and with the same
weights: what is timed is encoding, the model and the numbers. `hf` runs at the best of its batch sizes, found with the
first questions.
"""
_SLOWER = 1.05  # by so much a batch size must be slower than the best before larger ones are not tried
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
    """A record of the task."""
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


def requests_of(asked: argparse.Namespace) -> list[Any]:
    """As the harness makes them."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    dice = random.Random(asked.seed)
    shots, questions = (
        [story(dice, asked.choices, asked.letters) for _ in range(count)] for count in (asked.shots, asked.questions)
    )
    if asked.sampler == "default":  # for each question its own examples, out of many
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


def timed(lm: Any, requests: Sequence[Any]) -> tuple[float, list[tuple[float, bool]]]:
    _settle(lm)
    began = time.perf_counter()
    found = lm.loglikelihood(list(requests), disable_tqdm=True)
    _settle(lm)
    return time.perf_counter() - began, found


def _settle(lm: Any) -> None:
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)


def best_batch_size(lm: Any, requests: Sequence[Any], sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The one at which ``hf`` is fastest, from one batch of each; and the requests a second of those tried."""
    speeds: dict[int, float] = {}
    for size in sorted({min(size, len(requests)) for size in sizes}):
        lm.batch_size_per_gpu = size
        try:
            seconds, _ = timed(lm, requests[:size])
        except Exception as error:  # mostly for want of memory, of which larger ones need more
            if not speeds:
                raise
            print(f"hf, batches of {size}: {type(error).__name__}")
            break
        speeds[size] = size / seconds
        if speeds[size] * _SLOWER < max(speeds.values()):
            break
    return max(speeds, key=speeds.__getitem__), speeds


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    from lm_eval.models.huggingface import HFLM

    from ..lm_eval.model import BatchLM

    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = asked.dtype or ("float32" if device == "cpu" else "bfloat16")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    given = {"device": device, "dtype": dtype, "softmax_dtype": "float32"}
    theirs = HFLM(pretrained=asked.model, **given)
    ours = BatchLM(theirs.model, tokenizer=theirs.tokenizer)

    requests = requests_of(asked)
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
    timed(ours, few)
    mine, my_answers = _measured("hf-batchllm", ours, requests, asked.runs)
    timed(theirs, few[:1])
    size, speeds = best_batch_size(theirs, part, asked.batch_sizes)
    theirs.batch_size_per_gpu = size
    name = f"hf, batches of {size}"
    other, their_answers = _measured(name, theirs, part, asked.rival_runs or asked.runs)

    print(f"\n{'':<24}{'questions':>10}{'seconds':>10}{'questions/s':>13}{'ours is':>10}")
    fast, slow = len(requests) / mine, len(part) / other
    print(f"{'hf-batchllm':<24}{asked.questions:>10,}{mine:>10.2f}{fast / asked.choices:>13.2f}")
    print(
        f"{name:<24}{len(part) // asked.choices:>10,}{other:>10.2f}{slow / asked.choices:>13.2f}{fast / slow:>8.2f} x"
    )
    pairs = list(zip(my_answers, their_answers, strict=False))
    apart = max(abs(one[0] - two[0]) for one, two in pairs)
    greedy = sum(one[1] != two[1] for one, two in pairs)
    print(
        f"\nlog-probabilities of answers differ by {apart:.1e} at most; is_greedy differs in {greedy} of {len(pairs):,}"
    )
    print(f"hf, requests/s by batch size: {', '.join(f'{each}: {speed:.2f}' for each, speed in speeds.items())}")
    print(f"\n{ours.generator.last_report}")
    return 0


def _measured(name: str, lm: Any, requests: Sequence[Any], runs: int) -> tuple[float, list[tuple[float, bool]]]:
    print(f"{name} ...", end=" ", flush=True)
    took: list[float] = []
    found: list[tuple[float, bool]] = []
    for _ in range(runs):
        seconds, found = timed(lm, requests)
        took.append(seconds)
        print(f"{seconds:.2f} s", end=" ", flush=True)
    print(flush=True)
    return statistics.median(took), found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_batchllm.bench.harness",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a folder or a name on the hub")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--questions", type=int, default=48, metavar="N", help="default: %(default)s")
    parser.add_argument("--choices", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--shots", type=int, default=5, metavar="N", help="examples (default: %(default)s)")
    parser.add_argument("--letters", action="store_true", help="the answers are A, B, C ..., and are listed before")
    parser.add_argument(
        "--sampler",
        choices=("first_n", "default"),
        default="first_n",
        help="of examples: the same for all questions, as of MMLU; or drawn for each (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--rival-runs", type=int, metavar="N", help="fewer runs of hf")
    parser.add_argument("--rival-questions", type=int, metavar="N", help="give hf only the first so many")
    parser.add_argument(
        "--batch-sizes",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[1, 4, 8, 16],
        metavar="N,N,...",
        help="those that hf is tried with (default: 1,4,8,16)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
