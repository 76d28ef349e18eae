"""How long the host takes for the masks of a step, where each answer follows a grammar.

    python examples/benchmarks/bench_grammar_masks.py                             256 rows, a vocabulary of 151,936
    python examples/benchmarks/bench_grammar_masks.py --tokenizer .models/gemma-3-270m --rows 64

Each row writes JSON of a small object: names, numbers, a list of short texts. The first table line has one schema for
all rows, the second one for each row, the third and the fourth the same with strings of a bounded length. A step takes
the tokens that came, and makes the masks of all rows. The model takes no time, and no GPU is needed. Without a
tokenizer the vocabulary is made up: bytes, and words of syllables with a space before them or none.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import common
import numpy as np
from transformers import AutoTokenizer

from hf_batchllm.inputs.grammar_options import Grammar, checked_grammar
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling.call_grammars import CallGrammars
from hf_batchllm.sampling.compiled_grammars import grammars_for


def words(rng: random.Random, most: int) -> str:
    count = rng.randint(1, most)
    return " ".join(
        "".join(rng.choice(common.ONSETS) + rng.choice(common.RIMES) for _ in range(2)) for _ in range(count)
    )


def answer(row: int | None, rng: random.Random) -> str:
    own = {} if row is None else {f"field_{row}": rng.randint(0, 10**6)}
    notes = [words(rng, 12) for _ in range(rng.randint(1, 6))]
    return json.dumps({"name": words(rng, 3).title(), "age": rng.randint(1, 99), **own, "notes": notes})


def measure(tokenizer: Any, rows: int, steps: int, each: bool, bounded: bool) -> dict[str, Any]:
    rng = random.Random(1)
    numbers = [row if each else None for row in range(rows)]
    begun = time.perf_counter()
    grammars: list[Grammar | None] = [checked_grammar("schema", common.schema(number, bounded)) for number in numbers]
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
    took.sort()
    what = f"{'one for each' if each else 'one for all'}{', bounded' if bounded else ''}"
    figures = {"median": statistics.median(took), "mean": statistics.mean(took), "95 %": took[int(0.95 * len(took))]}
    return {"schemas": what, **figures, "most": took[-1], "compiled": 1000 * compiling}


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {"--tokenizer": {"help": "a folder, or a name; by default the vocabulary is made up"}}
    numbers = {"vocabulary": (151_936, "tokens"), "rows": (256, "of a step"), "steps": (150, "that are timed")}
    asked = common.read(__doc__, arguments, flags, on="host", **numbers)
    made: Any = common.made_up_tokenizer(asked.vocabulary)
    if asked.tokenizer is not None:
        made = AutoTokenizer.from_pretrained(asked.tokenizer)
    begun = time.perf_counter()
    grammars_for(made, len(made), "schema", [int(made.eos_token_id)])
    print(f"{asked.rows} rows, {len(made):,} tokens, {os.cpu_count()} cores; the tokenizer was prepared in", end=" ")
    print(f"{time.perf_counter() - begun:.1f} s; milliseconds:")
    table = common.Table({"schemas": "<24", **dict.fromkeys(("median", "mean", "95 %", "most", "compiled"), "9.2f")})
    for bounded, each in ((False, False), (False, True), (True, False), (True, True)):
        table.add(measure(made, asked.rows, asked.steps, each, bounded))


if __name__ == "__main__":
    main()
