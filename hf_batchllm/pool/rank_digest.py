"""A digest of what a rank is asked for: ranks that are asked for something else must not run a call together."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .work import ScoreWork, Work


def digest_of(work: Work, seed_given: bool, everywhere: bool) -> str:
    """Objects of the user's, such as processors, count by their classes."""
    job = work.job
    ways = list(dict.fromkeys(job.options))  # each for many prompts
    number = {id(each): place for place, each in enumerate(ways)}
    said = [
        type(work).__name__,
        everywhere,
        job.places,
        job.max_new_tokens,
        job.can_stop,
        sorted(map(str, job.problems)),
        job.adapters,
        None if job.grammars is None else job.grammars.each,
        job.seed if seed_given else None,
        [number[id(each)] for each in job.options],
        [[each.config.to_dict(), {**vars(each.arguments), "tokenizer": None}] for each in ways],
    ]
    digest = hashlib.blake2b(repr(_plain(said)).encode("utf-8", "surrogatepass"), digest_size=12)
    if isinstance(work, ScoreWork):
        for item in work.scores.inputs.items:
            digest.update(repr((item.index, item.choice, item.first)).encode() + item.ids.tobytes())
    for prompt in job.prompts:
        digest.update(len(prompt).to_bytes(4, "little") + prompt.ids.tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """As what has the same repr in each process."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return sorted((repr(_plain(key)), _plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_plain(each)) for each in value)
    if isinstance(value, torch.Tensor):
        return _plain(value.detach().cpu().tolist())
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, _plain(vars(value))]
    return type(value).__name__
