"""Names in a GenerationConfig that transformers does not know.

A GenerationConfig keeps every name that it is made with, and ``generate`` looks at its own alone: a ``stop`` or an
``n`` in it would be passed over. Here a name from elsewhere means in a config what it means as a keyword argument.
"""

from __future__ import annotations

import copy
from typing import Any, cast

from transformers import GenerationConfig

from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from ..wording import did_you_mean
from .option_row import OptionKind
from .option_table import ALIASES, TABLE, names
from .other_names import asks_for_nothing
from .unknown_options import instead_of

_FIELDS = frozenset(vars(GenerationConfig()))
_NOTES = frozenset(("transformers_version", "_from_model_config", "_original_object_hash", "_commit_hash"))
_OURS = frozenset(row.name for row in TABLE.values() if row.in_config)
_ARGUMENTS = (names(kind=OptionKind.ARGUMENT) | names(kind=OptionKind.ADDED) | {"top_logprobs"}) - _OURS


def with_known_names(
    config: GenerationConfig | None, own: GenerationConfig | None, notices: Notices
) -> GenerationConfig | None:
    """A copy of the config with the names of ``generate``; the config itself if it has no others.

    An error names what ``generate`` does not understand there. A name that nobody knows is warned of: checkpoints
    have notes of their own. ``own``: the model's own config. What a checkpoint's authors wrote there is no wish of the
    caller.
    """
    known = without_foreign_names(config)
    if config is None or known is config:
        return config
    unknown: list[str] = []
    for name, value in vars(config).items():
        if name in _FIELDS or name in _NOTES or value is None or asks_for_nothing(name, value):
            continue
        if repr(getattr(own, name, None)) == repr(value):
            continue
        if name in ALIASES:
            ours = ALIASES[name]
            before = getattr(known, ours, None)
            if before is not None and before != value and before != getattr(own, ours, None):
                raise OptionValueError(name, f"contradicts `{ours}`: keep one of them")
            setattr(known, ours, value)
        elif name in _OURS:
            setattr(known, name, value)
        elif name in _ARGUMENTS:
            each = TABLE[name].each if name in TABLE else ""
            why = f"is an option of generate(), and has no effect in a GenerationConfig: pass {name}= beside it"
            raise UnsupportedOptionError(name, f"{why}, once for all prompts" + (f" or as {each}" if each else ""))
        elif (instead := instead_of(name)) is not None:
            raise UnsupportedOptionError(name, instead)
        else:
            unknown.append(name)
    for name in unknown:
        hint = did_you_mean(name, [*_FIELDS, *ALIASES, *_OURS], cutoff=0.8)
        notices(
            f"foreign name: {name}",
            f"`{name}` in the generation_config is the name of no option, and has no effect, as in `generate`{hint}",
        )
    return cast(GenerationConfig, known)


def without_foreign_names(config: Any) -> Any:
    """The config as ``model.generate`` reads it; anything else as it is."""
    if not isinstance(config, GenerationConfig) or vars(config).keys() <= _FIELDS | _NOTES:
        return config
    read = copy.copy(config)
    read.__dict__ = {name: value for name, value in vars(config).items() if name in _FIELDS or name in _NOTES}
    return read
