"""Where a tokenizer comes from, and text out of tokens."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from ..config import BatchConfig
from ..errors import ConfigError, TokenizerError
from ..wording import a_kind, first_line

_PASS_ONE = "pass BatchGenerator(model, tokenizer)"


class TokenizerLoader:
    """The tokenizer that was given, else the one saved beside the model; looked for when it is first needed."""

    def __init__(self, given: Any, model: PreTrainedModel) -> None:
        check_tokenizer(given)
        self._tokenizer = given
        self._beside = getattr(model.config, "_name_or_path", "") or ""
        self._searched = given is not None

    def required(self) -> Any:
        """For prompts that are text: raises if there is none."""
        if self._tokenizer is None:
            if not self._beside:
                raise TokenizerError(f"the model does not say where its tokenizer is: {_PASS_ONE}")
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._beside)
            except Exception as error:
                raise TokenizerError(
                    f"no tokenizer could be loaded from {self._beside!r}, where the model came from "
                    f"({first_line(error)}): {_PASS_ONE}"
                ) from error
        return self._tokenizer

    def found(self) -> Any:
        """For results: None if there is none to be had on this machine."""
        if not self._searched:
            self._searched = True
            if self._tokenizer is None and self._beside:
                # What is not on this machine is not fetched merely to decode: then results are token ids without text.
                with contextlib.suppress(Exception):
                    self._tokenizer = AutoTokenizer.from_pretrained(self._beside, local_files_only=True)
        return self._tokenizer

    def decode(self, token_ids: list[int]) -> str | None:
        self.found()
        return self.decode_if_loaded(token_ids)

    def decode_if_loaded(self, token_ids: list[int]) -> str | None:
        """For what is merely nice to have: no tokenizer is looked for."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


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
