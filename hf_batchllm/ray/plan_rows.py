"""Rows of a dataset -> blocks: prompts that begin alike stand in one block, and all blocks cost about the same.

No model, no tokenizer and no Ray. Text is compared by its bytes: four of them stand for a token, which has about as
many.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config import BatchConfig
from ..inputs.prompts import Prompt
from ..planning.pieces import split_plan
from ..planning.sharing import make_plan

_TOKEN = 4  # bytes
_FEWEST_ROWS = 1024  # of a block: what a GPU runs side by side, several times
_MOST_ROWS = 16_384  # a block is what is lost with an actor, and what a run that goes on begins anew
_BLOCKS_PER_WORKER = 16


def words_of(prompt: Any) -> np.ndarray:  # int32 [tokens, about]
    """What stands for the tokens of a prompt. Two prompts that begin alike have the first ones in common."""
    if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
        return np.asarray(prompt, np.int64).astype(np.int32)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    written = text.encode("utf-8", "surrogatepass") or b" "
    return np.frombuffer(written.ljust(-(-len(written) // _TOKEN) * _TOKEN, b"\0"), np.int32)


def how_many_blocks(rows: int, workers: int) -> int:
    """Each worker gets one at least, and some more where each is large enough to fill a GPU."""
    wanted = min(_BLOCKS_PER_WORKER * workers, rows // _FEWEST_ROWS)
    return max(1, min(rows, max(wanted, workers, -(-rows // _MOST_ROWS))))


def blocks_of_rows(
    words: Sequence[np.ndarray], *, new_tokens: int, samples: int, blocks: int, config: BatchConfig
) -> list[np.ndarray]:
    """The rows of each block, in their order; the block that is expected to take longest comes first.

    ``new_tokens``: of a sample. A block is made of whole pieces of the plan: a group that shares a prefix is parted
    only if it alone is more than a block.
    """
    prompts = [Prompt(each) for each in words]
    answers = [new_tokens * samples] * len(prompts)
    plan = make_plan(prompts, config, answers)
    split = split_plan(plan, answers, blocks, samples=[samples] * len(prompts))
    largest_first = sorted(range(blocks), key=lambda block: -split.costs[block])
    rows = ([row for piece in split.shares[block] for row in split.pieces[piece].prompts] for block in largest_first)
    return [np.sort(np.asarray(each, np.int64)) for each in rows if each]
