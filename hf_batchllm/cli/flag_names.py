"""Messages of the library in the command's own words: `top_p` is ``--top-p`` to somebody who typed that."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable

from ..config import BatchConfig
from ..files.records.setting_names import NAMES
from .grammar_flags import GRAMMAR_FLAGS
from .prompt_flags import PROMPT_FLAGS

_OF_SETTINGS = {  # options of this command -> their names in ``generate``
    "--max-new-tokens": "max_new_tokens",
    "--temperature": "temperature",
    "--top-p": "top_p",
    "--top-k": "top_k",
    "-n": "num_return_sequences",
    "--seed": "seed",
    "--stop": "stop_strings",
    "--logprobs": "logprobs",
    **{f"--{name.replace('_', '-')}": name for name in (*PROMPT_FLAGS, *GRAMMAR_FLAGS)},
}
_ADVICE = {  # what to do is said in the command's words, whoever gave the wrong value
    "for greedy decoding set `do_sample=False`": "for greedy decoding leave it out",
    "`do_sample=True`": "a --temperature above 0",
    "Set `max_new_tokens`": "Set --max-new-tokens",
    "or set `max_new_tokens`": "or set --max-new-tokens",
}
_IN_TEMPLATES = re.compile(r"`(\w+)` in `chat_template_kwargs`")
_FIELD = re.compile(r"`?BatchConfig\.([a-z_]+)`?")


def flag_of(name: str) -> str:
    """The option of this command for a setting: ``-n``, or ``--set no_repeat_ngram_size``."""
    return next((flag for flag, known in _OF_SETTINGS.items() if known == name), f"--set {name}")


def in_flags(asked: argparse.Namespace) -> Callable[[str], str]:
    """Puts messages into the command's words. Settings that were not given on the command line are those of a line, and
    keep their names."""
    given = [name for name in _OF_SETTINGS.values() if getattr(asked, name, None) is not None]
    flags = {name: flag_of(name) for name in given}
    for text in getattr(asked, "set", ()):
        name = text.partition("=")[0].strip().replace("-", "_")
        if name in NAMES:
            flags.setdefault(name, f"--set {name}")
    flags |= {field.name: f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(BatchConfig)}
    flags |= {
        name: f"--{name.replace('_', '-')}" for name in ("limit", "shard", "window", "fsync", "order", "on_error")
    }

    def put(message: str) -> str:
        for ours, theirs in _ADVICE.items():
            message = message.replace(ours, theirs)
        message = _FIELD.sub(lambda found: flags.get(found[1], found[0]), message)
        for name, flag in flags.items():
            found = _IN_TEMPLATES.search(message) if name == "chat_template_kwargs" else None
            if found is not None and f'"{found[1]}"' not in (getattr(asked, name, None) or ""):
                continue  # it is a line's
            message = message.replace(f"`{name}`", flag).replace(f"`{name}=", f"`{flag} ")
        return message

    return put
