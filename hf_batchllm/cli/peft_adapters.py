"""PEFT adapters on the command line: ``--adapter NAME=PATH``, and a folder of PEFT's as ``--model``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import warnings
from typing import Any

from .messages import UsageError, reason

_CONFIG, _WEIGHTS, _UNSAFE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_FIRST = "default"  # PEFT's name for the adapter of a folder that is loaded by itself


def adapters_from(asked: argparse.Namespace) -> dict[str, str]:
    """The adapters of ``--adapter``, by their names: folders, or names on the hub."""
    found: dict[str, str] = {}
    for text in asked.adapter or ():
        name, equals, path = text.partition("=")
        if not (equals and name and path):
            raise UsageError(f"--adapter takes NAME=PATH, as in --adapter poems=./poems, not {text!r}")
        if name in found:
            raise UsageError(f"--adapter {text}: there are two adapters of the name {name}")
        if "." in name:
            raise UsageError(f"--adapter {text}: PEFT takes no dot in the name of an adapter")
        found[name] = path
    for name, path in found.items():
        _check_folder(path, f"--adapter {name}={path}")
    if is_peft_folder(asked.model):
        _check_folder(asked.model, f"--model {asked.model}")
        if _FIRST in found:
            raise UsageError(f"--adapter {_FIRST}={found[_FIRST]}: {_FIRST} is the adapter in --model {asked.model}")
    return found


def is_peft_folder(name: str) -> bool:
    """Whether a folder holds an adapter and no model."""
    folder = os.path.expanduser(name)
    return os.path.isfile(os.path.join(folder, _CONFIG)) and not os.path.isfile(os.path.join(folder, "config.json"))


def has_tokenizer(folder: str) -> bool:
    return os.path.isfile(os.path.join(os.path.expanduser(folder), "tokenizer_config.json"))


def base_of(name: str) -> str:
    """The model that the adapter in a folder was trained for: a folder, or a name on the hub."""
    folder, option = os.path.expanduser(name), f"--model {name}"
    try:
        with open(os.path.join(folder, _CONFIG), encoding="utf-8") as file:
            base = json.load(file).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{option}: its {_CONFIG} cannot be read: {reason(error)}") from error
    if not isinstance(base, str) or not base:
        raise UsageError(f"{option}: its {_CONFIG} names no base model. {_by_hand(name)}")
    for place in (base, os.path.join(folder, base)):
        if os.path.isdir(os.path.expanduser(place)):
            return place
    if base.startswith((".", "/", "~")) or base.count("/") != 1:
        raise UsageError(
            f"{option}: it is an adapter for the model {base}, and there is no such folder. {_by_hand(name)}"
        )
    return base


def with_adapters(model: Any, asked: argparse.Namespace, adapters: dict[str, str], device: Any) -> Any:
    """The model with its adapters, in PEFT's wrapper. A line without ``adapter`` runs with that of ``--model``, or with
    none."""
    first = {_FIRST: asked.model} if is_peft_folder(asked.model) else {}
    every = {**first, **adapters}
    if not every:
        return model
    from peft import PeftModel

    wrapped: Any = None
    for name, path in every.items():
        folder = os.path.expanduser(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of PEFT's own code
                if wrapped is None:
                    wrapped = PeftModel.from_pretrained(model, folder, adapter_name=name, torch_device=str(device))
                else:
                    wrapped.load_adapter(folder, adapter_name=name, torch_device=str(device))
        except Exception as error:
            option = f"--model {path}" if name in first else f"--adapter {name}={path}"
            raise UsageError(f"{option}: {_why(error)}") from error
    if not first:
        wrapped.base_model.disable_adapter_layers()
    return wrapped.eval()


def _check_folder(path: str, option: str) -> None:
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"{option}: adapters need PEFT: pip install peft")
    folder = os.path.expanduser(path)
    if os.path.isfile(folder):
        raise UsageError(f"{option}: it is a file: give the folder that it is in")
    if not os.path.isdir(folder):
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise UsageError(f"{option}: there is no such folder")
        return  # a name on the hub
    files = set(os.listdir(folder))
    if _CONFIG not in files:
        hint = ", but a model: pass it as --model" if "config.json" in files else ""
        raise UsageError(f"{option}: there is no {_CONFIG} in this folder, so it is no adapter of PEFT{hint}")
    if _WEIGHTS not in files:
        what = f"its weights are {_UNSAFE}" if _UNSAFE in files else f"it has no {_WEIGHTS}"
        raise UsageError(f"{option}: {what}. Only safetensors are loaded, as other files may run code")


def _why(error: Exception) -> str:
    """PEFT lists every weight that does not fit; the first is enough."""
    text = " ".join(str(error).split())
    if "size mismatch" in text or "Target modules" in text:
        return f"it does not fit the model: {text[:200]}"
    return reason(error)


def _by_hand(path: str) -> str:
    return f"Pass the base as --model, and the adapter as --adapter NAME={path} (lines choose it by `adapter`)"
