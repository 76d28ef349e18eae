"""Loads a tokenizer and a model by name or folder; errors take a line or two."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import BatchConfig
from ..errors import BatchLLMError, ConfigError
from ..files.records.settings import GenerationSettings
from ..notices import warn_user
from .argument_values import FirstRecords
from .hub_names import check_hub_name
from .messages import UsageError, reason
from .peft_adapters import base_of, has_tokenizer, is_peft_folder, with_adapters

if TYPE_CHECKING:
    from ..files.record_engine import RecordEngine
    from ..generator import BatchGenerator
    from ..pool.generator_pool import GeneratorPool


_OTHER_KIND = re.compile(r"Unrecognized configuration class <class '[\w.]*?(\w+?)(?:Config)?'>")
_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"  # else transformers would ask the hub to convert somebody else's model
_SAFE = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


class Loader:
    """Called once, if there is anything to run. ``loaded``: the run has begun, so a later error stops it half-way."""

    def __init__(
        self,
        asked: argparse.Namespace,
        config: BatchConfig,
        base: GenerationSettings,
        first: FirstRecords,
        adapters: dict[str, str],
    ) -> None:
        self._adapters = adapters
        self._asked = asked
        self._config = config
        self._base = base
        self._first = first
        self.called = False  # all has been checked that needs no model, and the output was begun
        self.loaded = False
        self._names_checked = False
        self._stack = ExitStack()

    def close(self) -> None:
        """Restores the settings of transformers that were changed."""
        self._stack.close()

    def check_names(self) -> None:
        """Whether there are such a model and tokenizer, once: nothing that takes seconds is imported for this."""
        if self._names_checked:
            return
        asked = self._asked
        check_folder(asked.model)
        if is_peft_folder(asked.model):
            check_hub_name(base_of(asked.model), f"--model {asked.model}, whose base is")
        check_tokenizer_name(asked.tokenizer)
        self._names_checked = True

    def __call__(self) -> RecordEngine:
        self.called = True
        asked = self._asked
        self.check_names()
        self._stack.enter_context(quiet_transformers())
        with bars_of_loading(not asked.quiet):
            engine = self._load()
        self.loaded = True
        return engine

    def _load(self) -> RecordEngine:
        from ..files.record_engine import RecordEngine
        from ..files.records.line_configs import problem_in_silence

        stop_strings = self._base.options.get("stop_strings")
        needed = "prompts that are text" if self._first.have_texts else "stop strings" if stop_strings else ""
        chats = self._first.place if self._first.only_chats and not self._base.brings_template else None
        images = self._first.place if self._first.only_images else None
        load = ModelLoader(self._asked, self._adapters, needed, chats, images)
        try:
            engine = RecordEngine(self._pool(load) if self._asked.gpus else self._generator(load))
        except UsageError:
            raise
        except BatchLLMError as error:
            raise UsageError(f"--model {self._asked.model}: {error}") from error
        why = engine.ask(problem_in_silence, self._base)
        if why is not None:
            engine.close()
            raise UsageError(why)
        return engine

    def _generator(self, load: ModelLoader) -> BatchGenerator:
        from ..generator import BatchGenerator

        return BatchGenerator(*load(_device(self._asked.device)), self._config)

    def _pool(self, load: ModelLoader) -> GeneratorPool:
        from ..pool.devices import gpus_from
        from ..pool.generator_pool import GeneratorPool

        try:
            return GeneratorPool(load, config=self._config, gpus=gpus_from(self._asked.gpus), tp=self._asked.tp or 1)
        except ConfigError as error:
            tp = f" --tp {self._asked.tp}" if self._asked.tp else ""
            raise UsageError(f"--gpus {self._asked.gpus}{tp}: {error}") from error


@dataclass(frozen=True)
class ModelLoader:
    """Loads the model and its tokenizer: in this process, or in each of a pool.

    needed: what needs a tokenizer, for the error. first_chat: the place of the first chat, where all prompts are chats
    and none brings a template. first_image: the place of the first image, where all prompts show some.
    """

    asked: argparse.Namespace
    adapters: dict[str, str]
    needed: str
    first_chat: str | None
    first_image: str | None

    def __call__(self, device: Any = None) -> tuple[Any, Any]:
        """``device``: None for the one that a process of a pool has."""
        with quiet_transformers():
            asked = self.asked
            if device is None:
                device = _device("auto")
            if asked.threads:
                import torch

                torch.set_num_threads(asked.threads)
            for_images = _is_for_images(asked)
            if self.first_image is not None and not for_images:
                raise UsageError(
                    f"--model {asked.model}: images are not supported for this model (docs/images.md lists those for "
                    f"which they are), and the file shows some, from {self.first_image} on"
                )
            if for_images and not asked.gpus:  # a pool takes text alone
                tokenizer = _load_processor(asked, self.needed, self.first_image)
            else:
                tokenizer = load_tokenizer(asked, self.needed)
            if self.first_chat is not None:
                check_template(tokenizer, asked.tokenizer or asked.model, self.first_chat)
            model = load_model(asked, device, for_images)
            return with_adapters(model, asked, self.adapters, device), tokenizer


def check_tokenizer_name(name: str | None) -> None:
    """Of ``--tokenizer``."""
    if name is None or os.path.exists(os.path.expanduser(name)):
        return
    if name.startswith((".", "/", "~")):
        raise UsageError(f"--tokenizer {name}: there is no such folder")
    check_hub_name(name, "--tokenizer")


def load_tokenizer(asked: argparse.Namespace, needed: str) -> Any:
    """``needed``: what needs a tokenizer, for the error; "" if results may come without text. Its name was checked."""
    from transformers import AutoTokenizer

    option, name, given = _of_tokenizer(asked)
    try:
        return AutoTokenizer.from_pretrained(name, **given)
    except Exception as error:
        if not needed and asked.tokenizer is None:
            return None
        why = f"no tokenizer could be loaded: {_why(error)}"
        needs = f" ({needed} need one)" if needed else ""
        raise UsageError(f"{option} {name}: {why}{needs}") from error


def _load_processor(asked: argparse.Namespace, needed: str, first_image: str | None) -> Any:
    """Of a model for images. Where it cannot be loaded, and text is all that the first records have: a tokenizer."""
    from transformers import AutoProcessor

    option, name, given = _of_tokenizer(asked)
    try:
        return AutoProcessor.from_pretrained(name, **given)
    except Exception as error:
        why = f"{option} {name}: no processor for images could be loaded: {_why(error)}"
        if first_image is not None:
            raise UsageError(f"{why} (the file shows images, from {first_image} on)") from error
        warn_user(f"{why}. A line that shows an image is an error")
        return load_tokenizer(asked, needed)


def _of_tokenizer(asked: argparse.Namespace) -> tuple[str, str, dict[str, Any]]:
    """The option that says where the tokenizer is, where that is, and what else its loading is given."""
    name = asked.tokenizer or asked.model
    option = "--tokenizer" if asked.tokenizer else "--model"
    if is_peft_folder(name) and not has_tokenizer(name):
        name = base_of(name)
    revision = {} if asked.tokenizer or getattr(asked, "revision", None) is None else {"revision": asked.revision}
    return option, name, {"trust_remote_code": asked.trust_remote_code, **revision}


def _is_for_images(asked: argparse.Namespace) -> bool:
    """Whether images are served for the model, as far as its config tells."""
    from transformers import AutoConfig

    from ..inputs.images.image_models import takes_images

    try:
        config = AutoConfig.from_pretrained(**_of_model(asked))
    except Exception:  # it is told where the model is loaded
        return False
    return takes_images(config.model_type)


def _of_model(asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": base_of(asked.model) if is_peft_folder(asked.model) else asked.model,
        "trust_remote_code": asked.trust_remote_code,
        **({} if asked.revision is None else {"revision": asked.revision}),
    }


def check_template(tokenizer: Any, name: str, first: str) -> None:
    """For a file of chats alone. (In a mixed file, chats are errors of their lines.) ``first``: the first line."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageError(
            f"the tokenizer of {name} has no chat template, and the file has chats, from {first} on: load a chat "
            "model, or pass the --tokenizer of a model that was trained with the same template. Prompts that are text "
            "need no template"
        )


