"""Whether `invariant=True` keeps its promise on this machine: random lists, compared to the last bit.

    python examples/benchmarks/check_invariant.py --config llama-8b --cases 300
    python examples/benchmarks/check_invariant.py --config llama-8b --cases 60 --without

Some prompts of each list are answered alone. Then the list is run in other ways: in another order and beside other
prompts, with shared prefixes and without, in smaller steps, with little memory, with kept prefixes, with and without
CUDA graphs, with guessed tokens of which some are right. A case is one prompt in one way. It differs where a token, a
score or a log-probability has another bit. `--without` leaves the flag out: then cases should differ. Otherwise the
exit status is 1 if one does.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import common

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.bench.workload import words_of
from hf_batchllm.engine.cost import StepSeconds
from hf_batchllm.engine.device_loop.steps_as_graphs import StepsAsGraphs
from hf_batchllm.engine.drafts import drafts_ahead
from hf_batchllm.sampling.text_lookup import TextLookup

PROMPTS, STRANGERS, ALONE, WAYS = 14, 10, 4, 4  # of a list
GUESSED = "guessed tokens"
Prompt = list[int]


def draw_prompts(dice: random.Random, longest: int, vocabulary: int) -> list[Prompt]:
    """Half of them begin as an earlier one does."""
    prompts: list[Prompt] = []
    for _ in range(PROMPTS + STRANGERS):
        start: Prompt = []
        if prompts and dice.random() < 0.6:
            earlier = dice.choice(prompts)
            start = earlier[: dice.randint(0, len(earlier))]
        more = int(longest ** dice.random())
        prompts.append((start + [dice.randrange(vocabulary) for _ in range(more)])[:longest])
    return prompts


def draw_options(dice: random.Random, new_tokens: int, vocabulary: int) -> dict[str, Any]:
    sampled = {"do_sample": True, "temperature": dice.choice((0.7, 1.0, 1.5)), "top_p": dice.choice((0.9, 1.0))}
    options: dict[str, Any] = dict(sampled) if dice.random() < 0.6 else {"do_sample": False}
    if options["do_sample"] and dice.random() < 0.4:
        options["num_return_sequences"] = dice.choice((2, 3))
    if dice.random() < 0.3:
        options["repetition_penalty"] = 1.2
    if dice.random() < 0.5:
        options["prompt_logprobs"] = 0
    if dice.random() < 0.6:  # answers of all lengths: what is expected of them is wrong, and some have to make room
        options["eos_token_id"] = list(range(3, vocabulary, 2 * new_tokens))
    options |= {"max_new_tokens": dice.randint(2, new_tokens), "logprobs": dice.choice((0, 3))}
    return {**options, "progress": False}


def draw_way(dice: random.Random, longest: int, token_bytes: int) -> dict[str, Any]:
    every: dict[str, Any] = {
        "share_prefixes": False,
        "max_batch_tokens": dice.choice((48, 200, 1000)),
        "kv_memory": dice.choice((1, 2, 4)) * longest * token_bytes,
        "keep_prefixes": 8,
        "steps_per_sync": dice.choice((1, 3, 32)),
        "cuda_graphs": False,
        "scheduler": "fifo",
        "min_shared_tokens": dice.choice((1, 300)),
        GUESSED: dice.choice((2, 5, 10)),
    }
    return {name: value for name, value in every.items() if dice.random() < 0.3}


@contextmanager
def guesses(known: dict[tuple[tuple[int, ...], int], list[int]], dice: random.Random) -> Iterator[None]:
    """Wherever tokens can be guessed they are, as soon as may be, whether that pays or not."""

    def guess(lookup: TextLookup, sample: int, generated: Sequence[int], most: int) -> list[int]:
        rest = known.get((tuple(lookup._prompt), sample), [])[len(generated) :]
        return [token if dice.random() < 0.8 else 1 for token in rest[: dice.randint(0, most)]]

    always = {"_MARGIN": 0.0, "_BURSTS": 1, "_TRIED": 10**9, "_BURSTS_FOR_GRAPHS": 0}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(TextLookup, "guess", guess))
        patches.enter_context(mock.patch.object(StepSeconds, "of", return_value=1.0))
        patches.enter_context(mock.patch.object(StepsAsGraphs, "is_steady", True))
        patches.enter_context(mock.patch.multiple(drafts_ahead, **always))
        yield


def told(result: BatchResult, place: int) -> list[str]:
    """All that a call says of a prompt, to the last bit."""
    rows = [row for row in result if row.index == place]
    return [repr((row.token_ids, row.score, row.logprobs, row.prompt_logprobs)) for row in rows]


def check_list(dice: random.Random, model: Any, longest: int, new_tokens: int, invariant: bool) -> Counter[str]:
    """The ways of a list: how many cases of each kind there were, and how many of these differ."""
    vocabulary = words_of(model)
    prompts = draw_prompts(dice, longest, vocabulary)
    seeds = [dice.randrange(2**40) for _ in prompts]
    options = draw_options(dice, new_tokens, vocabulary)
    counted: Counter[str] = Counter()
    with BatchGenerator(model, invariant=invariant) as generator:
        token_bytes = generator.architecture.kv_bytes_per_token
        some = dice.sample(range(PROMPTS), ALONE)
        alone = {at: told(generator.generate([prompts[at]], **options, seed=[seeds[at]]), 0) for at in some}
        every = generator.generate(prompts, **options, seed=seeds)
    known = {(tuple(prompts[row.index]), row.sample): row.token_ids for row in every}
    for _ in range(WAYS):
        way = draw_way(dice, longest + new_tokens + 192, token_bytes)  # 192: a page of its own for each end
        if GUESSED in way:
            way["steps_per_sync"] = dice.choice((1, 3))  # they begin after so many tokens
        config = {name: value for name, value in way.items() if name != GUESSED}
        guessed = {"prompt_lookup_num_tokens": way[GUESSED]} if GUESSED in way else {}
        order: Sequence[int] = dice.sample(range(len(prompts)), dice.randint(PROMPTS, len(prompts)))
        order = [*order, *(at for at in some if at not in order)]
        asked = [prompts[at] for at in order]
        with BatchGenerator(model, invariant=invariant, **config) as generator, guesses(known, dice):
            for _ in range(2 if "keep_prefixes" in way else 1):
                result = generator.generate(asked, **options, **guessed, seed=[seeds[at] for at in order])
        preempted = ["preempted"] if result.report.preemptions else []
        right = ["right guesses"] if result.report.accepted_tokens else []
        for name in [*way, *preempted, *right, "all"]:
            counted[name] += len(some)
            counted[f"{name} differ"] += sum(told(result, order.index(at)) != alone[at] for at in some)
    return counted


def main(arguments: list[str] | None = None) -> int:
    flags = {"--without": {"action": "store_true", "help": "without the flag, where cases should differ"}}
    asked = common.read(
        __doc__, arguments, flags, model="bfloat16", cases=(64, "at least so many"),
        longest=(1500, "tokens of a prompt"), seed=(0, "of all"), new=(40, "tokens of an answer, at most"),
        seconds=(10**9, "at most so many"),
    )  # fmt: skip
    model = common.model_of(asked)
    counted: Counter[str] = Counter()
    began, number = time.monotonic(), 0
    while counted["all"] < asked.cases and time.monotonic() - began < asked.seconds:
        dice = random.Random(f"{asked.seed}:{number}")
        counted += check_list(dice, model, asked.longest, asked.new, not asked.without)
        number += 1
    flag = "without invariant=True" if asked.without else "invariant=True"
    print(f"{flag}: {time.monotonic() - began:.0f} s\n")
    table = common.Table({"lists with": "<24", "cases": "8,", "differ": "8,"})
    for name in sorted(name for name in counted if not name.endswith(" differ")):
        table.add({"lists with": name, "cases": counted[name], "differ": counted[f"{name} differ"]})
    return int(counted["all differ"] > 0 and not asked.without)


if __name__ == "__main__":
    sys.exit(main())
