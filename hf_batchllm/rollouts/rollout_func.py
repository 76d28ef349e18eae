"""``rollout_func`` for TRL's GRPOTrainer: completions, and the log-probabilities that they were drawn with."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Unpack

from torch import nn

from ..config import BatchConfig
from ..generator import BatchGenerator
from ..inputs.config_fields import ConfigFields
from ..notices import Notices
from ..results.generations import Generation
from ..results.run_report import RunReport
from .equal_prompts import EqualPrompts
from .trl_package import generation_config_of, tokenized, unwrapped, warn_of_version


class _RolloutGenerator(BatchGenerator):
    _logprobs_of_scores = True  # as TRL compares them with those of its own pass, at the temperature of sampling
    _at_hand = False


class Rollouts:
    """Completions of a trainer's prompts, by the trainer's own model and with its options.

        trainer = GRPOTrainer(..., rollout_func=Rollouts(kv_memory="20GiB"))

    A prompt that stands in the list several times is computed once. Weights are the model's own: what the optimizer
    changed is seen at once, and nothing is copied or cast.

    logprobs: whether log-probabilities are taken down: those that the tokens were drawn with, after temperature and the
        like, which cost time on a GPU. TRL uses them beside vLLM alone.
    config, fields: as for BatchGenerator.
    last_report: how the last rollouts went.
    """

    def __init__(
        self, config: BatchConfig | None = None, *, logprobs: bool = True, **fields: Unpack[ConfigFields]
    ) -> None:
        self._config = BatchConfig.of(config, dict(fields))
        self._logprobs = logprobs
        self._generators: weakref.WeakKeyDictionary[Any, tuple[nn.Module, BatchGenerator]] = weakref.WeakKeyDictionary()
        self._notices = Notices()
        self.last_report: RunReport | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL's hook asks for. ``prompts``: texts or chats, each as often as it is to have completions."""
        prompt_ids = tokenized(trainer, prompts)
        completion_ids, logprobs = self.complete(prompt_ids, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def complete(
        self, prompt_ids: Sequence[Sequence[int]], trainer: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """A completion for each prompt in the list, its EOS included; and its log-probabilities, if they are wanted."""
        warn_of_version(self._notices)
        config = generation_config_of(trainer)
        equal = EqualPrompts.of(prompt_ids)
        with unwrapped(trainer) as model:
            generator = self._generator(trainer, model)
            try:
                result = generator.generate(
                    equal.prompts,
                    equal.configs(config),
                    logprobs=0 if self._logprobs else None,
                    progress=False,
                )
            finally:
                self.last_report = generator.last_report
        generations = equal.in_order(result)
        tokens = [list(generation.token_ids) for generation in generations]
        return tokens, [_chosen(generation) for generation in generations] if self._logprobs else None

    def _generator(self, trainer: Any, model: nn.Module) -> BatchGenerator:
        known = self._generators.get(trainer)
        if known is None or known[0] is not model:
            if known is not None:
                known[1].close()
            tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
            known = self._generators[trainer] = model, _RolloutGenerator(model, tokenizer, self._config)
        return known[1]


def _chosen(generation: Generation) -> list[float]:
    logprobs = generation.logprobs or []
    return [each[token] for each, token in zip(logprobs, generation.token_ids, strict=True)]


_DEFAULT = Rollouts()


def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """TRL's hook: ``GRPOTrainer(..., rollout_func=rollout_func)``. ``Rollouts`` has settings."""
    return _DEFAULT(prompts, trainer)
