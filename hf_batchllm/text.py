"""Where a tokenizer comes from, and text out of tokens."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel


class TokenizerLoader:
    """The tokenizer that was given, else the one saved beside the model; looked for when it is first needed."""

    def __init__(self, given: Any, model: PreTrainedModel) -> None:
        self._tokenizer = given
        self._beside = getattr(model.config, "_name_or_path", "") or ""
        self._searched = given is not None

    def required(self) -> Any:
        """For prompts that are text: raises if there is none."""
        if self._tokenizer is None:
            if not self._beside:
                raise ValueError("the model does not say where its tokenizer is: pass BatchGenerator(model, tokenizer)")
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._beside)
            except Exception as error:
                raise ValueError(
                    f"no tokenizer could be loaded from {self._beside!r}, where the model came from: "
                    f"pass BatchGenerator(model, tokenizer)"
                ) from error
        return self._tokenizer

    def decode(self, token_ids: list[int]) -> str | None:
        if not self._searched:
            self._searched = True
            if self._tokenizer is None and self._beside:
                # What is not on this machine is not fetched merely to decode: then results are token ids without text.
                with contextlib.suppress(OSError, ValueError):
                    self._tokenizer = AutoTokenizer.from_pretrained(self._beside, local_files_only=True)
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
