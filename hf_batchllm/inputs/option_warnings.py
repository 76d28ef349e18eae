"""Options that were set in a call and have no effect there: each is named in a warning."""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from ..notices import Notices
from .option_row import Fate
from .option_table import TABLE, names

_FOR_SAMPLING = [row.name for row in TABLE.values() if row.sampling_only]
_SPECULATION = sorted(names(fate=Fate.NO_EFFECT, chapter="Speculation"))
_PROBABILITIES = ("top_p", "typical_p", "epsilon_cutoff", "eta_cutoff")  # transformers ignores values above 1
_FOR_BEAMS = ("early_stopping", "length_penalty")
_EXTRA_OUTPUTS = ("output_scores", "output_logits")
_GREEDY = "no effect on greedy decoding: set `do_sample=True` to sample"  # 0 is the name for that in other libraries
_WARNED_OF = frozenset((*_FOR_SAMPLING, *_FOR_BEAMS, *_EXTRA_OUTPUTS))  # transformers warns of these, too
_LOGGER = "transformers.generation.configuration_utils"
_BEGINS = "The following generation flags are not valid and may be ignored: "


def warn_of_options(
    config: GenerationConfig, asked: Mapping[str, Any], was_asked: Callable[[str], bool], notices: Notices
) -> None:
    """Warn of options that were set in this call and have no effect.

    A later call may set others, which have a warning of their own.

    ``asked``: the keyword arguments; ``was_asked`` says whether an option was set by one, or in the call's config.
    """
    for applies, options, why in (
        (config.do_sample, _FOR_SAMPLING, _GREEDY),
        (False, _SPECULATION, "no effect: speculation changes the speed of `generate`, never its results"),
        (
            config.return_dict_in_generate,
            _EXTRA_OUTPUTS,
            "no effect without `return_dict_in_generate=True`, as in `generate`",
        ),
        ((config.num_beams or 1) > 1, _FOR_BEAMS, "no effect without beams: set `num_beams` to more than 1"),
    ):
        asking = (name for name in options if TABLE[name].asks(getattr(config, name, asked.get(name))))
        idle = [name for name in asking if was_asked(name) and not (name == "temperature" and config.temperature == 0)]
        if idle and not applies:
            notices(f"{why}: {idle}", f"{_have(idle)} {why}")
    for name in _PROBABILITIES:
        value = getattr(config, name)
        if config.do_sample and value is not None and was_asked(name) and not 0 <= value <= 1:
            notices(f"{name}: {value}", f"`{name}` is {value}, and has no effect: it is a probability, from 0 to 1")
    if config.cache_implementation == "quantized":
        notices(
            "quantized",
            'cache_implementation="quantized" has no effect: keys and values stay in the model\'s dtype, so results '
            "are those of a cache that is not quantised",
        )
    if config.max_new_tokens is not None:
        if asked.get("max_length") is not None:
            notices("max_length", "`max_length` has no effect beside `max_new_tokens`: leave one of them out")
        if config.min_new_tokens is not None and config.min_new_tokens > config.max_new_tokens:
            notices(
                "min_new_tokens",
                f"`min_new_tokens` ({config.min_new_tokens:,}) is more than `max_new_tokens` "
                f"({config.max_new_tokens:,}): every sequence stops at the latter",
            )


def warn_of_greedy(
    asked: Mapping[str, Any],
    seed: Any,
    configs: Sequence[GenerationConfig | None],
    own: GenerationConfig | None,
    notices: Notices,
) -> None:
    """Warn of a greedy call that seems to be meant for sampling: it has a temperature above 0, or a seed.

    To other libraries these two ask for sampling. If ``do_sample`` is given, greedy decoding is no surprise.

    ``asked``: the keyword arguments; ``configs``: those of the call, which may repeat what ``own`` says, the model's.
    """
    if asked.get("do_sample") is not None or any(getattr(each, "do_sample", None) is not None for each in configs):
        return
    temperature = asked.get("temperature")
    if temperature is None:  # of the values in configs, those that ask for something have their warning already
        neutral, theirs = TABLE["temperature"].neutral, getattr(own, "temperature", None)
        found = (getattr(each, "temperature", None) for each in configs)
        temperature = next((value for value in found if value == neutral and value != theirs), None)
    idle = ["temperature"] if temperature is not None and temperature > 0 else []
    if seed is not None:
        idle.append("seed")
    if idle and not (idle == ["temperature"] and TABLE["temperature"].asks(temperature)):  # has its warning already
        notices(f"{_GREEDY}: {idle}", f"{_have(idle)} {_GREEDY}")


def _have(names: list[str]) -> str:
    *most, last = (f"`{name}`" for name in names)
    return f"{', '.join(most)} and {last} have" if most else f"{last} has"


@contextmanager
def not_warned_twice() -> Iterator[None]:
    """Within the block transformers' own warning is left out where all options that it names get one here."""
    thread = threading.get_ident()

    def says_more(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        named = _named_in(record.getMessage())
        return not named or not named.issubset(_WARNED_OF)

    logger = logging.getLogger(_LOGGER)
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def _named_in(message: str) -> set[str]:
    if not message.startswith(_BEGINS):
        return set()
    try:
        return set(ast.literal_eval(message[len(_BEGINS) :].partition("]")[0] + "]"))
    except (SyntaxError, ValueError):
        return set()
