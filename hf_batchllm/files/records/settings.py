"""Settings of a line, or of the command line: names, aliases and values. No torch.

Names are those of ``model.generate``; a few of OpenAI's interface are understood as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import BatchLLMError, OptionValueError
from ...inputs.grammar_options import GRAMMAR_OPTIONS, Grammar, checked_grammar
from ...inputs.option_ranges import ZERO_TEMPERATURE, out_of_range
from ...inputs.option_row import Takes
from ...inputs.option_table import TABLE
from ...inputs.other_names import ALIASES, FROM_ELSEWHERE, asks_for_nothing, wanted_logprobs
from ...inputs.prompt_options import PROMPT_OPTIONS, checked_prompt_option
from ...wording import is_whole, shown
from .setting_names import NAMES, NOT_FOR_FILES, NOT_IN_CONFIG, TOP_LEVEL_NAMES, mistaken_name

_IF_DATA = " (for a field of your own data: --keep {name}, or --no-line-settings)"
_NUMBERS = (Takes.WHOLE, Takes.NUMBER, Takes.TOKEN, Takes.TOKENS, Takes.IDS, Takes.FLAG)


class SettingError(BatchLLMError, ValueError):
    """A setting that cannot be used; ``name`` as the user wrote it."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"`{name}` {why}")


ResolutionKey = tuple[str, int | None, str | None]


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
    def resolution_key(self) -> ResolutionKey:
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
        options = {**base.options, **self.options}
        if "do_sample" in self.options and not self.options["do_sample"]:
            for name in [name for name, row in TABLE.items() if row.sampling_only and name not in self.options]:
                options.pop(name, None)  # the base's sampling options: these settings turn sampling off
        for short, other in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if short in self.options and other not in self.options:
                options.pop(other, None)  # the base's, which would win over it
        if self.options.get("ignore_eos") and "eos_token_id" not in self.options:
            options.pop("eos_token_id", None)
        elif "eos_token_id" in self.options and "ignore_eos" not in self.options:
            options.pop("ignore_eos", None)
        if self.implies_sampling and "do_sample" not in options:
            options["do_sample"] = True
        return GenerationSettings(
            {name: value for name, value in options.items() if value is not None},
            self.logprobs if self.logprobs is not None else base.logprobs,
            self.seed if self.seed is not None else base.seed,
            self.adapter if self.adapter is not None else base.adapter,
            _merged(self.prompt_options, base.prompt_options),
            self.grammar if self.grammar is not None else base.grammar,
            written=self.written,
        )

    def as_written(self, why: str) -> str:
        """A problem with these settings, by the names that they have in the line."""
        for known, name in self.written.items():
            why = why.replace(f"`{known}`", f"`{name}`")
        return why


NO_SETTINGS = GenerationSettings()


