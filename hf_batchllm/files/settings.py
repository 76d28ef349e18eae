"""Settings of a line, or of the command line: names, aliases and values. No torch.

Names are those of ``model.generate``; a few of OpenAI's interface are understood as well.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..errors import BatchLLMError, OptionValueError
from ..inputs.grammar_options import Grammar, checked_grammar
from ..inputs.option_row import Fate, OptionKind, Takes
from ..inputs.option_table import ALIASES, GRAMMAR_OPTIONS, PROMPT_OPTIONS, TABLE
from ..inputs.option_values import ZERO_TEMPERATURE, wrong_value
from ..inputs.other_names import FROM_ELSEWHERE, asks_for_nothing, wanted_logprobs
from ..inputs.prompt_options import checked_prompt_option
from ..wording import is_whole, shown

_ROWS = {name: row for name, row in TABLE.items() if row.kind is not OptionKind.ARGUMENT and row.in_lines}
NAMES = frozenset((*_ROWS, *ALIASES, "top_logprobs"))
_NOT_IN_CONFIG = {name for name, row in _ROWS.items() if row.kind is OptionKind.ADDED and not row.in_config}
_NOT_FOR_FILES = {name: row.not_for_files for name, row in _ROWS.items() if row.not_for_files}
_HONOURED = sorted(name for name in NAMES if name not in _ROWS or _ROWS[name].fate is Fate.HONOURED)
# A record's field with such a name is a setting. The other names are common words, which people use for their own data.
TOP_LEVEL_NAMES = frozenset(name for name in NAMES.difference(_NOT_FOR_FILES) if name in _HONOURED or "_" in name)
_USUAL_DATA = frozenset(("adapted", "grammars"))  # names like those of settings that are usual names of data
# To pass over names from elsewhere would give another answer than was asked for.
_OTHER_NAMES = {
    **FROM_ELSEWHERE,
    "logit_bias": 'is called `sequence_bias` here: [[[token id], bias], ...], as in {"sequence_bias": [[[42], -5.0]]}',
    "enable_thinking": 'goes into `chat_template_kwargs`: {"chat_template_kwargs": {"enable_thinking": false}}',
    "sampling_params": 'is called `settings` here: {"settings": {"temperature": 0.8}}',
}
_SHORT_NAMES = ("n", "stop", "seed", *GRAMMAR_OPTIONS)  # settings whose names are usual names of data, too
_SHORTEST_GUESSED = 7  # letters of a setting's name: shorter ones are similar to too many other words
_SIMILARITY = 0.85
_FLOATS = ("temperature", "top_p", "repetition_penalty")  # transformers treats 1 and 1.0 differently
_WHOLE = {name for name, row in TABLE.items() if row.takes not in (Takes.NUMBER, Takes.PENALTY)} | {
    "top_k",
    "top_logprobs",
}


class SettingError(BatchLLMError, ValueError):
    """A setting that cannot be used; ``name`` as the user wrote it."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"`{name}` {why}")


@dataclass(frozen=True)
class GenerationSettings:
    """The settings given in one place: a line, the command line, a config. Only those that were given."""

    options: Mapping[str, Any] = field(default_factory=dict)  # by the names of ``generate``
    logprobs: int | None = None
    seed: int | None = None
    adapter: str | None = None
    prompt_options: Mapping[str, Any] = field(default_factory=dict)  # how the prompt becomes tokens
    grammar: Grammar | None = None  # the form of the answer
    implies_sampling: str | None = None  # an option that has no effect without sampling, and so asks for it
    written: Mapping[str, str] = field(default_factory=dict, compare=False)  # options under another name: that name

    @property
    def resolution_key(self) -> tuple[str, int | None, str | None]:
        """Where this is equal, the model makes the same of the settings."""
        return repr(sorted(self.options.items())), self.logprobs, self.adapter

    @property
    def call_key(self) -> tuple[bool, bool, bool, bool]:
        """Records for which this differs run in different calls of ``generate``.

        A call with beams has nothing but beams. Log-probabilities and grammars make a call slower for all of its
        records. A call names an adapter for each of its prompts, or for none.
        """
        beams = (self.options.get("num_beams") or 1) > 1
        return beams, self.logprobs is not None, self.adapter is not None, self.grammar is not None

    @property
    def brings_template(self) -> bool:
        """Whether chats have a template beside the tokenizer's."""
        return "chat_template" in (self.prompt_options.get("chat_template_kwargs") or {})

    def over(self, base: GenerationSettings) -> GenerationSettings:
        """These settings, and those of ``base`` where these say nothing."""
        own, options = self.options, {**base.options, **self.options}
        gone = {name for known, row in TABLE.items() if row.asks(own.get(known)) for name in row.displaces}
        if own.get("do_sample") is False:  # sampling is turned off
            gone |= {name for name, row in TABLE.items() if row.sampling_only}
        if self.implies_sampling:
            options.setdefault("do_sample", True)

        def given(one: Any, other: Any) -> Any:
            return other if one is None else one

        return GenerationSettings(
            {name: each for name, each in options.items() if each is not None and (name in own or name not in gone)},
            given(self.logprobs, base.logprobs),
            given(self.seed, base.seed),
            given(self.adapter, base.adapter),
            _merged(self.prompt_options, base.prompt_options),
            given(self.grammar, base.grammar),
            written=self.written,
        )

    def as_written(self, why: str) -> str:
        """A problem with these settings, by the names that they have in the line."""
        for known, name in self.written.items():
            why = why.replace(f"`{known}`", f"`{name}`")
        return why


