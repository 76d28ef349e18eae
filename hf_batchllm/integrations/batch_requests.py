"""The requests of ``model.generate_batch`` and of transformers' manager, as prompts of a BatchGenerator."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..errors import UnsupportedOptionError
from ..inputs.base_model import base_model
from ..inputs.config_names import without_foreign_names
from ..results.generations import Generation

_SAMPLING = {"temperature": float, "top_k": int, "top_p": float}  # options that a request may have by itself


@dataclass(eq=False)
class BatchRequest:
    """``request_id``, and the ids of the request's further samples, are those that transformers gives."""

    request_id: str
    ids: Any  # as passed
    samples: int
    max_new_tokens: int | None = None  # this, and what follows, wins over the config of all requests
    eos_token_id: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.perf_counter)

    @property
    def output_ids(self) -> list[str]:
        """One for each sample, in transformers' order: the request's own comes last."""
        return [*(f"{self.request_id}__child#{place}" for place in range(self.samples - 1)), self.request_id]

    def output_id(self, sample: int) -> str:
        return self.output_ids[sample - 1]

    def output(self, generation: Generation, sample: int, began: float) -> GenerationOutput:
        logprobs = generation.logprobs or []
        return GenerationOutput(
            request_id=self.output_id(sample),
            prompt_ids=list(generation.prompt_token_ids) or self._prompt(),
            generated_tokens=list(generation.token_ids),
            logprobs=[each[token] for each, token in zip(logprobs, generation.token_ids, strict=bool(logprobs))],
            error=generation.error,
            status=RequestStatus.FINISHED if generation.error is None else RequestStatus.FAILED,
            created_time=self.created,
            lifespan=(began, time.perf_counter()),
        )

    def failed(self, output_id: str, why: str, began: float = -1) -> GenerationOutput:
        return GenerationOutput(
            request_id=output_id,
            prompt_ids=self._prompt(),
            error=why,
            status=RequestStatus.FAILED,
            created_time=self.created,
            lifespan=(began, time.perf_counter()),
        )

    def _prompt(self) -> list[int]:
        try:
            return [int(token) for token in self.ids]
        except (TypeError, ValueError):  # it is no prompt
            return []


class RequestConfigs:
    """What each request is generated with.

    ``generate_batch`` reads its GenerationConfig alone: what is None there means nothing, whatever the model's own
    config says. ``given`` is that config.
    """

    def __init__(self, given: GenerationConfig, positions: int | None, per_request: bool = False) -> None:
        self.given = given
        self.samples = given.num_return_sequences or 1
        self._positions = positions
        self._per_request = per_request  # as in the ContinuousBatchingConfig: requests may sample in their own way
        self._known: dict[Any, GenerationConfig] = {}

    @property
    def copies_samples(self) -> bool:
        """Greedy samples of a prompt are equal: they are computed once."""
        return self.samples > 1 and not self.given.do_sample and (self.given.num_beams or 1) == 1

    def of(self, request: BatchRequest) -> GenerationConfig:
        """For equal requests the same object."""
        limit = request.max_new_tokens if request.max_new_tokens is not None else self.given.max_new_tokens
        if limit is None and self.given.max_length is None:
            limit = self._room(request)
        eos = self.given.eos_token_id if request.eos_token_id is None else request.eos_token_id
        key = limit, str(eos), tuple(sorted(request.sampling.items()))
        if key not in self._known:
            self._known[key] = self._made(limit, eos, request.sampling)
        return self._known[key]

    def problem(self, request: BatchRequest) -> str | None:
        """Why the request asks for something that it cannot have, in transformers' terms."""
        for name, value in request.sampling.items():
            if name not in _SAMPLING:
                return f"`{name}` is not an option of a single request: put it into the generation_config"
            if not self._per_request:
                return f"`{name}` of a single request needs `per_request_processors=True` in the batching config"
            if not isinstance(value, _SAMPLING[name]):
                return f"`{name}` must be {_SAMPLING[name].__name__}, not {type(value).__name__}"
        return None

    def _room(self, request: BatchRequest) -> int:
        """Without any limit, answers end where the model's positions do."""
        if self._positions is None:
            why = "is not set, and the model's config says nothing of its positions, so no answer would have to end"
            raise UnsupportedOptionError("max_new_tokens", why)
        return max(self._positions - len(request.ids), 1)

    def _made(self, limit: int | None, eos: Any, sampling: dict[str, Any]) -> GenerationConfig:
        config: GenerationConfig = copy.copy(without_foreign_names(self.given))
        config.continuous_batching_config = None  # is about transformers' own engine
        config.max_new_tokens = limit
        config.eos_token_id = _real(eos)
        for name, value in sampling.items():
            setattr(config, name, value)
        if config.do_sample and config.top_k is None:
            config.top_k = 0  # generate's default would be 50
        if self.copies_samples:
            config.num_return_sequences = 1
        return config


def _real(eos: Any) -> Any:
    """EOS tokens without -1, which stands for none in transformers."""
    tokens = eos.tolist() if hasattr(eos, "tolist") else eos
    if isinstance(tokens, list | tuple):
        return [token for token in tokens if token >= 0] or None
    return None if tokens is None or tokens < 0 else tokens


def without_own_defaults(model: nn.Module, configs: Sequence[GenerationConfig]) -> nn.Module:
    """A shallow copy of the model, for checks alone, whose own GenerationConfig adds nothing to ``configs``."""
    inner = base_model(model)
    alike = copy.copy(inner)
    distinct = list({id(config): config for config in configs}.values())
    own = {
        name: value
        for name, value in vars(inner.generation_config).items()
        if value is not None and all(getattr(config, name, None) == value for config in distinct)
    }
    alike.generation_config = GenerationConfig()
    vars(alike.generation_config).update(own)  # what they repeat is not the caller's wish
    return alike


def outputs_of(
    generations: Iterator[Generation], requests: Sequence[BatchRequest], configs: RequestConfigs, began: float
) -> Iterator[GenerationOutput]:
    for generation in generations:
        request = requests[generation.index]
        samples = range(request.samples) if configs.copies_samples else [generation.sample]
        for sample in samples:
            yield request.output(generation, sample, began)
