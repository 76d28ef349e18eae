"""Settings of lines -> GenerationConfigs, checked against the model before a line is run.

One bad value must not stop a call with a million good lines, so each combination of settings is checked by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import GenerationConfig

from ...errors import BatchLLMError
from ...inputs.adapters import adapter_of_each
from ...inputs.base_model import base_model
from ...inputs.option_conflicts import check_beams
from ...inputs.options import Options
from ...inputs.preparing import bars_wanted
from ...inputs.resolve_options import resolve_options
from ...notices import Notices
from ...sampling.stop_rules import rules_of
from ...sampling.stop_strings import PreparedStopStrings
from .setting_names import NAMES
from .settings import GenerationSettings, ResolutionKey

if TYPE_CHECKING:
    from ...generator import BatchGenerator


_MOST_REMEMBERED = 4096  # combinations of settings
_TOKEN_SEQUENCES = ("sequence_bias", "bad_words_ids")  # transformers would refuse bad ids in the middle of a call
_DEVICE_ERRORS = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))  # no setting is to blame
_FORCED_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")


@dataclass(frozen=True, slots=True)
class LineConfig:
    """``samples``, ``beams``: with the defaults of the model's own config."""

    config: GenerationConfig
    samples: int  # sequences of a record
    beams: int


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
        self._known: dict[ResolutionKey, LineConfig | str] = {}
        self._finds_strings = False

    @classmethod
    def of(cls, generator: BatchGenerator, notices: Notices | None = None) -> LineConfigs:
        """Shares the generator's stop strings, and its notices, so that each of them is given once."""
        notices = notices or generator._notices
        return cls(generator.model, generator._tokenizer.required, notices, generator._checks.known_strings)

    def resolve(self, settings: GenerationSettings) -> LineConfig | str:
        """What comes of them; or why the model cannot use them. Equal settings share one config."""
        key = settings.resolution_key
        if key not in self._known:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[key] = self._resolve_anew(settings)
        return self._known[key]

    def _resolve_anew(self, settings: GenerationSettings) -> LineConfig | str:
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
        return LineConfig(config, options.num_return_sequences, options.num_beams)

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


_OF: WeakKeyDictionary[BatchGenerator, LineConfigs] = WeakKeyDictionary()


def line_config(generator: BatchGenerator, settings: GenerationSettings) -> LineConfig | str:
    """As ``LineConfigs.resolve``, with what the generator's earlier lines had."""
    if generator not in _OF:
        _OF[generator] = LineConfigs.of(generator)
    return _OF[generator].resolve(settings)


class _Silence(Notices):
    def __call__(self, kind: str, message: str) -> None:
        pass


def problem_in_silence(generator: BatchGenerator, settings: GenerationSettings) -> str | None:
    """Why the model cannot use these settings. Without warnings: lines may bring settings that these lack."""
    with bars_wanted(False):
        found = LineConfigs.of(generator, _Silence()).resolve(settings)
    return found if isinstance(found, str) else None


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
