"""The call's tokenizer: where it comes from, whether it is one, and decoding with it."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from ..config import BatchConfig
from ..errors import ConfigError, TokenizerError
from ..wording import a_kind, first_line
from .preparing import loading

_PASS_ONE = "pass BatchGenerator(model, tokenizer)"
# Tokenizers from beside a model, and where each was found: loading takes seconds, and the next generator needs it too.
_kept: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Any]] = WeakKeyDictionary()


class TokenizerLoader:
    """The tokenizer that was given, else the one saved with the model; loaded when it is first needed."""

    def __init__(self, given: Any, model: PreTrainedModel) -> None:
        check_tokenizer(given)
        self._tokenizer = given
        self._model = model
        self._saved_with = getattr(model.config, "_name_or_path", "") or ""
        self._searched = given is not None
        self._is_kept = False  # for other generators, too

    def required(self) -> Any:
        """The tokenizer for prompts that are text; TokenizerError if there is none."""
        if self._tokenizer is None:
            if not self._saved_with:
                raise TokenizerError(f"the model's config does not say where its tokenizer is: {_PASS_ONE}")
            try:
                with loading():
                    self._load()
            except Exception as error:
                raise TokenizerError(
                    f"no tokenizer could be loaded from {self._saved_with!r}, where the model came from "
                    f"({first_line(error)}): {_PASS_ONE}"
                ) from error
        return self._tokenizer

    def found(self) -> Any:
        """The tokenizer for the texts of results; None if there is none on this machine."""
        if not self._searched:
            self._searched = True
            if self._tokenizer is None and self._saved_with:
                # Nothing is downloaded merely to decode: results then hold token ids without text.
                with contextlib.suppress(Exception), loading():
                    self._load(local_files_only=True)
        return self._tokenizer

    def _load(self, **options: Any) -> None:
        self._tokenizer, self._is_kept = load_tokenizer(self._model, self._saved_with, **options), True

    def shown(self) -> Any:
        """The tokenizer for a user, who may change it: no other generator has it."""
        found = self.found()
        if self._is_kept:
            self._tokenizer, self._is_kept = copy.deepcopy(found), False
        return self._tokenizer

    def decode(self, token_ids: list[int]) -> str | None:
        self.found()
        return self.decode_if_loaded(token_ids)

    def decode_if_loaded(self, token_ids: list[int]) -> str | None:
        """The text where a tokenizer is loaded already; none is loaded for this."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def load_tokenizer(model: nn.Module, name: str, **options: Any) -> Any:
    """The tokenizer saved under a name, as it was loaded for this model before. Changed files are loaded anew."""
    place = _place(name)
    if model not in _kept or _kept[model][0] != place:
        _kept[model] = place, AutoTokenizer.from_pretrained(name, **options)
    return _kept[model][1]


def _place(name: str) -> tuple[Any, ...]:
    """A folder with its files as they are now; a name on the hub stands for itself."""
    if not os.path.isdir(name):
        return (name,)
    files = []
    for folder, _, names in os.walk(name):
        for each in names:
            path = os.path.join(folder, each)
            with contextlib.suppress(OSError):  # it is being replaced, or a link leads nowhere
                found = os.stat(path)
                files.append((path, found.st_mtime_ns, found.st_size))
    return (os.path.realpath(name), *sorted(files))


def check_tokenizer(given: Any) -> None:
    if given is None:
        return
    if isinstance(given, str | os.PathLike):
        hint = f": pass the tokenizer itself, AutoTokenizer.from_pretrained({os.fspath(given)!r})"
    elif isinstance(given, BatchConfig):
        hint = ": pass it by name, BatchGenerator(model, config=...)"
    elif isinstance(given, GenerationConfig):
        hint = ": it goes into generate(), with the prompts"
    elif isinstance(given, nn.Module):
        hint = ": the tokenizer comes second, after the model"
    elif type(given).__module__.partition(".")[0] == "tokenizers":
        hint = ": wrap it, PreTrainedTokenizerFast(tokenizer_object=...)"
    elif isinstance(given, type) or not callable(given) or not callable(getattr(given, "decode", None)):
        hint = ": pass what AutoTokenizer.from_pretrained gives"
    else:
        return
    raise ConfigError(f"`tokenizer` is {a_kind(given)}{hint}")
