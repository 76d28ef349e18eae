"""Which code in a model is custom: modules, functions held by modules, and what replaces code of transformers or torch.

Code of transformers, or of torch, counts as custom where the model's class does not put it there: a module that mixes
tokens (a recurrent layer, a softmax over the row) is harmless in its own model alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...patches.uncompiled import every_module, own_forward
from ...patches.unmodified import code_home
from .code_in_use import REPLACEABLE, plain_function, token_of
from .custom_code import KNOWN_LIBRARIES, is_theirs

# Wrappers and quantised layers, which stand in place of what the class makes.
_WRAPPERS: tuple[str, ...] = ("peft.", "accelerate.", "bitsandbytes.", "compressed_tensors.", "torchao.")
_WRAPPERS += ("transformers.integrations.", "transformers.quantizers.", "torch._dynamo.")
# Their layers compute with their tensors alone.
_QUANTISERS = frozenset(
    [
        "gptqmodel",
        "auto_gptq",
        "awq",
        "hqq",
        "eetq",
        "optimum",
        "quanto",
        "aqlm",
        "vptq",
        "spqr_quant",
        "quark",
        "auto_round",
    ]
)
# Of torch: each treats tokens alike, whatever its arguments are.
_EACH_TOKEN = frozenset(
    [
        *(nn.Identity, nn.Linear, nn.Embedding, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    ]
)
_COMPILED = "_orig_mod"  # what ``torch.compile(module)`` wrapped, by its name in the wrapper
_TORCHS_OWN = frozenset(nn.Module().__dict__)
_SKIPPED = frozenset(["forward", "_old_forward", "_compiled_call_impl", "generate"])  # looked at elsewhere
# Python modules of transformers whose classes are layers, and where these import functions from that wrap no others.
_OF_LAYERS = ("transformers.models.", "transformers.activations", "transformers.modeling_layers")
_IMPORTED = frozenset(["safetensors", "kernels", *sys.stdlib_module_names]) - {"functools", "contextlib"}
# Of their names: those of attention and of generation are looked at elsewhere, and models are made before.
_APART = frozenset([*_SKIPPED, *REPLACEABLE, "eager_attention_forward", "__init__"])
_DATA = frozenset([int, float, bool, str, type(None), dict, list, tuple, set, torch.Size, torch.dtype, torch.Tensor])
_OF_TABLES = ("pos", "cos", "sin", "freq", "rope", "rotary")  # in names of tensors with a row for each position
_FEWEST_POSITIONS = 32  # smaller tables are of something else


@dataclass(frozen=True)
class AsMade:
    """What the class of a model makes of its config, told by a copy."""

    kinds: frozenset[type]  # of modules
    at: dict[str, type]  # by the module's path
    functions: tuple[Any, ...]  # that modules hold


def as_made(copy: nn.Module) -> AsMade:
    modules = every_module(copy)
    functions = tuple(plain_function(value) for _, value in _callables(modules))
    return AsMade(frozenset(map(type, modules)), dict(_places(copy)), functions)


@dataclass(frozen=True)
class OwnCode:
    """One look at a model."""

    found: list[tuple[nn.Module, Any]]  # each module with such code, and the code: a ``forward``, a class, a function
    replacing: dict[str, Any]  # functions, methods and properties in place of transformers' or torch's, by name

    def __bool__(self) -> bool:
        return bool(self.found or self.replacing)

    @property
    def may_change(self) -> bool:
        """Whether it may compute something else without a trace in the model: it may read anything."""
        known = KNOWN_LIBRARIES | _QUANTISERS
        return bool(self.replacing) or any(_library_of(*each) not in known for each in self.found)

    def shows(self) -> list[object]:
        """Equal for the same code alone."""
        of_modules = [(id(module), token_of(code)) for module, code in self.found]
        return [*of_modules, *map(token_of, self.replacing.values())]


def find_own_code(model: nn.Module, modules: Sequence[nn.Module], made: AsMade | None) -> OwnCode:
    """modules: all of the model's, in the order of ``every_module``. made: None where no copy could be made."""
    found = [*_own_forwards(modules), *_own_functions(modules, made)]
    if made is not None:
        found += [(modules[place], type(modules[place])) for place in _strange_places(model, made)]
    return OwnCode(found, {**dict(_replacing_torchs()), **dict(_replacing_transformers(modules))})


def shortest_table(model: PreTrainedModel, own: OwnCode) -> int | None:
    """The rows of the shortest table that custom modules may look positions up in; None if there is none.

    A GPU ends the process where a position lies beyond.
    """
    words = model.get_input_embeddings()
    rows: list[int] = []
    for module, _ in own.found:
        children = (each for each in module._modules.values() if isinstance(each, nn.Embedding))
        rows += [each.num_embeddings for each in children if each is not words]
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.ndim > 1 and any(part in key for part in _OF_TABLES):
                rows.append(max(tensor.shape[:-1]))
    return min((each for each in rows if each >= _FEWEST_POSITIONS), default=None)


