"""Settings of lines -> GenerationConfigs, and what a model has against them, before a line is run.

One bad value must not stop a call with a million good lines in it, so each kind of settings is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...errors import BatchLLMError
from ...inputs.adapters import adapter_of_each
from ...inputs.base_model import base_model
from ...inputs.option_conflicts import check_beams
from ...inputs.options import Options, resolve_options
from ...notices import Notices
from ...sampling.stop_rules import rules_of
from ...sampling.stop_strings import PreparedStopStrings
from .settings import NAMES, LineSettings

if TYPE_CHECKING:
    from ...generator import BatchGenerator


_MOST_KNOWN = 4096  # different settings remembered at a time
_OF_TOKENS = ("sequence_bias", "bad_words_ids")  # refused by transformers in the middle of a call
_BROKEN = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))  # of a device, not of a setting
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
Key = tuple[str, int | None, str | None]


@dataclass(frozen=True, slots=True)
class _Made:
    config: GenerationConfig
    options: Options  # what the model makes of it


class LineConfigs:
    """``model``: that of the run. ``tokenizer`` returns its tokenizer, or raises; for stop strings."""

    def __init__(self, model: nn.Module, tokenizer: Callable[[], Any], notices: Notices | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._notices = notices or Notices()
        self._known: dict[Key, _Made | str] = {}
        self._finds_strings = False

    @classmethod
    def of(cls, generator: BatchGenerator) -> LineConfigs:
        """With its notices, so that what it would say of a call is said once."""
        return cls(generator.model, generator._tokenizer.required, generator._notices)

    def config(self, settings: LineSettings) -> GenerationConfig:
        """To be passed in the list ``generation_config``; of settings without a problem. Equal ones share it."""
        return self._good(settings).config

    def samples(self, settings: LineSettings) -> int:
        """How many sequences a record gets."""
        return self._good(settings).options.num_return_sequences

    def beams(self, settings: LineSettings) -> int:
        return self._good(settings).options.num_beams

    def problem(self, settings: LineSettings) -> str | None:
        found = self._of(settings)
        return found if isinstance(found, str) else None

    def _good(self, settings: LineSettings) -> _Made:
        found = self._of(settings)
        assert isinstance(found, _Made), found
        return found

    def _of(self, settings: LineSettings) -> _Made | str:
        key = (repr(sorted(settings.options.items())), settings.logprobs, settings.adapter)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._made(settings)
        return self._known[key]

    def _made(self, settings: LineSettings) -> _Made | str:
        try:
            rest = {name: value for name, value in settings.options.items() if name != "num_return_sequences"}
            config = GenerationConfig(**rest)
            # By itself it would be refused: that tokens are drawn may be said by the model's own config.
            config.num_return_sequences = settings.options.get("num_return_sequences")
            asked: dict[str, Any] = {} if settings.logprobs is None else {"logprobs": settings.logprobs}
            options = resolve_options(self._model, config, asked, None, self._notices)
            check_beams([options], self._notices)
            if settings.adapter is not None:
                adapter_of_each(self._model, settings.adapter, 1, self._notices)
            self._check_tokens(settings, options)
            if config.stop_strings is not None and not self._finds_strings:
                # Whether they can be found is the tokenizer's matter, and to find out takes seconds: once.
                rules_of(self._model, options, self._tokenizer, PreparedStopStrings())
                self._finds_strings = True
        except (torch.OutOfMemoryError, *_BROKEN):
            raise
        except Exception as error:  # transformers has no words of its own for many a wrong value
            known = isinstance(error, BatchLLMError | ValueError | TypeError)
            return ("" if known else f"has settings that cannot be used: {type(error).__name__}: ") + " ".join(
                str(error).split()
            )
        return _Made(config, options)

    def _check_tokens(self, settings: LineSettings, options: Options) -> None:
        said = settings.options
        named = {name: _integers(said.get(name), name == "sequence_bias") for name in _OF_TOKENS}
        named |= {name: _listed(said.get(name)) for name in _FORCED}
        if said.get("exponential_decay_length_penalty") is not None:
            named["eos_token_id"] = sorted(options.eos_token_ids)
        vocabulary = base_model(self._model).config.get_text_config(decoder=True).vocab_size
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocabulary:
                    raise ValueError(f"`{name}` has token {token}, outside the model's vocabulary of {vocabulary:,}")


def said_by(config: GenerationConfig) -> LineSettings:
    """What a GenerationConfig says, as settings that lines may win over."""
    return LineSettings({name: value for name, value in vars(config).items() if name in NAMES and value is not None})


def _integers(value: Any, biased: bool) -> list[int]:
    """Token ids in lists of lists; in those with a bias, it comes last."""
    if value is None:
        return []
    rows = [pair[0] for pair in value] if biased else value
    return [token for row in rows for token in row]


def _listed(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
