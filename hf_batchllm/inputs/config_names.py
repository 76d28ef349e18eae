"""Names in a GenerationConfig that transformers does not know.

A GenerationConfig keeps every name that it is made with, and ``generate`` looks at its own alone: a ``stop`` or an
``n`` in it would be passed over. Here a name from elsewhere means in a config what it means as a keyword argument.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any

from transformers import GenerationConfig

from ..config import BatchConfig
from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from .option_row import OptionKind
from .option_table import TABLE, names
from .other_names import ALIASES, FROM_ELSEWHERE, asks_for_nothing

ENDS = ("stop_token_ids", "ignore_eos")  # options of ours that differ between prompts, as a config's fields do
_FIELDS = frozenset(vars(GenerationConfig()))
_NOTES = frozenset(("transformers_version", "_from_model_config", "_original_object_hash", "_commit_hash"))
_ARGUMENTS = (names(kind=OptionKind.ARGUMENT) | names(kind=OptionKind.ADDED) | {"top_logprobs"}) - set(ENDS)
_KNOBS = frozenset(field.name for field in dataclasses.fields(BatchConfig))


def foreign_names(config: GenerationConfig, own: GenerationConfig | None) -> dict[str, Any]:
    """Names in the config, with their values, that no field of a GenerationConfig has.

    ``own``: the model's own config. What a checkpoint's authors wrote there is no wish of the caller.
    """
    given = vars(config)
    if own is config or given.keys() <= _FIELDS:
        return {}
    return {
        name: value
        for name, value in given.items()
        if name not in _FIELDS and name not in _NOTES and value is not None and not _is_the_models(name, value, own)
    }


def with_known_names(
    config: GenerationConfig | None, own: GenerationConfig | None, notices: Notices
) -> GenerationConfig | None:
    """A copy of the config with the names of ``generate``; the config itself if it has no others.

    An error names what ``generate`` does not understand there. A name that nobody knows is warned of: checkpoints
    have notes of their own.
    """
    if config is None:
        return None
    foreign = foreign_names(config, own)
    named = {name: value for name, value in vars(config).items() if name in _FIELDS or name in _NOTES}
    if len(named) == len(vars(config)):
        return config
    known = copy.copy(config)
    known.__dict__ = named
    unknown: list[str] = []
    for name, value in foreign.items():
        if asks_for_nothing(name, value):
            continue
        if name in ALIASES:
            ours = ALIASES[name]
            before = getattr(known, ours, None)
            if before is not None and before != value and before != getattr(own, ours, None):
                raise OptionValueError(name, f"contradicts `{ours}`: keep one of them")
            setattr(known, ours, value)
        elif name in ENDS:
            setattr(known, name, value)
        elif name in _ARGUMENTS:
            why = f"is an option of generate(), and has no effect in a GenerationConfig: pass {name}= beside it"
            raise UnsupportedOptionError(name, f"{why}, once for all prompts" + _one_for_each(name))
        elif name in FROM_ELSEWHERE:
            raise UnsupportedOptionError(name, FROM_ELSEWHERE[name])
        elif name in _KNOBS:
            raise UnsupportedOptionError(name, f"is a field of BatchConfig: BatchGenerator(model, {name}=...)")
        else:
            unknown.append(name)
    for name in unknown:
        near = difflib.get_close_matches(name, [*_FIELDS, *ALIASES, *ENDS], n=1, cutoff=0.8)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        notices(
            f"foreign name: {name}",
            f"`{name}` in the generation_config is the name of no option, and has no effect, as in `generate`{hint}",
        )
    return known


def without_foreign_names(config: Any) -> Any:
    """The config as ``model.generate`` reads it; anything else as it is."""
    if not isinstance(config, GenerationConfig) or vars(config).keys() <= _FIELDS | _NOTES:
        return config
    read = copy.copy(config)
    read.__dict__ = {name: value for name, value in vars(config).items() if name in _FIELDS or name in _NOTES}
    return read


def _one_for_each(name: str) -> str:
    row = TABLE.get(name)
    return " or as a list with one for each" if row is not None and "a list" in row.doc and "each" in row.doc else ""


def _is_the_models(name: str, value: Any, own: GenerationConfig | None) -> bool:
    return repr(getattr(own, name, None)) == repr(value)
