"""A case is run and held against ``generate`` and against itself; one that fails is made smaller."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import support_fuzz_models as models
import torch
from support_fingerprint import fingerprint
from support_fuzz_bench import Bench
from support_fuzz_calls import Calls, Mismatch, expect, running_as
from support_fuzz_cases import Ask, Case
from support_fuzz_oracle import Oracle, as_on_a_cpu
from support_fuzz_relations import RELATIONS

_ROWS_ASKED = 2  # prompts of a case that ``generate`` is asked for, as a rule
_SAMPLES_ASKED = 3  # and about so many rows


@dataclass
class Outcome:
    """``ties``: rows in which rounding decides. ``raised``: both ``generate`` and the library refused."""

    ties: int = 0
    rows: int = 0
    raised: bool = False
    error: str = ""


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers and the library say of options: they are drawn at random."""
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("transformers").setLevel(level)


def check(case: Case) -> Outcome:
    """What became of it; any exception is an ``error``, with where it came from."""
    try:
        with quiet(), running_as(case):
            return _checked(case)
    except Mismatch as error:
        return Outcome(error=str(error))
    except Exception as error:
        places = traceback.extract_tb(error.__traceback__)
        where = "\n".join(f"      {place.filename}:{place.lineno} {place.name}" for place in places[-4:])
        return Outcome(error=f"{type(error).__name__}: {error}\n{where}")


def _checked(case: Case) -> Outcome:
    dice = Random(case.name)
    calls, oracle = Calls(case), Oracle(case)
    before = _state(case, calls.model)
    try:
        base = calls.rows(case.asks)
    except Mismatch:
        raise
    except Exception as error:
        if oracle.raises(case.asks):
            return Outcome(raised=True)
        raise Mismatch(
            f"generate gives results here, and the library raised {type(error).__name__}: {error}"
        ) from error
    places = list(range(len(case.asks)))
    asked = places if case.every_row else dice.sample(places, min(_ROWS_ASKED, len(places)))
    ties = seen = 0
    for index in asked:
        if seen < _SAMPLES_ASKED or case.every_row:
            ties += _against_generate(oracle, index, case.asks[index], base[index])
            seen += len(base[index])
    bench = Bench(case, calls, oracle, dice, base)
    RELATIONS[case.relation](bench)
    expect(_state(case, calls.model) == before, "the model is not what it was")
    return Outcome(ties + bench.ties, sum(map(len, base)))


def _state(case: Case, model: Any) -> Any:
    """Where layers are fused, weights are merged for a while, and lie elsewhere afterwards."""
    modules, tensors, *others = fingerprint(model)
    if case.device_loop or case.device != "cpu":
        tensors = {name: (identity, *more) for name, (identity, _, *more) in tensors.items()}
    return modules, tensors, others


def _against_generate(oracle: Oracle, index: int, ask: Ask, rows: Any) -> int:
    try:
        return oracle.check(index, ask, rows)
    except Exception as error:
        raise Mismatch(f"prompt {index}, beside generate: {type(error).__name__}: {error}") from error


def smaller(case: Case, seconds: float = 20.0) -> Case:
    """The same failure, as far as can be seen, with fewer prompts, options and settings."""
    end, tried = time.monotonic() + seconds, True
    while tried and time.monotonic() < end:
        tried = False
        for candidate in _smaller_by_one(case):
            if time.monotonic() > end:
                break
            if check(candidate).error:
                case, tried = candidate, True
                break
    return case


def _smaller_by_one(case: Case) -> Iterator[Case]:
    asks, count = case.asks, len(case.asks)
    if count > 3:
        yield replace(case, asks=asks[: count // 2])
        yield replace(case, asks=asks[count // 2 :])
    if count > 1:
        for at in range(count):
            yield replace(case, asks=asks[:at] + asks[at + 1 :])
    for name in case.options:
        yield replace(case, options={other: value for other, value in case.options.items() if other != name})
    for name in case.config:
        yield replace(case, config={other: value for other, value in case.config.items() if other != name})
    if case.device_loop:
        yield replace(case, device_loop=False)
    for at, ask in enumerate(asks):
        for name in ask.own or {}:
            own = {other: value for other, value in (ask.own or {}).items() if other != name}
            yield replace(case, asks=[*asks[:at], replace(ask, own=own), *asks[at + 1 :]])
        for ids in (ask.ids[: len(ask.ids) // 2], ask.ids[len(ask.ids) // 2 :], ask.ids[:-1]):
            if ids and len(ids) < len(ask.ids):
                yield replace(case, asks=[*asks[:at], replace(ask, ids=ids), *asks[at + 1 :]])
    for name in ("max_new_tokens", "num_beams", "num_return_sequences"):
        if case.options.get(name, 1) > 1:
            yield replace(case, options={**case.options, name: case.options[name] - 1})


def exact_on(device: str) -> None:
    """float32 is computed as such."""
    if device != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        if not models.HALVED:  # functions of a user's are refused there
            torch.multinomial = as_on_a_cpu(torch.multinomial)
