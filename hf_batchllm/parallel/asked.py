"""What all ranks ask for, and what cannot be asked of a model that they have together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..config import BatchConfig
from ..engine.job import Job
from ..errors import UnsupportedModelError, UnsupportedOptionError
from ..inputs.base_model import base_model
from ..inputs.plain_values import plain, plain_options
from ..patches.uncompiled import every_module
from .group import digest


def asked_for(job: Job, config: BatchConfig) -> dict[str, bytes]:
    """What all ranks have to ask for, by its name in words."""
    if any(each.config.guidance_scale not in (None, 1) for each in dict.fromkeys(job.options)):
        raise UnsupportedOptionError(
            "guidance_scale", "is not supported for a model that several processes have together: load it whole"
        )
    forms = None if job.grammars is None else plain(job.grammars.each)
    seed = None if job.seed_is_drawn else job.seed
    asked = job.places, job.max_new_tokens, seed, job.seed_is_drawn, job.runs, job.widths, job.can_stop, forms
    return {
        "prompts": digest(prompt.keys.tobytes() + repr(prompt.key).encode() for prompt in job.prompts),
        "options": digest([repr(asked).encode(), repr(plain_options(job.options)).encode()]),
        # Those of the user's run in the leader alone: they may hold what no other has, such as when they were made.
        "attributes of logits processors or stopping criteria": digest(
            [repr(plain_options(job.options, held="transformers.")).encode()]
        ),
        "settings of their BatchGenerator": digest([repr(plain(vars(config))).encode()]),
    }


def refusing_the_model(model: nn.Module, size: int) -> Callable[[], Any]:
    """Contexts for code of the user's, which runs in the leader alone: the model would wait for its other parts."""
    inner = base_model(model)
    parts = {id(each) for each in every_module(inner)}

    def refuse(module: nn.Module, given: Any) -> None:
        if id(module) in parts:
            raise UnsupportedModelError(
                f"{type(inner).__name__} is spread over {size} processes, and code of yours ran it in one of them "
                "between two steps, where the others do not: logits processors, stopping criteria, streamers and "
                "schedulers cannot run such a model"
            )

    return partial(register_module_forward_pre_hook, refuse)  # its handle is a context