NO_SETTINGS = GenerationSettings()


def _merged(own: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Own settings over those of ``base``. Each name in ``chat_template_kwargs`` counts by itself."""
    kwargs = "chat_template_kwargs"
    if kwargs in own and kwargs in base:
        own = {**own, kwargs: {**base[kwargs], **own[kwargs]}}
    return {**base, **own} if own else base


def read_settings(fields: Mapping[str, Any], *, cells: bool = False, settle: bool = True) -> GenerationSettings:
    """``fields``: settings and nothing else, by name.

    cells: values come from a table, where numbers may be text and an empty cell says nothing. settle: the temperature
    decides on sampling, as it does not in a GenerationConfig.
    """
    found: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, given in fields.items():
        value = _from_cell(name, given) if cells else given
        if name not in NAMES:
            if value is None or asks_for_nothing(name, value):
                continue
            why = mistaken_name(name)
            names = ", ".join(("max_new_tokens", "temperature", "top_p", "stop", "n", "seed"))
            raise SettingError(name, why or f"is not a setting; settings are {names}, ...")
        if value is None:
            continue
        known = ALIASES.get(name, name)
        value = _checked(name, known, value)
        if known in found and found[known] != value:
            raise SettingError(name, f"contradicts `{written[known]}`: keep one of them")
        written[known], found[known] = name, value
    options = {known: value for known, value in found.items() if known not in (*_NOT_IN_CONFIG, "top_logprobs")}
    if settle:
        _settle_temperature(options)
    forms = [name for name in GRAMMAR_OPTIONS if name in found]
    if len(forms) > 1:
        raise SettingError(forms[1], f"contradicts `{forms[0]}`: an answer has one form, so keep one of them")
    return GenerationSettings(
        options,
        wanted_logprobs(found.get("logprobs"), found.get("top_logprobs"), SettingError),
        found.get("seed"),
        found.get("adapter"),
        {name: found[name] for name in PROMPT_OPTIONS if name in found},
        found[forms[0]] if forms else None,
        written={known: name for known, name in written.items() if known != name},
    )


def settings_in_record(
    record: Mapping[str, Any], *, cells: bool = False, data: Iterable[str] = (), kept: Iterable[str] = ()
) -> GenerationSettings:
    """The settings of a record, at its top level or in its ``settings``.

    ``data``: fields that are no settings. ``kept``: fields that are data unless they have the name of a setting.
    """
    own = set(data)
    wanted = own.union(kept)
    top = {name: value for name, value in record.items() if name in TOP_LEVEL_NAMES and name not in own}
    for name, value in record.items():
        if name in wanted or value in (None, "") or (why := mistaken_name(name)) is None:
            continue
        if _first_not_finite(value) is None and not asks_for_nothing(name, _from_cell(name, value) if cells else value):
            raise SettingError(name, f"{why} (for a field of your own data: --keep {name}, or --no-line-settings)")
    nested = record.get("settings")
    if cells and isinstance(nested, str) and nested.lstrip().startswith("{"):
        nested = _parsed("settings", nested)
    if isinstance(nested, Mapping) and "settings" not in own:
        for name, value in nested.items():
            if value is not None and top.get(name) not in (None, ""):
                raise SettingError(name, "is given twice: in `settings` and beside it")
        top |= nested
    return read_settings(top, cells=cells) if top else NO_SETTINGS


def read_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """``NAME=VALUE`` of ``--set``: the value is JSON, or else plain text."""
    found: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise SettingError("--set", f"takes NAME=VALUE, not {shown(text)}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


# -- names -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def mistaken_name(name: str) -> str | None:
    """Why a field that seems to be meant as a setting is none; None for settings and for the user's own data."""
    if name in _NOT_FOR_FILES or name in NAMES or name in _USUAL_DATA:
        return _NOT_FOR_FILES.get(name)
    near = _BARE.get(_bare(name))
    if near is None and (why := _BARE_OTHER_NAMES.get(_bare(name))) is not None:
        return why
    near = near or nearest(name)
    return None if near is None else f"is not the name of a setting; did you mean `{near}`?"


def if_data(why: str, record: Mapping[str, Any]) -> str:
    """A problem with settings of a line, and what to do if the field that it names was meant as data."""
    named = next((name for name in _SHORT_NAMES if name in record and f"`{name}`" in why), None)
    return why if named is None else f"{why} (if `{named}` is a field of your own data: --no-line-settings)"


def nearest(name: str) -> str | None:
    """The setting whose name seems to be misspelt here."""
    if _bare(name) in _BARE:
        return _BARE[_bare(name)]
    parts, first = set(name.split("_")), name[:1].lower()
    candidates = [known for known in _HONOURED if len(known) >= _SHORTEST_GUESSED and known[0] == first]
    near = difflib.get_close_matches(name.lower(), candidates, n=3, cutoff=_SIMILARITY)
    # my_temperature, max_tokens_allowed are names for own data
    return next((known for known in near if not set(known.split("_")) <= parts), None)


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "_- ")


