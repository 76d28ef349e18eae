"""Rollouts of TRL's GRPOTrainer: ``rollout_func`` for its hook, ``RolloutMixin`` for tools and environments."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import nn
from transformers import GenerationConfig

from .config import BatchConfig
from .errors import UnsupportedOptionError
from .generator import DoorGenerator
from .inputs.config_fields import ConfigFields
from .notices import Notices
from .results.generations import Generation
from .results.run_report import RunReport

__all__ = ["RolloutMixin", "Rollouts", "rollout_func"]

_TRIED = "1.16"  # of TRL, whose inside is known here


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
        self._generators: weakref.WeakKeyDictionary[Any, tuple[nn.Module, DoorGenerator]] = weakref.WeakKeyDictionary()
        self._notices = Notices()
        self.last_report: RunReport | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL's hook asks for. ``prompts``: texts or chats, each as often as it is to have completions."""
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)  # as the trainer itself encodes them
        if _has_images(images, fields):
            why = "was given prompts with images, which are not supported: leave it out"
            raise UnsupportedOptionError("rollout_func", why)
        prompt_ids = [list(ids) for ids in prompt_ids]
        completion_ids, logprobs = self.complete(prompt_ids, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def complete(
        self, prompt_ids: Sequence[Sequence[int]], trainer: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """A completion for each prompt in the list, its EOS included; and its log-probabilities, if they are wanted."""
        self._check(trainer)
        places: dict[tuple[int, ...], list[int]] = {}  # where each different prompt stands in the list
        for place, ids in enumerate(prompt_ids):
            places.setdefault(tuple(ids), []).append(place)
        configs = _with_samples(trainer.generation_config, list(map(len, places.values())))
        with _unwrapped(trainer) as model:
            generator = self._generator(trainer, model)
            try:
                # After temperature and processors, as TRL compares them with those of its own pass.
                logprobs = 0 if self._logprobs else None
                result = generator.generate(list(map(list, places)), configs, logprobs=logprobs, progress=False)
            finally:
                self.last_report = generator.last_report
        found: dict[int, Generation] = {}
        for mine, samples in zip(places.values(), result.by_prompt, strict=True):
            found |= {place: samples[number % len(samples)] for number, place in enumerate(mine)}
        completions = [found[place] for place in range(len(prompt_ids))]
        tokens = [list(one.token_ids) for one in completions]
        if not self._logprobs:
            return tokens, None
        both = (zip(one.logprobs or [], one.token_ids, strict=True) for one in completions)
        return tokens, [[values[token] for values, token in one] for one in both]

    def _check(self, trainer: Any) -> None:
        import trl

        if trl.__version__.split(".")[:2] != _TRIED.split("."):
            self._notices(
                "trl",
                f"rollouts were tried with TRL {_TRIED}, and {trl.__version__} is here, whose hooks may differ: "
                "pip install 'hf-batchllm[trl]'",
            )
        if getattr(trainer, "use_vllm", False):
            why = "is True, and rollouts run on the trainer's own model here: leave it out"
            raise UnsupportedOptionError("use_vllm", why)

    def _generator(self, trainer: Any, model: nn.Module) -> DoorGenerator:
        known = self._generators.get(trainer)
        if known is None or known[0] is not model:
            if known is not None:
                known[1].close()
            tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
            known = self._generators[trainer] = model, DoorGenerator(model, tokenizer, self._config)
        return known[1]


class RolloutMixin:
    """Put before GRPOTrainer, it makes completions where the trainer would call ``model.generate``.

        class Trainer(RolloutMixin, GRPOTrainer):
            rollouts = Rollouts(kv_memory="20GiB", logprobs=False)      # if other settings are wanted

        Trainer(model, tools=[...], environment_factory=...)

    Every turn is made so, those between calls of tools included. Prompts with images go the trainer's own way, with a
    warning.
    """

    rollouts = Rollouts(logprobs=False)  # TRL looks at them beside vLLM alone
    _notices = Notices()

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _has_images(images, multimodal_fields):
            return self.rollouts.complete(prompt_ids, self)
        self._notices("images", "prompts with images are not supported: the trainer's own generation runs instead")
        own: Any = super()
        return own._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)


_DEFAULT = Rollouts()


def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """TRL's hook: ``GRPOTrainer(..., rollout_func=rollout_func)``. ``Rollouts`` has settings."""
    return _DEFAULT(prompts, trainer)


def _with_samples(config: GenerationConfig, counts: Sequence[int]) -> list[GenerationConfig]:
    """The config with so many samples for each prompt; one where samples would be equal. Equal ones are one object."""
    made = {count: copy.copy(config) for count in set(counts)}
    for count, each in made.items():
        each.num_return_sequences = count if config.do_sample else 1
    return [made[count] for count in counts]


def _has_images(images: Any, fields: Any) -> bool:
    """Whether there is more to the prompts than their tokens. ``fields``: what the tokenizer gave beside these."""
    return images is not None or any(
        "type_ids" not in name or any(bool(each) for row in rows for each in row)
        for name, rows in (fields or {}).items()
    )


@contextmanager
def _unwrapped(trainer: Any) -> Iterator[nn.Module]:
    """The model as the trainer takes it for ``generate``: without gradient checkpointing, wrappers and gradients."""
    from trl.models import unwrap_model_for_generation

    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
    ):
        yield model
