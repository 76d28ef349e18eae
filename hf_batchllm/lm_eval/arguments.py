"""Arguments of the model for the harness: those that ``hf`` would ignore, and those that mean nothing, are refused."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from ..config import BatchConfig, elsewhere
from ..errors import ConfigError, UnsupportedModelError
from ..wording import shown

FIELDS = [field.name for field in dataclasses.fields(BatchConfig)]
_HARNESS_BACKENDS = ("default", "causal", "seq2seq")  # the harness's values of `backend`; others are a BatchConfig's
_HARNESS_ARGUMENTS = inspect.signature(HFLM.__init__).parameters
_KNOWN = [*FIELDS, "adapter", "batch_config", *(name for name in _HARNESS_ARGUMENTS if name not in ("self", "kwargs"))]
# Engines like this one have options of these names, and so has transformers.
_OF_FROM_PRETRAINED = ("device_map", "torch_dtype", "quantization", "attn_implementation", "generation_config")
_SIMILARITY = 0.8  # of a misspelt name; arguments of from_pretrained() are less like these
_FLOAT32 = (None, "float32", torch.float32)
_ADAPTER_CONFIG = "adapter_config.json"
# What `hf` does with the model while it loads it, and does not do with a model object. Its own defaults do nothing.
_AT_LOADING = {
    "peft": "load the adapter into the model first (PeftModel.from_pretrained), and leave `peft` out",
    "delta": "add these weights to the model first, and leave `delta` out",
    **dict.fromkeys(("autogptq", "gptqmodel"), "load the model that way first, and leave it out"),
    **dict.fromkeys(
        ("parallelize", "max_memory_per_gpu", "max_cpu_memory"), "load the model that way first, and leave it out"
    ),
}
_OF_THE_TOKENIZER = ("revision", "subfolder", "trust_remote_code", "use_fast_tokenizer", "gguf_file")


def of_the_harness(name: str, value: Any) -> bool:
    """Whether an argument that a BatchConfig has, too, is meant for the harness."""
    return name == "backend" and value in _HARNESS_BACKENDS


def refuse_what_is_ignored(pretrained: Any, given: dict[str, Any]) -> None:
    """Refuse arguments of ``hf`` that would be ignored, or that this model cannot honour."""
    if given.get("softmax_dtype") not in _FLOAT32:
        raise ConfigError("`softmax_dtype` must be float32: log-probabilities are computed in it here")
    if given.get("tp_plan") is not None:
        raise UnsupportedModelError("`tp_plan` spreads a model over devices, which is not supported: use --model hf")
    for name in given:
        _refuse_misspelt(name, is_loaded=not isinstance(pretrained, str))
    if not isinstance(pretrained, str):
        _refuse_what_loading_does(pretrained, given)
        return
    if isinstance(given.get("peft"), str):
        _refuse_wrong_folder(given["peft"])
    _refuse_missing_folder(pretrained)
    _refuse_adapter_as_model(pretrained)


def _refuse_missing_folder(pretrained: str) -> None:
    if pretrained.startswith((".", "/", "~")) and not os.path.isdir(os.path.expanduser(pretrained)):
        raise ConfigError(f"`pretrained` is {pretrained}, and there is no such folder")


def _refuse_misspelt(name: str, is_loaded: bool) -> None:
    if name in _HARNESS_ARGUMENTS:
        return
    if is_loaded or name not in _OF_FROM_PRETRAINED:
        why = "is called `max_length` here" if name == "max_model_len" else elsewhere(name)
        if why is not None:
            raise ConfigError(f"`{name}` {why}")
    if name != "max_memory" or is_loaded:
        near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=_SIMILARITY)
        if near:
            raise ConfigError(f"`{name}` is not an argument of this model; did you mean `{near[0]}`?")
    if is_loaded:  # the harness passes others to from_pretrained(), which a loaded model does not need
        raise ConfigError(
            f"`{name}` is not an argument of this model, and nothing is loaded that could take it: `pretrained` is a "
            "model object"
        )


def _refuse_what_loading_does(model: Any, given: dict[str, Any]) -> None:
    """``hf`` takes a model object as it is, and says nothing of the arguments that it ignores."""
    for name, remedy in _AT_LOADING.items():
        if given.get(name):
            raise ConfigError(
                f"`{name}` is {shown(given[name])}, and would be ignored, as `pretrained` is a model object: {remedy}"
            )
    wanted = given.get("dtype")
    has = getattr(model, "dtype", None)
    if wanted not in (None, "auto") and str(wanted).removeprefix("torch.") != str(has).removeprefix("torch."):
        raise ConfigError(
            f"`dtype` is {str(wanted).removeprefix('torch.')}, and `pretrained` is a model object in "
            f"{str(has).removeprefix('torch.')}: load the model in the other dtype, or leave `dtype` out"
        )
    if given.get("device") is not None and not _is_on(model.device, given["device"]):
        raise ConfigError(
            f"`device` is {given['device']}, and `pretrained` is a model object on {model.device}: move the model, or "
            "leave `device` out"
        )
    if given.get("tokenizer") is not None and not isinstance(given["tokenizer"], str):
        defaults = {name: _HARNESS_ARGUMENTS[name].default for name in _OF_THE_TOKENIZER if name in _HARNESS_ARGUMENTS}
        for name, default in defaults.items():
            if given.get(name) not in (None, default):
                raise ConfigError(
                    f"`{name}` is {shown(given[name])}, and nothing is loaded: `pretrained` and `tokenizer` are objects"
                )


def _is_on(device: torch.device, wanted: Any) -> bool:
    try:
        asked = torch.device(wanted)
    except (RuntimeError, TypeError):
        return False
    return asked.type == device.type and asked.index in (None, device.index)


def _refuse_wrong_folder(adapter: str) -> None:
    """An adapter is looked for before the model is loaded, which takes long."""
    folder = os.path.expanduser(adapter)
    if os.path.isdir(folder):
        if not os.path.isfile(os.path.join(folder, _ADAPTER_CONFIG)):
            raise ConfigError(
                f"`peft` is {adapter}, and there is no adapter_config.json in this folder: name a PEFT folder"
            )
    elif os.path.exists(folder):
        raise ConfigError(f"`peft` is {adapter}, which is a file: name the folder that it is in")
    elif adapter.startswith((".", "/", "~")) or adapter.count("/") != 1:  # else a name on the hub
        raise ConfigError(f"`peft` is {adapter}, and there is no such folder")


def _refuse_adapter_as_model(pretrained: str) -> None:
    folder = os.path.expanduser(pretrained)
    path = os.path.join(folder, _ADAPTER_CONFIG)
    if not os.path.isfile(path) or os.path.isfile(os.path.join(folder, "config.json")):
        return
    base = None
    try:
        with open(path, encoding="utf-8") as file:
            base = json.load(file).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        pass
    base = base or "BASE, which is the model that it was trained for"
    raise ConfigError(
        f"`pretrained` is {pretrained}, which is a PEFT adapter and no model: use peft={pretrained},pretrained={base}"
    )