def load_model(asked: argparse.Namespace, device: Any, for_images: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText if for_images else AutoModelForCausalLM
    before = os.environ.get(_CONVERSION)
    os.environ[_CONVERSION] = "1"
    try:
        given = {"dtype": asked.dtype, "use_safetensors": True, **_of_model(asked)}
        if (getattr(asked, "tp", None) or 1) > 1:  # each process gets its part
            from transformers.distributed.configuration_utils import DistributedConfig

            return auto.from_pretrained(distributed_config=DistributedConfig(tp_size=asked.tp), **given).eval()
        return auto.from_pretrained(**given).to(device).eval()
    except Exception as error:
        why = _why(error)
        if "cannot be loaded with `safetensors`" in why:
            why = f"it has no safetensors. {_convert(asked.model)}"
        if found := _OTHER_KIND.search(str(error)):
            why = (
                f"it is a {found[1]} model, and transformers has no causal language model of this kind "
                "(AutoModelForCausalLM): encoder-decoders and models without text generation are not supported"
            )
        raise UsageError(f"--model {asked.model}: {why}") from error
    finally:
        if before is None:
            del os.environ[_CONVERSION]
        else:
            os.environ[_CONVERSION] = before


def check_folder(name: str) -> None:
    """Checks a folder as far as is possible without loading anything."""
    path = os.path.expanduser(name)
    if not os.path.isdir(path):
        if os.path.isfile(path):
            raise UsageError(f"--model {name}: it is a file: give the folder that it is in")
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UsageError(f"--model {name}: there is no such folder")
        check_hub_name(name, "--model")
        return
    files = set(os.listdir(path))
    if not files & {"config.json", "adapter_config.json"}:
        raise UsageError(f"--model {name}: there is no config.json in this folder, so no model was saved to it")
    if files & set(_WEIGHTS) and not files & set(_SAFE):
        raise UsageError(f"--model {name}: its weights are a .bin file alone. {_convert(name)}")


def _convert(name: str) -> str:
    return (
        "Only safetensors are loaded, as other files may run code. If you trust it, convert it once: python -c "
        '"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"M.from_pretrained({name!r}, use_safetensors=False).save_pretrained('converted'); "
        f"T.from_pretrained({name!r}).save_pretrained('converted')\""
    )


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: it is cpu, cuda, cuda:1, ..., mps, xpu or auto") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UsageError(f"--device {name}: this torch finds {'no' if not count else f'only {count}'} CUDA device")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError(f"--device {name}: this torch finds no GPU of a Mac (MPS)")
    elif device.type == "xpu" and (device.index or 0) >= torch.xpu.device_count():
        raise UsageError(f"--device {name}: this torch finds no such GPU of Intel's (XPU)")
    return device


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers prints much while it loads; what matters comes as an error."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def bars_of_loading(wanted: bool) -> Iterator[None]:
    """transformers' own bars are for terminals. The switch is global: the run's own lines are not to find it off."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    if not wanted or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _why(error: Exception) -> str:
    message = reason(error)
    if "instantiate the backend tokenizer" in message:
        return "none was saved there, or it needs a package that is not installed"
    if "trust_remote_code" in str(error):
        return "it needs Python code that comes with it. If you trust its authors, --trust-remote-code runs that code"
    return message
