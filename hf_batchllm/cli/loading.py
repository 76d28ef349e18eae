"""Loads a model, its adapters and its tokenizer by name or folder. What cannot be loaded is said in a line or two."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..files.records import PromptRecord, RecordReader
from ..files.report import FileReport
from ..files.settings import GenerationSettings
from ..notices import warn_user
from .arguments import config_from
from .console import Console, UsageError, reason
from .values import FirstRecords, first_records

if TYPE_CHECKING:
    import torch

    from ..files.record_engine import RecordEngine
    from ..generator import BatchGenerator
    from ..pool.generator_pool import GeneratorPool

_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FIRST = "default"  # PEFT's name for the adapter of a folder that is loaded by itself
_WITHOUT_ADAPTER = (
    "the first lines choose no `adapter`, and so run without those of --adapter: --set adapter={first} chooses one for "
    "all lines that choose none"
)
_HINTS = {  # words in an error of another library -> what to do about it here
    "safetensors": "Only safetensors are loaded, as other files may run code. If you trust a model, convert it once: "
    "AutoModelForCausalLM.from_pretrained(NAME, use_safetensors=False).save_pretrained(FOLDER)",
    "trust_remote_code": "If you trust its authors, --trust-remote-code runs that code",
}


class Loader:
    """The ``Model`` of a run, loaded if there is anything to run. ``loaded``: an error stops the run half-way."""

    def __init__(self, asked: argparse.Namespace, base: GenerationSettings, console: Console) -> None:
        self.asked, self.base, self.console = asked, base, console
        self.config, self.adapters = config_from(asked), adapters_from(asked)
        self._chosen = {name: path for name, path in self.adapters.items() if path != asked.model}  # by lines
        if asked.tp and not asked.gpus:
            raise UsageError("--tp says how many of the GPUs of --gpus have a model together: pass --gpus, too")
        self.loaded = False

    @property
    def name(self) -> str:
        return str(self.asked.model)

    @property
    def identity(self) -> dict[str, Any]:
        base, tokenizer = base_of(self.name), self.asked.tokenizer
        adapters = {name: _full_name(path) for name, path in sorted(self._chosen.items())}
        return {
            "model": _full_name(self.name),
            "revision": self.asked.revision,
            "tokenizer": None if tokenizer is None else _full_name(tokenizer),
            "dtype": self.asked.dtype,
            "base": None if base is None else _full_name(base),
            "adapters": adapters or None,
        }

    def expect(self, reader: RecordReader, first: Sequence[PromptRecord]) -> None:
        self.first = first_records(self.asked, reader, first)
        if self._chosen and self.base.adapter is None and not self.first.name_adapters:
            self.console.warning(_WITHOUT_ADAPTER.format(first=next(iter(self._chosen))))

    @contextmanager
    def ready(self, report: FileReport) -> Iterator[RecordEngine]:
        check_folders(self.asked)
        there = f"{report.before:,} of {report.records:,} results are there; " if report.before else ""
        self.console.note(f"{there}loading {self.name}")
        began = time.perf_counter()
        from ..files.record_engine import RecordEngine, problem_in_silence

        engine = RecordEngine(self._generator())
        try:
            if (why := engine.ask(problem_in_silence, self.base)) is not None:
                raise UsageError(why)
            self.loaded = True
            report.loading_seconds = time.perf_counter() - began
            yield engine
        finally:
            engine.close()

    def _generator(self) -> BatchGenerator | GeneratorPool:
        from ..generator import BatchGenerator
        from ..pool.devices import gpus_from
        from ..pool.generator_pool import GeneratorPool

        needed = "stop strings" if "stop_strings" in self.base.options else ""
        load = partial(load_model, self.asked, self.adapters, self.first, needed)
        if not self.asked.gpus:
            return BatchGenerator(*load(), self.config)
        return GeneratorPool(load, config=self.config, gpus=gpus_from(self.asked.gpus), tp=self.asked.tp or 1)


def load_model(
    asked: argparse.Namespace, adapters: Mapping[str, str], first: FirstRecords, needed: str
) -> tuple[Any, Any]:
    """The model and its tokenizer or processor: in this process, or in each of a pool."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.distributed.configuration_utils import DistributedConfig

    from ..inputs.images.image_models import takes_images

    option, name, given = f"--model {asked.model}", base_of(asked.model) or asked.model, _given(asked, asked.revision)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    with bars_of_loading(asked.quiet):
        device = device_of(asked.device)
        with _in_a_line(option):
            images = takes_images(AutoConfig.from_pretrained(name, **given).model_type)
        if first.only_images and not images:
            raise UsageError(
                f"{option}: images are not supported for this model (docs/images.md lists those for which they are), "
                f"and the file shows some, from {first.place} on"
            )
        tokenizer = load_tokenizer(asked, first, needed, images and not asked.gpus)  # a pool takes text alone
        with _in_a_line(option):
            auto: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
            given |= {"dtype": asked.dtype, "use_safetensors": True}
            if asked.tp and asked.tp > 1:  # each process gets its part
                given["distributed_config"] = DistributedConfig(tp_size=asked.tp)
            model = auto.from_pretrained(name, **given)
            model = model if "distributed_config" in given else model.to(device)
        return _with_adapters(model, asked, adapters).eval(), tokenizer


