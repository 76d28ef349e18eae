"""What is known of the inside of the package ``trl``, in the versions that the extra ``trl`` takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedOptionError
from ..notices import Notices

_TRIED = (1, 16)


def warn_of_version(notices: Notices) -> None:
    import trl

    major, minor = map(int, trl.__version__.split(".")[:2])
    if (major, minor) != _TRIED:
        notices(
            "trl",
            f"rollouts were tried with TRL {_TRIED[0]}.{_TRIED[1]}, and {trl.__version__} is here, whose hooks may "
            "differ: pip install 'hf-batchllm[trl]'",
        )


def generation_config_of(trainer: Any) -> Any:
    """What the trainer would pass to ``model.generate``."""
    if getattr(trainer, "use_vllm", False):
        raise UnsupportedOptionError(
            "use_vllm", "is True, and rollouts run on the trainer's own model here: leave it out"
        )
    return trainer.generation_config


def tokenized(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    """The prompts as the trainer itself encodes them: texts, or chats through its chat template."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    if has_images(images, fields):
        raise UnsupportedOptionError(
            "rollout_func", "was given prompts with images, which are not supported: leave it out"
        )
    return [list(ids) for ids in prompt_ids]


def has_images(images: Any, fields: Any) -> bool:
    """Whether there is more to the prompts than their tokens. ``fields``: what the tokenizer gave beside these."""
    return images is not None or any(
        "type_ids" not in name or any(bool(each) for row in rows for each in row)
        for name, rows in (fields or {}).items()
    )


@contextmanager
def unwrapped(trainer: Any) -> Iterator[nn.Module]:
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
