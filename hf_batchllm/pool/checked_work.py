"""What the user passes to ``generate`` or ``score`` -> the work of several processes, checked by one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..config import BatchConfig
from ..engine.scoring.score_call import ScoreJob
from ..inputs.as_passed import as_passed
from ..inputs.padded_batch import take_padded
from ..inputs.prompts import Prompt, as_list
from ..inputs.token_ids import with_arrays
from .work import GenerateWork, ScoreWork


def checked_work(
    ask: Callable[..., Any],  # PartGenerator.checked_job of the process that checks
    prompts: Any,
    config: Any,
    seed: Any,
    on_error: str,
    options: dict[str, Any],
    names: Sequence[str] | None,  # of the prompts, in warnings
    batch_config: BatchConfig,
) -> GenerateWork:
    if take_padded(prompts, options) is not None:
        raise ValueError("several processes take a list of prompts: pass a tensor's rows as a list, without padding")
    passed = listed(as_list(prompts))
    arrays = with_arrays(passed)
    job, keys = ask(arrays, config, seed, on_error, options, names)
    good = zip(job.places, job.prompts, strict=True)
    job = replace(job, prompts=[prompt if len(prompt) else Prompt(arrays[place]) for place, prompt in good])
    keyed = [prompt.with_key(key) for prompt, key in zip(job.prompts, keys, strict=True)]
    if job.seed is not None and seed is None:  # of this process's random numbers, as one process would
        job = replace(job, seed=int(torch.randint(2**63 - 1, (), device="cpu").item()))
    return GenerateWork(job, keyed, as_passed(passed), batch_config)


def checked_score_work(
    ask: Callable[..., tuple[ScoreJob, list[Prompt]]],  # PartGenerator.checked_scores of the process that checks
    contexts: Any,
    continuations: Any,
    choices: Any,
    on_error: str,
    adapter: Any,
    chat_options: dict[str, Any],
    batch_config: BatchConfig,
) -> ScoreWork:
    lists = (listed(each) if isinstance(each, Iterator) else each for each in (contexts, continuations, choices))
    job, keyed = ask((*lists, on_error, adapter, chat_options))
    return ScoreWork(job, keyed, batch_config)


def listed(prompts: Any) -> list[Any] | tuple[Any, ...]:
    """As what can be sent: a generator cannot."""
    return prompts if isinstance(prompts, list | tuple) else list(prompts)