def load_tokenizer(asked: argparse.Namespace, first: FirstRecords, needed: str = "", images: bool = False) -> Any:
    """``needed``: what else than prompts needs a tokenizer, for the error. Where nothing does it may be None."""
    from transformers import AutoProcessor, AutoTokenizer

    needed = "prompts that are text" if first.have_texts else needed
    name, option, revision = asked.tokenizer, f"--tokenizer {asked.tokenizer}", None
    if name is None:
        name, option, revision = asked.model, f"--model {asked.model}", asked.revision
        if not os.path.isfile(os.path.join(name, "tokenizer_config.json")):
            name = base_of(name) or name
    try:
        auto: Any = AutoProcessor if images else AutoTokenizer
        tokenizer = auto.from_pretrained(name, **_given(asked, revision))
    except Exception as error:
        what = "processor for images" if images else "tokenizer"
        why = f"{option}: no {what} could be loaded: {_why(error)}"
        if images and not first.only_images:
            warn_user(f"{why}. A line that shows an image is an error")
            return load_tokenizer(asked, first, needed)
        if not needed and asked.tokenizer is None:
            return None
        raise UsageError(f"{why} ({needed} need one)" if needed else why) from error
    if first.only_chats and getattr(tokenizer, "chat_template", None) is None:
        raise UsageError(
            f"{option}: the tokenizer has no chat template, and the file has chats, from {first.place} on: load a chat "
            "model, or pass the --tokenizer of a model that was trained with the same template. Prompts that are text "
            "need no template"
        )
    return tokenizer


def device_of(name: str) -> torch.device:
    """``auto`` is the GPU, if there is one. A device that is not there is refused before a model is loaded."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _in_a_line(f"--device {name}"):
        return torch.empty(0, dtype=torch.uint8, device=name).device


@contextmanager
def bars_of_loading(quiet: bool) -> Iterator[None]:
    """transformers' bars are for terminals. The switch is global, and the bar of the run goes by it: it is put back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# -- folders and adapters ----------------------------------------------------------------------------------------------


def check_folders(asked: argparse.Namespace) -> None:
    """Refuses folders that are not there, before anything that takes seconds is imported."""
    for option in ("model", "tokenizer"):
        name = getattr(asked, option, None)
        if name is not None and _is_lost(name):
            raise UsageError(f"--{option} {name}: there is no such folder")


def base_of(name: str) -> str | None:
    """The model that an adapter in a folder was trained for; None where there is no adapter, or a model beside it."""
    config = os.path.join(name, _ADAPTER)
    if not os.path.isfile(config) or os.path.isfile(os.path.join(name, "config.json")):
        return None
    with open(config, encoding="utf-8") as file:
        base = json.load(file).get("base_model_name_or_path") or ""
    beside = os.path.join(name, base)  # a path from the adapter's own folder
    found = beside if base and not os.path.isdir(base) and os.path.isdir(beside) else base
    if not found or _is_lost(found):
        why = f"names {base} as its base model, and there is no such folder" if base else "names no base model"
        raise UsageError(
            f"--model {name}: its {_ADAPTER} {why}. Pass the base as --model, and the adapter as --adapter NAME={name} "
            "(lines choose it by `adapter`)"
        )
    return str(found)


def adapters_from(asked: argparse.Namespace) -> dict[str, str]:
    """The adapters by their names: that of a PEFT folder as ``--model``, then those of ``--adapter``."""
    given = [] if base_of(asked.model) is None else [(f"--model {asked.model}", _FIRST, asked.model)]
    for text in asked.adapters:
        name, _, path = text.partition("=")
        if not (name and path):
            raise UsageError(f"--adapter takes NAME=PATH, as in --adapter poems=./poems, not {text!r}")
        given.append((f"--adapter {text}", name, os.path.expanduser(path)))
    found: dict[str, str] = {}
    for option, name, path in given:
        if name in found:
            raise UsageError(f"{option}: there are two adapters of the name {name}")
        _check_adapter(option, path)
        found[name] = path
    return found


def _check_adapter(option: str, path: str) -> None:
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"{option}: adapters need PEFT: pip install peft")
    if _is_lost(path):
        raise UsageError(f"{option}: there is no such folder")
    lacking = [name for name in (_ADAPTER, _ADAPTER_WEIGHTS) if not os.path.isfile(os.path.join(path, name))]
    if os.path.isdir(path) and lacking:
        raise UsageError(
            f"{option}: there is no {lacking[0]} in this folder. An adapter is what PEFT saves; only safetensors are "
            "loaded, as other files may run code"
        )


def _with_adapters(model: Any, asked: argparse.Namespace, adapters: Mapping[str, str]) -> Any:
    """A line without ``adapter`` runs with that of a PEFT folder as ``--model``, or else with none."""
    if not adapters:
        return model
    from peft import PeftModel

    wrapped: Any = None
    for name, path in adapters.items():
        given: dict[str, Any] = {"adapter_name": name, "torch_device": str(model.device)}
        option = f"--model {path}" if path == asked.model else f"--adapter {name}={path}"
        with _in_a_line(option), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of PEFT's own code
            if wrapped is None:
                wrapped = PeftModel.from_pretrained(model, path, **given)
            else:
                wrapped.load_adapter(path, **given)
    if asked.model not in adapters.values():
        wrapped.base_model.disable_adapter_layers()
    return wrapped


def _full_name(name: str) -> str:
    """A folder's full path: a folder of the same name elsewhere is another model."""
    return os.path.realpath(name) if os.path.isdir(name) else name


def _is_lost(name: str) -> bool:
    """Whether it is a path, and no folder is there."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isfile(name)
    return is_path and not os.path.isdir(name)


def _given(asked: argparse.Namespace, revision: str | None) -> dict[str, Any]:
    return {"trust_remote_code": asked.trust_remote_code} | ({} if revision is None else {"revision": revision})


@contextmanager
def _in_a_line(option: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UsageError(f"{option}: {_why(error)}") from error


def _why(error: Exception) -> str:
    hints = [hint for word, hint in _HINTS.items() if word in str(error)]
    return ". ".join([reason(error).rstrip("."), *hints])
