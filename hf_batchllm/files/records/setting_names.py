"""The names of settings in a line, and names that seem to be meant as one. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ...inputs.grammar_options import GRAMMAR_OPTIONS
from ...inputs.option_row import Fate, OptionKind
from ...inputs.option_table import names
from ...inputs.other_names import ALIASES, FROM_ELSEWHERE
from ...inputs.prompt_options import PROMPT_OPTIONS

# Not fields of a GenerationConfig.
NOT_IN_CONFIG = ("seed", "adapter", "logprobs", "top_logprobs", *PROMPT_OPTIONS, *GRAMMAR_OPTIONS)
NAMES = frozenset(
    names(kind=OptionKind.FIELD) - {"input_ids", "inputs", "attention_mask"}
    | set(ALIASES)
    | set(NOT_IN_CONFIG)
    | {"stop_token_ids", "ignore_eos"}
)
_HONOURED = frozenset(names(fate=Fate.HONOURED) & NAMES | set(ALIASES) | set(NOT_IN_CONFIG))
# A record's field with such a name is a setting. The other names are common words, which people use for their own data.
TOP_LEVEL_NAMES = frozenset(name for name in NAMES if name in _HONOURED or "_" in name)
# Names from elsewhere that are usual names of data, too, and English words: a field of such a name is the user's own.
_USUAL_DATA = frozenset(
    (
        *("prompt", "text", "texts", "text_inputs", "messages", "conversations", "chats", "prompt_token_ids"),
        *("model", "config", "params", "sample", "sampling", "device", "dtype", "generator", "verbose", "timeout"),
        *("documents", "thinking", "tool", "adapted", "stream", "ebnf", "json_schema", "grammars"),
    )
)
# Names from elsewhere. To pass over them would give another answer than was asked for.
_OTHER_NAMES = {
    **{name: why for name, why in FROM_ELSEWHERE.items() if name not in _USUAL_DATA},
    "logit_bias": 'is called `sequence_bias` here: [[[token id], bias], ...], as in {"sequence_bias": [[[42], -5.0]]}',
    "truncate_prompt_tokens": "is called `max_prompt_tokens` here",
    "enable_thinking": 'goes into `chat_template_kwargs`: {"chat_template_kwargs": {"enable_thinking": false}}',
    "sampling_params": 'is called `settings` here: {"settings": {"temperature": 0.8}}',
}
NOT_FOR_FILES = {
    "max_time": "is not for files: interrupt a run whenever you like, and the same command continues it",
    "prompt_logprobs": "is not for files: see BatchGenerator.generate",
}
_SHORT_NAMES = ("n", "stop", "seed", *GRAMMAR_OPTIONS)  # settings whose names are usual names of data, too
_SHORTEST_GUESSED = 7  # letters of a setting's name: shorter ones are similar to too many other words
_SIMILARITY = 0.85


@lru_cache(maxsize=4096)
def mistaken_name(name: str) -> str | None:
    """Why a field seems to be meant as a setting, though it has no setting's name; None for the user's own data."""
    if name in _USUAL_DATA:
        return None
    if name in NOT_FOR_FILES:
        return NOT_FOR_FILES[name]
    near = nearest(name, exactly=True)
    if near is None and (elsewhere := _BARE_OTHER_NAMES.get(_bare(name))) is not None:
        return _OTHER_NAMES[elsewhere]
    near = near or nearest(name)
    return None if near is None else f"is not the name of a setting; did you mean `{near}`?"


def if_data(why: str, record: Mapping[str, Any]) -> str:
    """A problem with settings of a line, and what to do if the field that it names was meant as data."""
    named = next((name for name in _SHORT_NAMES if name in record and f"`{name}`" in why), None)
    return why if named is None else f"{why} (if `{named}` is a field of your own data: --no-line-settings)"


def nearest(name: str, exactly: bool = False) -> str | None:
    """The setting whose name seems to be misspelt here. ``exactly``: with the same letters."""
    bare = _bare(name)
    for known in sorted(_HONOURED):
        if bare == _bare(known):
            return known
    if exactly:
        return None
    parts = set(name.split("_"))
    first = name[:1].lower()
    candidates = [known for known in sorted(_HONOURED) if len(known) >= _SHORTEST_GUESSED and known[0] == first]
    for known in difflib.get_close_matches(name.lower(), candidates, n=3, cutoff=_SIMILARITY):
        if not set(known.split("_")) <= parts:  # my_temperature, max_tokens_allowed are names for own data
            return known
    return None


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "_- ")


_BARE_OTHER_NAMES = {_bare(name): name for name in _OTHER_NAMES}  # "lora-request", too
