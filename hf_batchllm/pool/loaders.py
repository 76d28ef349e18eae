"""What loads the model in a worker: by path or name, or by a function of the user's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import BatchConfig
from ..errors import ConfigError
from ..inputs.tokenizer import check_tokenizer
from ..wording import a_kind

if TYPE_CHECKING:
    from torch import nn

    from .part_generator import PartGenerator

_MODEL_IS = "a path or name for from_pretrained, or a function that loads the model and returns it"


@dataclass(frozen=True)
class ByName:
    """``options``: of from_pretrained. ``processes``: how many have the model together."""

    name: str
    options: Mapping[str, Any]
    processes: int

    def __call__(self) -> Any:
        from transformers import AutoModelForCausalLM

        given: dict[str, Any] = {"dtype": "auto"}
        if self.processes > 1:
            from transformers.distributed.configuration_utils import DistributedConfig

            given["distributed_config"] = DistributedConfig(tp_size=self.processes)
        return AutoModelForCausalLM.from_pretrained(self.name, **{**given, **self.options}).eval()


@dataclass(frozen=True)
class LoadGenerator:
    """Makes a worker's generator. ``load``: gives a model, or a model and its tokenizer."""

    load: Callable[[], Any]
    tokenizer: Any  # an object, a path or name, or None
    config: BatchConfig
    processes: int  # that have the model together, each a part of it

    @property
    def device(self) -> str:
        """For torch: a worker sees its own GPUs alone, and one on the CPU sees none."""
        return "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"

    def __call__(self) -> PartGenerator:
        from ..model.inspection.fingerprint import fingerprint
        from .part_generator import PartGenerator

        model, tokenizer = load_in_worker(self.load, self.tokenizer, self.device)
        spread = getattr(model, "_tp_size", None) or 1
        if spread != self.processes:
            has = "a whole model" if spread == 1 else f"a model in {spread} parts"
            raise ConfigError(
                f"`tp` is {self.processes}, and the function that loads the model returned {has}: pass "
                f"`distributed_config=DistributedConfig(tp_size={self.processes})` to its from_pretrained "
                "(from transformers.distributed)"
            )
        made = PartGenerator(model, tokenizer, self.config)
        made.loaded = fingerprint(model, made._tokenizer.found(), made._said_by_all)
        return made


def load_in_worker(load: Callable[[], Any], tokenizer: Any, device: str) -> tuple[nn.Module, Any]:
    """The model, on its device, and its tokenizer. ``load``, ``tokenizer``: as for LoadGenerator."""
    import torch
    from torch import nn
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # as many as there are workers would be drawn over each other
    try:
        made = load()
    finally:
        if had_bars:
            logging.enable_progress_bar()
    if isinstance(made, tuple) and len(made) == 2:
        made, own = made
        tokenizer = own if tokenizer is None else tokenizer
    if not isinstance(made, nn.Module):
        raise ConfigError(f"the function that loads the model returned {a_kind(made)}: it must return a model")
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    whole = (getattr(made, "_tp_size", None) or 1) == 1  # parts have been loaded where they belong
    if device != "cpu" and whole and all(each.device.type == "cpu" for each in made.parameters()):
        made = made.to(torch.device(device))
    return made, tokenizer


def loader_for(
    model: Any, options: Mapping[str, Any] | None, call: str = "GeneratorPool({})", processes: int = 1
) -> Callable[[], Any]:
    """What gives the model in each worker; ConfigError for what cannot be sent there.

    call: as users write it. processes: how many have the model together; a user's function sees to that itself.
    """
    from torch import nn

    if isinstance(model, str | os.PathLike):
        return ByName(os.fspath(model), dict(options or {}), processes)
    if options:
        raise ConfigError("`model_options` go with a path or name: a function loads the model with its own")
    if isinstance(model, nn.Module):
        name = getattr(getattr(model, "config", None), "_name_or_path", "") or "path/or/name"
        raise ConfigError(
            "the model is loaded in processes of their own, and this one is in this process: pass where it comes "
            f"from, as in {call.format(repr(name))}, or a function that loads it "
            "(for changed weights, save_pretrained first)"
        )
    if not callable(model):
        raise ConfigError(f"`model` is {a_kind(model)}: it is {_MODEL_IS}")
    return model  # type: ignore[no-any-return]


def sendable_tokenizer(tokenizer: Any) -> Any:
    if isinstance(tokenizer, str | os.PathLike):
        return os.fspath(tokenizer)
    check_tokenizer(tokenizer)
    return tokenizer