_BARE = {_bare(name): name for name in reversed(_HONOURED)}
_BARE_OTHER_NAMES = {_bare(name): why for name, why in _OTHER_NAMES.items()}  # "lora-request", too


# -- values ------------------------------------------------------------------------------------------------------------


def _from_cell(name: str, value: Any) -> Any:
    known = ALIASES.get(name, name)
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        if known == "stop_strings":
            return _parsed(name, text) if text.startswith("[") else value
        if known in ("adapter", "regex", "grammar"):
            return value
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            value = json.loads(text)
        except ValueError:
            return value  # refused where values are checked
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer() and known in _WHOLE:  # a column of whole numbers with a gap
        return int(value)
    return value


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingError(name, f"is not JSON ({error}): {shown(text)}") from None


def _first_not_finite(value: Any) -> float | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for found in map(_first_not_finite, inner) if found is not None), None)


def _checked(name: str, known: str, value: Any) -> Any:
    """The value, with what no model can use refused. The model's own checks come before a line is run."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy or torch, where Python calls
    odd = _first_not_finite(value)
    if odd is not None:
        raise SettingError(name, f"must be a number, not {json.dumps(odd)}: leave it out, or write null")
    if known == "seed" and not (is_whole(value) and 0 <= value < 2**64):
        raise SettingError(name, f"must be a whole number from 0 to 2**64 - 1, not {shown(value)}")
    if known == "adapter" and not isinstance(value, str):
        raise SettingError(name, f"must be the name of an adapter, not {shown(value)}")
    if known in ("tools", "chat_template_kwargs") and isinstance(value, str):  # as data sets hold them
        value = _parsed(name, value)
    if known == "stop_strings" and value == []:
        return None
    try:
        if known in PROMPT_OPTIONS:
            return checked_prompt_option(known, value)
        if known in GRAMMAR_OPTIONS:
            return checked_grammar(known, value)
    except OptionValueError as error:
        raise SettingError(name, str(error).removeprefix(f"`{known}` ")) from None
    if known in _FLOATS and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    row = TABLE.get(known)  # none of top_logprobs
    why = None if row is None else row.not_for_files or wrong_value(row, value, in_files=True)
    if why:
        raise SettingError(name, why)
    return [value] if known == "stop_strings" and isinstance(value, str) else value


def _settle_temperature(options: dict[str, Any]) -> None:
    """Without ``do_sample``, a temperature above 0 means sampling, and 0 means the most likely token."""
    temperature = options.get("temperature")
    if temperature is None:
        return
    if temperature < 0:
        raise SettingError("temperature", f"must be 0 (for the most likely token) or more, and is {temperature:g}")
    if temperature > 0:
        options.setdefault("do_sample", True)
        return
    if options.get("do_sample"):
        raise SettingError("temperature", ZERO_TEMPERATURE)
    del options["temperature"]
    options["do_sample"] = False
