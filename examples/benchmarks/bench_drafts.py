"""What drafts save: seconds for lists of prompts, without and with guessed tokens.

    python examples/benchmarks/bench_drafts.py --config llama-8b
    python examples/benchmarks/bench_drafts.py --config llama-8b --assistant llama-1b --right 0.9

The model has random weights, and what it says is never repeated. So guesses are made here: the first run gives the
answers, and in the second one a guess is the answer itself, in which each token is right with the chance that the table
names. Everything else is as it is for a real text: what is looked at, or what the assistant runs, when tokens are
guessed, what wrong ones cost. `invariant=True` is set in both runs, and the answers of both must be the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import common
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.floor import timed
from hf_batchllm.bench.workload import load_model, words_of
from hf_batchllm.engine.drafts.assistant import Assistant
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling.text_lookup import TextLookup

GUESSED = 10  # tokens at a time
LOOKED_UP, BY_ASSISTANT = TextLookup.guess, Assistant.guess


@dataclass(frozen=True)
class Texts:
    """prompts: how many. length: tokens of each. new: of the answers, in the middle. tail: how far lengths spread."""

    prompts: int
    length: int
    new: int
    tail: float
    most: int
    right: float
    samples: int = 1

    def lengths(self, dice: random.Random) -> list[int]:
        drawn = (round(dice.lognormvariate(0, self.tail) * self.new) for _ in range(self.prompts))
        return [max(8, min(self.most, length)) for length in drawn]


LISTS = {
    "chat-like with long tails": Texts(256, 150, 150, 1.0, 2000, 0.6),
    "copies from documents": Texts(24, 1500, 400, 0.2, 800, 0.95),
    "a second epoch of samples": Texts(64, 200, 300, 0.8, 2000, 0.85, samples=4),
    "a full batch, no guess right": Texts(256, 128, 256, 0.0, 256, 0.0),
}


class Told:
    """Guesses at answers that are known."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Any, right: float, vocabulary: int) -> None:
        dice = random.Random(5)
        self.known = {
            (tuple(prompts[each.index]), each.sample): [
                token if dice.random() < right else (token + 1) % vocabulary for token in each.token_ids
            ]
            for each in answers
        }

    def guess(self, lookup: TextLookup, sample: int, generated: Sequence[int], most: int) -> list[int]:
        LOOKED_UP(lookup, sample, generated, most)  # which takes its time
        key = tuple(lookup._prompt) if not hasattr(lookup, "key") else lookup.key
        lookup.key = key  # type: ignore[attr-defined]
        return self.known[key, sample][len(generated) : len(generated) + most]

    def of_assistant(self, assistant: Assistant, requests: Sequence[Request], tokens: int) -> dict[Request, list[int]]:
        guesses = BY_ASSISTANT(assistant, requests, tokens)  # which takes its time
        for request in guesses:
            answer = self.known[tuple(request.prompt_ids.tolist()), request.sample]
            made = len(request.generated)
            guesses[request] = assistant._shadows[request].generated[made:] = answer[made : made + tokens]
        return guesses

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with (
            mock.patch.object(TextLookup, "guess", lambda *given: self.guess(*given)),
            mock.patch.object(Assistant, "guess", lambda *given: self.of_assistant(*given)),
        ):
            yield


def main(arguments: list[str] | None = None) -> None:
    flags: common.Flags = {
        "--assistant": {"help": "another shape with random weights, which guesses the tokens"},
        "--only": {"nargs": "*", "default": list(LISTS), "help": "some of the lists, by their first words"},
        "--right": {"type": float, "help": "the chance of each token, in place of those of the lists"},
        "--scale": {"type": float, "default": 1.0, "help": "of the lists' prompts, so many are taken"},
    }
    asked = common.read(__doc__, arguments, flags, model="", times=(2, "calls of which the fastest counts"))
    model = common.model_of(asked)
    assistant = load_model(None, asked.assistant, model.device, model.dtype) if asked.assistant else None
    print(f"guesses of {asked.assistant}\n" if assistant is not None else f"up to {GUESSED} tokens at a time\n")
    columns = {"": "<30", "right": "6.0%", "without, s": "10.2f", "with, s": "8.2f", "faster": "6.2f", "steps": "7,"}
    columns |= {"with guesses": "12,", "guessed": "9,", "were right": "10,"}
    table = common.Table({**columns, "saved (report), s": "17.2f", "answers": "<8"})
    for name, texts in LISTS.items():
        if not name.startswith(tuple(asked.only)):
            continue
        texts = texts if asked.right is None else replace(texts, right=asked.right)
        dice = random.Random(1)
        lengths = texts.lengths(dice)[: max(1, round(asked.scale * texts.prompts))]
        prompts = [[dice.randrange(1, words_of(model)) for _ in range(texts.length)] for _ in lengths]
        seconds: dict[bool, float] = {}
        results: dict[bool, Any] = {}
        for guessing in (False, True):
            looked_up = GUESSED if guessing and assistant is None else None
            configs = [
                GenerationConfig(max_new_tokens=length, do_sample=True, num_return_sequences=texts.samples,
                                 prompt_lookup_num_tokens=looked_up)
                for length in lengths
            ]  # fmt: skip
            given = {"seed": 7, "progress": False, "assistant_model": assistant if guessing else None}
            with BatchGenerator(model, invariant=True, keep_prefixes=0) as generator:
                run = partial(generator.generate, prompts, configs, **given)
                for _ in range(1 + asked.times):
                    told = Told(prompts, results[False], texts.right, words_of(model)) if guessing else None
                    with told.in_place() if told else nullcontext():
                        taken, results[guessing] = timed(model.device, run, free=False)
                    seconds[guessing] = min(taken, seconds.get(guessing, float("inf")))
        report, pairs = results[True].report, zip(results[False], results[True], strict=True)
        same = all(one.token_ids == other.token_ids for one, other in pairs)
        values = {"": name, "right": texts.right, "without, s": seconds[False], "with, s": seconds[True]}
        values |= {"faster": seconds[False] / seconds[True], "steps": results[False].report.steps}
        values |= {"with guesses": report.steps, "guessed": report.drafted_tokens, "were right": report.accepted_tokens}
        table.add({**values, "saved (report), s": report.draft_seconds, "answers": "the same" if same else "OTHERS"})


if __name__ == "__main__":
    main()
