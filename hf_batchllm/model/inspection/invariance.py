"""What cannot be promised where answers must be the same to the last bit (``invariant=True``): refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ...config import BatchConfig
from ...errors import UnsupportedModelError
from ...inputs.base_model import base_model
from ...patches.fixed_experts import why_not_fixed
from ...patches.uncompiled import every_module
from ..attention.choose_backend import why_not_invariant
from .architecture import Architecture
from .user_warnings import place_of_hooks


def refuse_what_varies(model: nn.Module, architecture: Architecture, config: BatchConfig) -> None:
    """An error that names what stands in the way."""
    if not config.invariant:
        return
    why = next(_reasons(model, architecture, config), None)
    if why is not None:
        raise _refusal(why)


def refuse_calls_that_vary(
    config: BatchConfig, device: torch.device, *, images: bool, beams: bool, most_likely: int | None
) -> None:
    """images, beams: whether the call has some. most_likely: log-probabilities of more tokens are asked for than so
    many, which kernels find at a position."""
    if not config.invariant:
        return
    if images:
        raise _refusal("the vision tower reads as many images at once as fit, and what it gives depends on that")
    if beams and device.type != "cpu":
        raise _refusal("beams part in the midst of a page, and the kernels read whole pages: leave `num_beams` out")
    if most_likely is not None and device.type != "cpu":
        raise _refusal(
            f"on a GPU log-probabilities of more than {most_likely} tokens are added up in an order that depends on "
            f"the number of rows: ask for {most_likely} at most"
        )


def _refusal(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"`invariant=True` promises the same answers to the last bit, and here that cannot be done: {why}"
    )


def _reasons(model: nn.Module, architecture: Architecture, config: BatchConfig) -> Iterator[str]:
    inner, name = base_model(model), architecture.name
    modules = every_module(inner)
    if architecture.parts > 1:
        yield "several processes add up what each has computed"
    if architecture.states:
        yield f"{name} has layers that carry a state, which are computed in chunks of any length"
    if (place := place_of_hooks(inner, modules)) is not None:
        yield f"there are hooks on {place}, and what they compute may depend on what else is in a step"
    if architecture.own_code.found:
        yield f"there is code in {name} that is not transformers', and what it computes may depend on the step"
    if getattr(inner.config, "quantization_config", None) is not None:
        yield f"{name} is quantised, and its products may depend on how many rows there are"
    if (experts := why_not_fixed(model)) is not None:
        yield f"the experts of {name} cannot be run one by one: {experts}"
    if inner.training and any(isinstance(each, nn.Dropout) and each.p > 0 for each in modules):
        yield f"{name} is in training mode, with dropout: call model.eval() first"
    if architecture.device.type != "cpu" and inner.get_input_embeddings().weight.dtype == torch.float32:
        yield (
            f"{name} is in float32, and a GPU adds up its products in an order that depends on the number of rows: "
            "load it with dtype=torch.bfloat16 or torch.float16"
        )
    # The last: on a new card the kernels are checked for it.
    if (lacking := why_not_invariant(config, architecture.device)) is not None:
        yield lacking
