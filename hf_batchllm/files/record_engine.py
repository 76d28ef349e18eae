"""What runs the records of a file: a generator of this process, or a pool of several.

What has to look at the model is a function of a generator. A pool has one of its workers call it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import BatchLLMError
from ..generator import BatchGenerator
from ..inputs.adapters import active_adapters, adapter_of_each
from ..inputs.base_model import base_model
from ..inputs.config_names import with_known_names
from ..inputs.images.image_reader import ImageReader
from ..inputs.option_conflicts import check_beams
from ..inputs.options import Options
from ..inputs.preparing import bars_wanted
from ..inputs.prompt_lengths import context_of
from ..inputs.prompts import check_prompts
from ..inputs.resolve_options import resolve_options
from ..model.inspection.fingerprint import fingerprint
from ..notices import Notices
from ..pool.generator_pool import GeneratorPool
from ..results.generations import Generation
from ..results.run_report import RunReport
from .settings import NAMES, GenerationSettings

_LARGE = (4096, 4096)  # pixels of a picture that processors make smaller
_MOST_REMEMBERED = 4096  # combinations of settings
_DEVICE_ERRORS = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))  # no setting is to blame


@dataclass(frozen=True)
class ModelFacts:
    """``state``: what else results depend on, which a notebook may change between calls."""

    name: str
    dtype: str
    context: int | None  # tokens that it was made for
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineConfig:
    """``samples``, ``beams``: with the defaults of the model's own config."""

    config: GenerationConfig
    samples: int  # sequences of a record
    beams: int


class RecordEngine:
    def __init__(self, gen: BatchGenerator | GeneratorPool) -> None:
        self.gen = gen
        self._known: dict[Any, LineConfig | str] = {}

    def ask(self, function: Callable[..., Any], *given: Any) -> Any:
        """``function(generator, *given)``."""
        return function(self.gen, *given) if isinstance(self.gen, BatchGenerator) else self.gen._ask(function, *given)

    @cached_property
    def facts(self) -> ModelFacts:
        facts: ModelFacts = self.ask(_facts)
        return facts

    # As a ``Model`` of ``run.py``, which is there already

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": self.facts.name, "dtype": self.facts.dtype, **self.facts.state}

    def expect(self, *given: Any) -> None:
        """The run itself shows what it cannot answer."""

    def ready(self, report: object) -> AbstractContextManager[RecordEngine]:
        return nullcontext(self)

    # Asked of the model

    @cached_property
    def most_of_an_image(self) -> int:
        """Bytes of memory that the processor makes of a picture, however large it is; 0 if it makes none."""
        most: int = self.ask(_most_of_an_image)
        return most

    def resolved(self, settings: GenerationSettings) -> LineConfig | str:
        """What comes of the settings of a line; or why the model cannot use them. Equal settings share one config."""
        key = settings.resolution_key
        if key not in self._known:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[key] = self.ask(line_config, settings)
        return self._known[key]

    def stream(
        self, prompts: Sequence[Any], names: Sequence[str], configs: Sequence[GenerationConfig], **options: Any
    ) -> Generator[Generation, None, None]:
        """``names``: of the prompts, in warnings."""
        with self.gen._notices.naming(names):
            stream: Any = self.gen.stream(prompts, configs, **options)
        found: Generator[Generation, None, None] = stream
        return found

    @property
    def last_report(self) -> RunReport | None:
        return self.gen.last_report

    def close(self) -> None:
        self.gen.close()


def _facts(generator: BatchGenerator) -> ModelFacts:
    inner = base_model(generator.model)
    config = {} if inner.generation_config is None else inner.generation_config.to_diff_dict()
    return ModelFacts(
        name=getattr(inner.config, "_name_or_path", "") or type(inner).__name__,
        dtype=str(inner.dtype).removeprefix("torch."),
        context=context_of(inner.config),
        state={
            "generation_config": {name: value for name, value in config.items() if name in NAMES and value is not None},
            "active_adapters": sorted(active_adapters(generator.model)) or None,
        },
    )


