"""Settings of lines -> GenerationConfigs, checked against the model before a line is run.

One bad value must not stop a call with a million good lines, so each combination of settings is checked by itself.
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
from ...inputs.options import Options
from ...inputs.resolve_options import resolve_options
from ...notices import Notices
from ...sampling.stop_rules import rules_of
from ...sampling.stop_strings import PreparedStopStrings
from .setting_names import NAMES
from .settings import GenerationSettings

if TYPE_CHECKING:
    from ...generator import BatchGenerator


_MOST_REMEMBERED = 4096  # combinations of settings
_TOKEN_SEQUENCES = ("sequence_bias", "bad_words_ids")  # transformers would refuse bad ids in the middle of a call
_DEVICE_ERRORS = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))  # no setting is to blame
_FORCED_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")
Key = tuple[str, int | None, str | None]


@dataclass(frozen=True, slots=True)
class _Resolved:
    config: GenerationConfig
    options: Options  # with the defaults of the model's own config


class LineConfigs:
    """``tokenizer`` returns the tokenizer, or raises; it is called for stop strings."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Callable[[], Any],
        notices: Notices | None = None,
        strings: PreparedStopStrings | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._notices = notices or Notices()
        self._strings = strings or PreparedStopStrings()
        self._known: dict[Key, _Resolved | str] = {}
        self._finds_strings = False

    @classmethod
    def of(cls, generator: BatchGenerator) -> LineConfigs:
        """Shares the generator's notices, so that each of them is given once, and its stop strings."""
        strings = generator._checks.known_strings
        return cls(generator.model, generator._tokenizer.required, generator._notices, strings)

    def config(self, settings: GenerationSettings) -> GenerationConfig:
        """For settings without a problem. Equal settings share one config."""
        return self._resolved(settings).config

    def samples(self, settings: GenerationSettings) -> int:
        """How many sequences a record gets."""
        return self._resolved(settings).options.num_return_sequences

    def beams(self, settings: GenerationSettings) -> int:
        return self._resolved(settings).options.num_beams

    def problem(self, settings: GenerationSettings) -> str | None:
        """Why the model cannot use these settings; None if it can."""
        resolved = self._resolve(settings)
        return resolved if isinstance(resolved, str) else None

    def _resolved(self, settings: GenerationSettings) -> _Resolved:
        resolved = self._resolve(settings)
        assert isinstance(resolved, _Resolved), resolved
        return resolved

    def _resolve(self, settings: GenerationSettings) -> _Resolved | str:
        key = (repr(sorted(settings.options.items())), settings.logprobs, settings.adapter)
        if key not in self._known:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[key] = self._resolve_anew(settings)
        return self._known[key]

    def _resolve_anew(self, settings: GenerationSettings) -> _Resolved | str:
        try:
            rest = {name: value for name, value in settings.options.items() if name != "num_return_sequences"}
            config = GenerationConfig(**rest)
            # Set afterwards: without `do_sample`, which the model's own config may have, it would be refused.
            config.num_return_sequences = settings.options.get("num_return_sequences")
            asked: dict[str, Any] = {} if settings.logprobs is None else {"logprobs": settings.logprobs}
            options = resolve_options(self._model, config, asked, None, self._notices)
            check_beams([options])
            if settings.adapter is not None:
                adapter_of_each(self._model, settings.adapter, 1, self._notices)
            self._check_tokens(settings, options)
            if config.stop_strings is not None and not self._finds_strings:
                # Whether they can be found depends on the tokenizer alone: one check is enough.
                rules_of(self._model, options, self._tokenizer, self._strings)
                self._finds_strings = True
        except (torch.OutOfMemoryError, *_DEVICE_ERRORS):
            raise
        except Exception as error:  # transformers fails in many ways on a wrong value
            known = isinstance(error, BatchLLMError | ValueError | TypeError)
            return ("" if known else f"has settings that cannot be used: {type(error).__name__}: ") + " ".join(
                str(error).split()
            )
        return _Resolved(config, options)

    def _check_tokens(self, settings: GenerationSettings, options: Options) -> None:
        given = settings.options
        named = {name: _ids_in_rows(given.get(name), name == "sequence_bias") for name in _TOKEN_SEQUENCES}
        named |= {name: _listed(given.get(name)) for name in _FORCED_TOKENS}
        if given.get("exponential_decay_length_penalty") is not None:
            named["eos_token_id"] = sorted(options.eos_token_ids)
        vocabulary = base_model(self._model).config.get_text_config(decoder=True).vocab_size
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocabulary:
                    raise ValueError(f"`{name}` has token {token}, outside the model's vocabulary of {vocabulary:,}")


def settings_in_config(config: GenerationConfig) -> GenerationSettings:
    """The fields that are set in a GenerationConfig, as settings that those of lines override."""
    given = {name: value for name, value in vars(config).items() if name in NAMES and value is not None}
    return GenerationSettings(given)


def _ids_in_rows(value: Any, biased: bool) -> list[int]:
    """Token ids in a list of lists. ``biased``: each list is a pair [token ids, bias]."""
    if value is None:
        return []
    rows = [pair[0] for pair in value] if biased else value
    return [token for row in rows for token in row]


def _listed(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
