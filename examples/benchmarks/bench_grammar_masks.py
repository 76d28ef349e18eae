"""How long the host takes for the masks of a step, where each answer follows a grammar.

    python examples/benchmarks/bench_grammar_masks.py                             256 rows, a vocabulary of 151,936
    python examples/benchmarks/bench_grammar_masks.py --tokenizer .models/gemma-3-270m --rows 64

Each row writes JSON of a small object: names, numbers, a list of short texts. The first table line has one schema for
all rows, the second one for each row, the third and the fourth the same with strings of a bounded length. A step takes
the tokens that came, and makes the masks of all rows. The model takes no time, and no GPU is needed. Without a
tokenizer the vocabulary is made up: bytes, and words of syllables with a space before them or none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from typing import Any

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_batchllm.inputs.grammar_options import Grammar, checked_grammar
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling.call_grammars import CallGrammars
from hf_batchllm.sampling.compiled_grammars import grammars_for

_ONSETS = ["b", "br", "c", "ch", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "v", "w"]
_RIMES = ["a", "e", "i", "o", "u", "an", "en", "in", "on", "er", "or", "al", "ed", "ing", "ou", "ea", "ish", "ack"]


def made_up(vocabulary: int) -> PreTrainedTokenizerFast:
    rng = random.Random(0)
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(tokens) < vocabulary - 1:
        word = "".join(rng.choice(_ONSETS) + rng.choice(_RIMES) for _ in range(rng.randint(1, 4)))
        tokens[rng.choice(["", "Ġ", "Ġ"]) + rng.choice([word, word.title()])] = None
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def words(rng: random.Random, most: int) -> str:
    count = rng.randint(1, most)
    return " ".join("".join(rng.choice(_ONSETS) + rng.choice(_RIMES) for _ in range(2)) for _ in range(count))


def schema(row: int | None, bounded: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"} | ({"maxLength": 200} if bounded else {})
    own = {} if row is None else {f"field_{row}": {"type": "integer"}}
    fields = {"name": text, "age": {"type": "integer"}, **own, "notes": {"type": "array", "items": text}}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def answer(row: int | None, rng: random.Random) -> str:
    own = {} if row is None else {f"field_{row}": rng.randint(0, 10**6)}
    notes = [words(rng, 12) for _ in range(rng.randint(1, 6))]
    return json.dumps({"name": words(rng, 3).title(), "age": rng.randint(1, 99), **own, "notes": notes})


def measure(tokenizer: Any, rows: int, steps: int, each: bool, bounded: bool) -> list[str]:
    rng = random.Random(1)
    numbers = [row if each else None for row in range(rows)]
    begun = time.perf_counter()
    grammars: list[Grammar | None] = [checked_grammar("schema", schema(number, bounded)) for number in numbers]
    end = int(tokenizer.eos_token_id)
    compiled = grammars_for(tokenizer, len(tokenizer), "schema", [end])
    assert not any(compiled.problem(grammar) for grammar in dict.fromkeys(grammars) if grammar is not None)
    compiling = time.perf_counter() - begun
    masks = CallGrammars(grammars, compiled).masks([frozenset([end])] * rows, pinned=False)
    prompt = np.array([end], dtype=np.int32)
    requests = [Request(row, prompt, 10**6) for row in range(rows)]
    answers = [compiled._tokenizer.greedy_tokenize(answer(number, rng)) for number in numbers]
    places = [0] * rows
    took: list[float] = []
    for _ in range(steps):
        at = time.perf_counter()
        masks.now(requests)
        took.append(1000 * (time.perf_counter() - at))
        for row, request in enumerate(requests):
            if places[row] < len(answers[row]):
                request.generated.append(answers[row][places[row]])
                places[row] += 1
            else:  # another one takes its place, as in a call with more prompts than rows
                requests[row], places[row] = Request(row, prompt, 10**6), 0
    ordered = sorted(took)
    tail = ordered[int(len(ordered) * 0.95)]
    what = f"{'one for each' if each else 'one for all'}{', bounded' if bounded else ''}"
    figures = [statistics.median(took), statistics.mean(took), tail, ordered[-1]]
    return [what, *(f"{figure:.2f}" for figure in figures), f"{1000 * compiling:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a folder, or a name; by default the vocabulary is made up")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=150)
    asked = parser.parse_args()
    made = made_up(asked.vocabulary) if asked.tokenizer is None else AutoTokenizer.from_pretrained(asked.tokenizer)
    begun = time.perf_counter()
    grammars_for(made, len(made), "schema", [int(made.eos_token_id)])
    seconds = time.perf_counter() - begun
    cores = os.cpu_count()
    print(f"{asked.rows} rows, {len(made):,} tokens, {cores} cores; the tokenizer was prepared in {seconds:.1f} s")
    print("| schemas | median ms | mean | 95 % | most | compiled in ms |\n|---|---|---|---|---|---|")
    for bounded in (False, True):
        for each in (False, True):
            print(f"| {' | '.join(measure(made, asked.rows, asked.steps, each, bounded))} |", flush=True)


if __name__ == "__main__":
    main()