def fingerprint_of(generator: BatchGenerator) -> dict[str, str]:
    """Digests of the model and its tokenizer."""
    loaded: dict[str, str] | None = getattr(generator, "loaded", None)  # of a pool's worker
    return loaded or fingerprint(generator.model, generator._tokenizer.found())


def tokenizer_of(generator: BatchGenerator) -> Any:
    """For the texts of tokens; None if there is none on this machine."""
    return generator._tokenizer.found()


def _most_of_an_image(generator: BatchGenerator) -> int:
    from PIL import Image

    chat = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", _LARGE)}]}]
    prompts, _ = check_prompts([chat], tokenizer=generator._tokenizer.required, images=ImageReader(generator.model))
    images = [image for prompt in prompts if prompt and prompt.images for image in prompt.images.images]
    return sum(tensor.nbytes for image in images for tensor in image.inputs.values())


def known_config(generator: BatchGenerator, config: GenerationConfig) -> GenerationConfig:
    """``config`` with names from elsewhere in the words of transformers."""
    return with_known_names(config, base_model(generator.model).generation_config, generator._notices) or config


# -- settings of a line ------------------------------------------------------------------------------------------------


def line_config(
    generator: BatchGenerator, settings: GenerationSettings, notices: Notices | None = None
) -> LineConfig | str:
    """A config for a kind of settings, checked against the model before a line is run; or why it cannot use them.

    One bad value must not stop a call with a million good lines.
    """
    model, notices = generator.model, notices or generator._notices
    try:
        rest = {name: value for name, value in settings.options.items() if name != "num_return_sequences"}
        config = GenerationConfig(**rest)
        # Set afterwards: without `do_sample`, which the model's own config may have, it would be refused.
        config.num_return_sequences = settings.options.get("num_return_sequences")
        asked: dict[str, Any] = {} if settings.logprobs is None else {"logprobs": settings.logprobs}
        options = resolve_options(model, config, asked, None, notices)
        check_beams([options])
        if settings.adapter is not None:
            adapter_of_each(model, settings.adapter, 1, notices)
        _check_tokens(generator, settings.options, options)
        if config.stop_strings is not None:
            generator._checks.rules.of(options)
    except (torch.OutOfMemoryError, *_DEVICE_ERRORS):
        raise
    except Exception as error:  # transformers fails in many ways on a wrong value
        known = isinstance(error, BatchLLMError | ValueError | TypeError)
        return ("" if known else f"has settings that cannot be used: {type(error).__name__}: ") + " ".join(
            str(error).split()
        )
    return LineConfig(config, options.num_return_sequences, options.num_beams)


def _check_tokens(generator: BatchGenerator, given: Any, options: Options) -> None:
    """Those that transformers would refuse in the middle of a call."""
    named = {
        "sequence_bias": [token for tokens, _ in given.get("sequence_bias") or () for token in tokens],
        "bad_words_ids": [token for tokens in given.get("bad_words_ids") or () for token in tokens],
        **{name: _listed(given.get(name)) for name in ("forced_bos_token_id", "forced_eos_token_id")},
        "eos_token_id": sorted(options.eos_token_ids) if given.get("exponential_decay_length_penalty") else [],
    }
    vocabulary = base_model(generator.model).config.get_text_config(decoder=True).vocab_size
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"`{name}` has token {token}, outside the model's vocabulary of {vocabulary:,}")


def _listed(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def problem_in_silence(generator: BatchGenerator, settings: GenerationSettings) -> str | None:
    """Why the model cannot use these settings. Without warnings: lines may bring settings that these lack."""
    with bars_wanted(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = line_config(generator, settings, Notices())
    return found if isinstance(found, str) else None


def settings_in_config(config: GenerationConfig) -> GenerationSettings:
    """The fields that are set in a GenerationConfig, as settings that those of lines override."""
    return GenerationSettings(
        {name: value for name, value in vars(config).items() if name in NAMES and value is not None}
    )
