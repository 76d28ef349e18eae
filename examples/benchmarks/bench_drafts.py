"""What drafts save: seconds for lists of prompts, without and with guessed tokens.

    python examples/benchmarks/bench_drafts.py --config llama-8b
    python examples/benchmarks/bench_drafts.py --config llama-8b --assistant llama-1b --right 0.9

The model has random weights, and what it says is never repeated. So guesses are made here: the first run gives the
answers, and in the second one a guess is the answer itself, in which each token is right with the chance that the table
names. Everything else is as it is for a real text: what is looked at, or what the assistant runs, when tokens are
guessed, what wrong ones cost. `invariant=True` is set in both runs, and the answers of both must be the same.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
import torch
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.models import load_model
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
        return [
            max(8, min(self.most, round(dice.lognormvariate(0, self.tail) * self.new))) for _ in range(self.prompts)
        ]


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="a shape with random weights (default: %(default)s)")
    parser.add_argument("--assistant", help="another shape with random weights, which guesses the tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=list(LISTS), help="some of the lists, by their first words")
    parser.add_argument("--right", type=float, help="the chance of each token, in place of those of the lists")
    parser.add_argument("--times", type=int, default=2, help="calls of which the fastest counts")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lists' prompts, so many are taken")
    asked = parser.parse_args(arguments)
    on_a_cpu = asked.device == "cpu"
    dtype = torch.float32 if on_a_cpu else torch.bfloat16
    model = load_model(None, asked.config, torch.device(asked.device), dtype)
    assistant = None
    if asked.assistant is not None:
        assistant = load_model(None, asked.assistant, torch.device(asked.device), dtype)
    vocabulary = model.config.get_text_config().vocab_size
    by = f"guesses of {asked.assistant}" if assistant is not None else f"up to {GUESSED} tokens at a time"
    print(f"{asked.config}, {str(dtype).removeprefix('torch.')}, {asked.device}, {by}\n")
    print(f"{'':32}{'right':>6}{'without':>10}{'with':>9}{'faster':>8}   {'steps':15}guessed, right, saved (report)")
    for name, texts in LISTS.items():
        if not any(name.startswith(some) for some in asked.only):
            continue
        texts = texts if asked.right is None else replace(texts, right=asked.right)
        dice = random.Random(1)
        lengths = texts.lengths(dice)[: max(1, round(asked.scale * texts.prompts))]
        prompts = [[dice.randrange(1, vocabulary) for _ in range(texts.length)] for _ in lengths]

        def configs(guessed: int | None, texts: Texts = texts, lengths: list[int] = lengths) -> list[GenerationConfig]:
            return [
                GenerationConfig(
                    max_new_tokens=length, do_sample=True, num_return_sequences=texts.samples,
                    prompt_lookup_num_tokens=None if assistant is not None else guessed,
                )
                for length in lengths
            ]  # fmt: skip

        seconds: dict[int | None, float] = {}
        results: dict[int | None, Any] = {}
        for guessed in (None, GUESSED):
            with BatchGenerator(model, invariant=True, keep_prefixes=0) as generator:
                for _ in range(1 + asked.times):
                    own: Any = LOOKED_UP, BY_ASSISTANT
                    if guessed:
                        told = Told(prompts, results[None], texts.right, vocabulary)
                        own = told.guess, told.of_assistant
                    with (
                        mock.patch.object(TextLookup, "guess", lambda *given, guess=own[0]: guess(*given)),
                        mock.patch.object(Assistant, "guess", lambda *given, guess=own[1]: guess(*given)),
                    ):
                        begun = time.perf_counter()
                        results[guessed] = generator.generate(
                            prompts, configs(guessed), seed=7, progress=False,
                            assistant_model=assistant if guessed else None,
                        )  # fmt: skip
                        taken = time.perf_counter() - begun
                    seconds[guessed] = min(taken, seconds.get(guessed, float("inf")))
        without, with_it = seconds[None], seconds[GUESSED]
        same = all(one.token_ids == other.token_ids for one, other in zip(results[None], results[GUESSED], strict=True))
        report, before = results[GUESSED].report, results[None].report
        guessed_and_saved = f"{report.drafted_tokens:,}, {report.accepted_tokens:,}, {report.draft_seconds:.2f} s"
        print(
            f"{name:32}{texts.right:>6.0%}{without:>8.2f} s{with_it:>7.2f} s{without / with_it:>7.2f}x   "
            f"{f'{before.steps:,} -> {report.steps:,}':15}{guessed_and_saved}"
            f"{'' if same else '   OTHER ANSWERS'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
