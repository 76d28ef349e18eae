"""What runs the records of a file: a generator of this process, or a pool of several.

What has to look at the model is a function of a generator. A pool has one of its workers call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import GenerationConfig

from ..generator import BatchGenerator
from ..inputs.adapters import active_adapters
from ..inputs.base_model import base_model
from ..inputs.config_names import with_known_names
from ..inputs.images.image_reader import ImageReader
from ..inputs.long_prompts import context_of
from ..inputs.prompts import check_prompts
from ..model.fingerprint import fingerprint
from ..pool.generator_pool import GeneratorPool
from ..results.generations import Generation
from ..results.run_report import RunReport
from .records.line_configs import LineConfig, line_config
from .records.setting_names import NAMES
from .records.settings import GenerationSettings

_LARGE = (4096, 4096)  # pixels of a picture that processors make smaller


@dataclass(frozen=True)
class ModelFacts:
    """``state``: what else results depend on, which a notebook may change between calls."""

    name: str
    dtype: str
    context: int | None  # tokens that it was made for
    state: dict[str, Any]


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

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Digests of the model and its tokenizer."""
        found: dict[str, str] = self.ask(_fingerprint)
        return found

    @cached_property
    def tokenizer(self) -> Any:
        """For the texts of tokens; None if there is none on this machine."""
        return self.ask(_tokenizer)

    @cached_property
    def most_of_an_image(self) -> int:
        """Bytes of memory that the processor makes of a picture, however large it is; 0 if it makes none."""
        most: int = self.ask(_most_of_an_image)
        return most

    def known_config(self, config: GenerationConfig) -> GenerationConfig:
        """``config`` with names from elsewhere in the words of transformers."""
        known: GenerationConfig = self.ask(_known_config, config)
        return known

    def resolved(self, settings: GenerationSettings) -> LineConfig | str:
        """What comes of the settings of a line; or why the model cannot use them."""
        if isinstance(self.gen, BatchGenerator):
            return line_config(self.gen, settings)  # it remembers them itself
        key = settings.resolution_key
        if key not in self._known:
            self._known[key] = self.ask(line_config, settings)
        return self._known[key]

    @contextmanager
    def stream(
        self,
        prompts: Sequence[Any],
        configs: Sequence[GenerationConfig],
        seeds: Sequence[int],
        on_error: str,
        progress: bool,
        name: Callable[[int], str],
        options: dict[str, Any],
    ) -> Iterator[Iterator[Generation]]:
        """``name``: of a prompt, in warnings."""
        given = {"seed": list(seeds), "on_error": on_error, "progress": progress, **options}
        if isinstance(self.gen, BatchGenerator):
            with self.gen._notices.naming(name):
                stream: Any = self.gen.stream(prompts, configs, **given)
        else:
            stream = self.gen._stream_named([name(place) for place in range(len(prompts))], prompts, configs, **given)
        with closing(stream):
            yield stream

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


def _fingerprint(generator: BatchGenerator) -> dict[str, str]:
    loaded: dict[str, str] | None = getattr(generator, "loaded", None)  # of a pool's worker
    return loaded or fingerprint(generator.model, generator._tokenizer.found())


def _tokenizer(generator: BatchGenerator) -> Any:
    return generator._tokenizer.found()


def _most_of_an_image(generator: BatchGenerator) -> int:
    from PIL import Image

    chat = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", _LARGE)}]}]
    prompts, _ = check_prompts([chat], tokenizer=generator._tokenizer.required, images=ImageReader(generator.model))
    images = [image for prompt in prompts if prompt and prompt.images for image in prompt.images.images]
    return sum(tensor.nbytes for image in images for tensor in image.inputs.values())


def _known_config(generator: BatchGenerator, config: GenerationConfig) -> GenerationConfig:
    return with_known_names(config, base_model(generator.model).generation_config, generator._notices) or config