def _own_forwards(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    classes: dict[type, Any] = {}  # the `forward` of a class, where it is not theirs; else None
    for module in modules:
        cls = type(module)
        if cls not in classes:
            forward = getattr(cls, "forward", None)
            known = cls.__module__.partition(".")[0] in KNOWN_LIBRARIES and is_theirs(forward)
            classes[cls] = None if known else forward or cls
        code = classes[cls]
        if "forward" in module.__dict__ and (set_on_it := own_forward(module)) is not None:
            code = code if is_theirs(set_on_it) else set_on_it
        if code is not None:
            yield module, code


def _strange_places(model: nn.Module, made: AsMade) -> Iterator[int]:
    """The places of the outermost modules that the class does not make: what is inside of them is theirs."""
    strange: set[str] = set()
    for place, (path, kind) in enumerate(_places(model)):
        if path.rpartition(".")[0] in strange:
            strange.add(path)
        elif made.at.get(path) is not kind and not _is_harmless(kind, made):
            strange.add(path)
            yield place


def _is_harmless(kind: type, made: AsMade) -> bool:
    """Wherever it stands. Below a wrapper, modules of the class's own are at another path."""
    if kind in _EACH_TOKEN or kind.__module__.startswith(_WRAPPERS):
        return True
    return kind in made.kinds and not kind.__module__.startswith("torch.")


def _own_functions(modules: Sequence[nn.Module], made: AsMade | None) -> Iterator[tuple[nn.Module, Any]]:
    known = frozenset(map(id, () if made is None else made.functions))
    for module, value in _callables(modules):
        function = plain_function(value)
        if id(function) in known or (made is None and isinstance(function, BuiltinFunctionType)):
            continue
        if function is checkpoint:  # left by gradient checkpointing: it runs the layer that it is given
            continue
        # Torch's functions include a softmax over the row.
        if not is_theirs(function) or _home(function).startswith("torch"):
            yield module, value


def _callables(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """Functions, and objects that can be called, which modules hold beside their parts."""
    for module in modules:
        held = module.__dict__
        if len(held) <= len(_TORCHS_OWN):
            continue
        for key, value in held.items():
            if type(value) in _DATA or key in _TORCHS_OWN or not callable(value) or isinstance(value, type | nn.Module):
                continue
            # One that replaces none of its class is called by nothing that was there before.
            a_method = isinstance(value, MethodType) and value.__self__ is module
            a_method = a_method and (key in _APART or not hasattr(type(module), key))
            if not a_method and not any(held.get(name) is value for name in _SKIPPED):
                yield module, value


def _library_of(module: nn.Module, code: Any) -> str:
    kind = type(module)
    library = kind.__module__.partition(".")[0]
    if code is kind or (library in _QUANTISERS and code is kind.forward):
        return library
    return code_home(code).partition(".")[0]


def _replacing_torchs() -> Iterator[tuple[str, Any]]:
    for home in (torch, nn.functional):
        for name, each in vars(home).items():
            if not isinstance(each, FunctionType) or name.startswith("_"):
                continue
            if not str(each.__globals__.get("__name__")).startswith("torch") and not is_theirs(each):
                yield f"{home.__name__}.{name}", each


def _replacing_transformers(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Methods and properties of the modules' classes, functions beside these classes, and functions for experts."""
    bases = dict.fromkeys(base for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__)
    classes = [base for base in bases if base.__module__.startswith(_OF_LAYERS)]
    homes = [name for name in dict.fromkeys(each.__module__ for each in classes) if name in sys.modules]
    of_classes = [(f"{each.__module__}.{each.__qualname__}", vars(each)) for each in classes]
    for owner, held in (*of_classes, *((name, vars(sys.modules[name])) for name in homes)):
        for name, each in held.items():
            if name in _APART or isinstance(each, type | ModuleType) or not callable(function := plain_function(each)):
                continue
            home = code_home(function).partition(".")[0]
            compiled = isinstance(function, torch.jit.ScriptFunction)  # it does not say from where
            theirs = is_theirs(function) if isinstance(function, FunctionType) else compiled or home == "transformers"
            if not theirs and home not in _IMPORTED:
                yield f"{owner}.{name}", each
    configs = (module.__dict__.get("config") for module in modules)
    for kind in dict.fromkeys(getattr(config, "_experts_implementation", None) for config in configs):
        if kind is not None and (experts := ALL_EXPERTS_FUNCTIONS.get(kind)) is not None and not is_theirs(experts):
            yield f"the experts function `{kind}`", experts


def _home(function: Any) -> str:
    home: str = getattr(function, "__module__", None) or type(function).__module__
    return home


def _places(model: nn.Module) -> Iterator[tuple[str, type]]:
    """Each module's path, past ``torch.compile``, and its kind, in the order of ``every_module``."""
    waiting: list[tuple[str, nn.Module | None]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module is not None:
            yield path, type(module)
            children = module._modules.items()
            waiting.extend((path if key == _COMPILED else f"{path}.{key}", child) for key, child in children)
