"""The call's tokenizer: where it comes from, whether it is one, and decoding with it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ..config import BatchConfig
from ..errors import ConfigError, TokenizerError
from ..wording import a_kind, first_line
from .kept_tokenizers import load_tokenizer, own_tokenizer
from .preparing import loading

_PASS_ONE = "pass BatchGenerator(model, tokenizer)"


class TokenizerLoader:
    """The tokenizer that was given, else the one saved with the model; loaded when it is first needed."""

    def __init__(self, given: Any, model: PreTrainedModel) -> None:
        check_tokenizer(given)
        self._tokenizer = given
        self._model = model
        self._saved_with = getattr(model.config, "_name_or_path", "") or ""
        self._searched = given is not None

    def required(self) -> Any:
        """The tokenizer for prompts that are text; TokenizerError if there is none."""
        if self._tokenizer is None:
            if not self._saved_with:
                raise TokenizerError(f"the model's config does not say where its tokenizer is: {_PASS_ONE}")
            try:
                with loading():
                    self._tokenizer = load_tokenizer(self._model, self._saved_with, self)
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
                    self._tokenizer = load_tokenizer(self._model, self._saved_with, self, local_files_only=True)
        return self._tokenizer

    def shown(self) -> Any:
        """As ``found``, for a user, who may change it: no other generator has it."""
        self._tokenizer = own_tokenizer(self._model, self.found(), self)
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