def read_settings(fields: Mapping[str, Any], *, cells: bool = False, settle: bool = True) -> GenerationSettings:
    """``fields``: settings and nothing else, by name.

    ``cells``: values come from a table, where numbers may be text and an empty cell says nothing. ``settle``: the
    temperature decides on sampling, as it does not in a GenerationConfig.
    """
    options: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in fields.items():
        if name not in NAMES:
            if _is_neutral(name, value, cells):
                continue
            why = mistaken_name(name) or FROM_ELSEWHERE.get(name)
            raise SettingError(name, why or f"is not a setting{_some_names()}")
        if cells:
            value = _from_cell(name, value)
        if value is None:
            continue
        if name in NOT_FOR_FILES:
            raise SettingError(name, NOT_FOR_FILES[name])
        known = ALIASES.get(name, name)
        if known in written and options.get(known) != value:
            raise SettingError(name, f"contradicts `{written[known]}`: keep one of them")
        written[known] = name
        if known in NOT_IN_CONFIG:
            beside[known] = value
        else:
            options[known] = _checked(name, known, value)
    if settle:
        _settle_temperature(options)
    for known, value in options.items():
        why = out_of_range(known, value) if isinstance(value, int | float) else None
        if why is not None:
            raise SettingError(written[known], why)
    return GenerationSettings(
        options,
        wanted_logprobs(beside.get("logprobs"), beside.get("top_logprobs"), SettingError),
        _seed(beside.get("seed")),
        _adapter(beside.get("adapter")),
        {name: _prompt_option(name, beside[name]) for name in PROMPT_OPTIONS if name in beside},
        _grammar({name: beside[name] for name in GRAMMAR_OPTIONS if name in beside}),
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
        if name not in NAMES and name not in wanted and value not in (None, ""):
            why = mistaken_name(name)
            if why is not None and not _is_neutral(name, value, cells):
                raise SettingError(name, f"{why}{_IF_DATA.format(name=name)}")
    nested = record.get("settings")
    if cells and isinstance(nested, str) and nested.lstrip().startswith("{"):
        nested = _parsed("settings", nested)
    if isinstance(nested, Mapping) and "settings" not in own:
        double = next((name for name, value in nested.items() if value is not None and _is_given(top.get(name))), None)
        if double is not None:
            raise SettingError(double, "is given twice: in `settings` and beside it")
        top |= nested
    return read_settings(top, cells=cells) if top else NO_SETTINGS


def _is_neutral(name: str, value: Any, cells: bool) -> bool:
    return asks_for_nothing(name, _from_cell(name, value) if cells else value)


def _is_given(value: Any) -> bool:
    return value is not None and value != ""


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


# -- values ------------------------------------------------------------------------------------------------------------


def _from_cell(name: str, value: Any) -> Any:
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        known = ALIASES.get(name, name)
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
    if isinstance(value, float):
        if math.isnan(value):
            return None
        row = TABLE.get(ALIASES.get(name, name))
        whole = name in NOT_IN_CONFIG or (row is not None and row.takes is not Takes.NUMBER)
        if (whole or name == "top_k") and value.is_integer():  # as in a column of whole numbers with a gap
            return int(value)
    return value


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingError(name, f"is not JSON ({error}): {shown(text)}") from None


def _checked(name: str, known: str, value: Any) -> Any:
    """Checks the type, and the least value of a length."""
    takes = TABLE[known].takes
    if isinstance(value, str) and takes in _NUMBERS:
        raise SettingError(name, f"must be {takes.value}, not {shown(value)}")
    if takes is Takes.WHOLE and (isinstance(value, bool) or not isinstance(value, int)):
        raise SettingError(name, f"must be a whole number, not {shown(value)}")
    if takes is Takes.FLAG and not isinstance(value, bool):
        raise SettingError(name, f"must be true or false, not {shown(value)}")
    if takes is Takes.NUMBER and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise SettingError(name, f"must be a number, not {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(name, f"must be a number, not {value}")
    if known in ("max_new_tokens", "num_return_sequences", "num_beams") and value < 1:
        raise SettingError(name, f"must be at least 1, and is {value}")
    if known == "stop_token_ids" and not (isinstance(value, list) and all(map(is_whole, value))):
        raise SettingError(name, f"must be {takes.value}, not {shown(value)}")
    if known == "stop_strings":
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise SettingError(name, f"must be a string, or a list of strings, not {shown(value)}")
        if not all(listed):
            raise SettingError(name, "holds an empty string, which ends nothing: leave it out")
        return listed or None
    if known in ("temperature", "top_p", "repetition_penalty"):
        return float(value)  # transformers treats 1 and 1.0 differently
    return value


def _settle_temperature(options: dict[str, Any]) -> None:
    """Without ``do_sample``, a temperature above 0 means sampling, and 0 means the likeliest token."""
    temperature = options.get("temperature")
    if temperature is None:
        return
    if temperature < 0:
        raise SettingError("temperature", f"must be 0 (for the likeliest token) or more, and is {temperature:g}")
    if temperature > 0:
        options.setdefault("do_sample", True)
        return
    if options.get("do_sample"):
        raise SettingError("temperature", ZERO_TEMPERATURE)
    del options["temperature"]
    options["do_sample"] = False


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise SettingError("seed", f"must be a whole number from 0 to 2**64 - 1, not {shown(value)}")
    return value


def _adapter(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise SettingError("adapter", f"must be the name of an adapter, not {shown(value)}")
    return value


def _prompt_option(name: str, value: Any) -> Any:
    if name in ("tools", "chat_template_kwargs") and isinstance(value, str):  # as data sets hold them
        value = _parsed(name, value)
    try:
        return checked_prompt_option(name, value)
    except OptionValueError as error:
        raise SettingError(name, str(error).removeprefix(f"`{name}` ")) from None


def _grammar(given: Mapping[str, Any]) -> Grammar | None:
    if len(given) > 1:
        first, second = list(given)[:2]
        raise SettingError(second, f"contradicts `{first}`: an answer has one form, so keep one of them")
    for name, value in given.items():
        try:
            return checked_grammar(name, value)
        except OptionValueError as error:
            raise SettingError(name, str(error).removeprefix(f"`{name}` ")) from None
    return None


def _merged(own: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of ``chat_template_kwargs`` each name counts by itself."""
    kwargs = "chat_template_kwargs"
    if kwargs in own and kwargs in base:
        own = {**own, kwargs: {**base[kwargs], **own[kwargs]}}
    return {**base, **own} if own else base


def _some_names() -> str:
    return "; settings are " + ", ".join(("max_new_tokens", "temperature", "top_p", "stop", "n", "seed")) + ", ..."
