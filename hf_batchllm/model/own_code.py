"""Which code in a model is its owner's: modules, functions held by modules, and functions put in place of torch's.

Code of transformers, or of torch, counts as the owner's where the model's class does not put it there: a module that
mixes tokens (a recurrent layer, a softmax over the row) is harmless in its own model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..patches.uncompiled import every_module, own_forward
from .code_reach import is_of_a_known_library

# Wrappers and quantised layers, which stand in place of what the class makes.
_WRAPPERS: tuple[str, ...] = ("peft.", "accelerate.", "bitsandbytes.", "compressed_tensors.", "torchao.")
_WRAPPERS += ("transformers.integrations.", "transformers.quantizers.", "torch._dynamo.")
# Of torch: each treats tokens alike, whatever its arguments are.
_EACH_TOKEN = frozenset(
    [
        *(nn.Identity, nn.Linear, nn.Embedding, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    ]
)
_COMPILED = "_orig_mod"  # what ``torch.compile(module)`` wrapped, by its name in the wrapper
_TORCHS_OWN = len(nn.Module().__dict__)
_SKIPPED = frozenset(["forward", "_old_forward", "_compiled_call_impl", "generate"])  # looked at elsewhere
_DATA: frozenset[type] = frozenset(
    [int, float, bool, str, type(None), dict, list, tuple, set, torch.Size, torch.dtype, torch.Tensor]
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_OF_TABLES = ("pos", "cos", "sin", "freq", "rope", "rotary")  # in names of tensors with a row for each position
_FEWEST_POSITIONS = 32  # smaller tables are of something else


@dataclass(frozen=True)
class AsMade:
    """What the class of a model makes of its config, told by a copy: kinds of modules, and functions in them."""

    kinds: tuple[type, ...]  # in the order of ``every_module``
    at: dict[str, type]  # by the module's path
    functions: frozenset[int]  # ids of those that modules hold
    _held: tuple[Any, ...]  # the functions themselves, so that no other one gets their ids


def as_made(copy: nn.Module) -> AsMade:
    modules = every_module(copy)
    held = tuple(_plain(value) for _, value in _callables(modules, set(_DATA)))
    return AsMade(tuple(map(type, modules)), dict(_places(copy)), frozenset(map(id, held)), held)


@dataclass
class OwnCode:
    """One look at a model."""

    # Each module with such code, and what would show other code in its place.
    modules: list[tuple[nn.Module, object]] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)  # all that can be read: ``forward``, activation functions
    of_torch: list[str] = field(default_factory=list)  # names of torch's functions that were replaced

    def __bool__(self) -> bool:
        return bool(self.modules or self.of_torch)

    def shows(self) -> tuple[object, ...]:
        """Equal for the same code alone."""
        codes = (getattr(each, "__code__", None) for each in self.functions)
        return (*((id(module), code) for module, code in self.modules), *map(id, self.functions), *codes)


def shortest_table(model: PreTrainedModel, own: OwnCode) -> int | None:
    """Of tables that the owner's modules hold and may look positions up in; None if there are none.

    A GPU ends the process where a position lies beyond.
    """
    words = model.get_input_embeddings()
    rows: list[int] = []
    for module, _ in own.modules:
        children = (each for each in module._modules.values() if isinstance(each, nn.Embedding))
        rows += [each.num_embeddings for each in children if each is not words]
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.ndim > 1 and any(part in key for part in _OF_TABLES):
                rows.append(max(tensor.shape[:-1]))
    return min((each for each in rows if each >= _FEWEST_POSITIONS), default=None)


class OwnCodeFinder:
    """Looks at one model again and again; most of it at the speed of a walk over the modules."""

    def __init__(self, made: AsMade | None, is_theirs: Callable[[Any], bool]) -> None:
        self._made = made
        self._is_theirs = is_theirs
        self._kinds: tuple[type, ...] = () if made is None else made.kinds  # of the last look
        self._strange: list[int] = []  # places of modules that the class does not make
        self._not_callable = set[type](_DATA)

    def find(self, model: nn.Module, modules: Sequence[nn.Module]) -> OwnCode:
        """modules: all of the model's, in the order of ``every_module``."""
        found = OwnCode()
        for module, code in self._with_own_forward(modules):
            found.modules.append((module, id(code)))
            found.functions.append(code)
        for module in self._not_made_by_the_class(model, modules):
            found.modules.append((module, type(module)))
        for module, function in self._with_own_functions(modules):
            found.modules.append((module, id(function)))
            found.functions.append(function)
        for name, function in _replaced_functions():
            if not self._is_theirs(function):
                found.of_torch.append(name)
                found.functions.append(function)
        return found

    def _with_own_forward(self, modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
        classes: dict[type, Any] = {}  # the `forward` of a class, where it is not theirs; else None
        for module in modules:
            cls = type(module)
            if cls not in classes:
                forward = getattr(cls, "forward", None)
                # Their modules treat tokens alike; where one does not, ``batch_dependent`` says so.
                known = is_of_a_known_library(cls.__module__) and self._is_theirs(forward)
                classes[cls] = None if known else forward or cls
            code = classes[cls]
            if "forward" in module.__dict__ and (set_on_it := own_forward(module)) is not None:
                code = code if self._is_theirs(set_on_it) else set_on_it
            if code is not None:
                yield module, code

    def _not_made_by_the_class(self, model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
        if self._made is None:
            return
        kinds = tuple(map(type, modules))
        if kinds != self._kinds:
            self._strange = list(self._strange_places(model))
            self._kinds = kinds
        for place in self._strange:
            yield modules[place]

    def _strange_places(self, model: nn.Module) -> Iterator[int]:
        """Of the outermost modules: what is inside of them is theirs."""
        assert self._made is not None
        strange: set[str] = set()
        for place, (path, kind) in enumerate(_places(model)):
            if path.rpartition(".")[0] in strange:
                strange.add(path)
            elif self._made.at.get(path) is not kind and not self._is_harmless(kind):
                strange.add(path)
                yield place

    def _is_harmless(self, kind: type) -> bool:
        """Wherever it stands. Below a wrapper, modules of the class's own are at another path."""
        if kind in _EACH_TOKEN or kind.__module__.startswith(_WRAPPERS):
            return True
        return self._made is not None and kind in self._made.kinds and not kind.__module__.startswith("torch.")

    def _with_own_functions(self, modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
        for module, value in _callables(modules, self._not_callable):
            function = _plain(value)
            if self._made is not None and id(function) in self._made.functions:
                continue
            if isinstance(function, BuiltinFunctionType) and self._made is None:
                continue
            if function is checkpoint:  # left by gradient checkpointing: it runs the layer that it is given
                continue
            # Torch's functions include a softmax over the row.
            if not self._is_theirs(function) or _home(function).startswith("torch"):
                yield module, value


def _callables(modules: Sequence[nn.Module], not_callable: set[type]) -> Iterator[tuple[nn.Module, Any]]:
    """Functions, and objects that can be called, which modules hold beside their parts.

    not_callable: kinds of values to pass over; more are added.
    """
    for module in modules:
        held = module.__dict__
        if len(held) <= _TORCHS_OWN:
            continue
        # Torch's own entries come first, unless a class sets something before it calls ``super().__init__``.
        for value in islice(held.values(), _TORCHS_OWN if next(iter(held)) == "training" else 0, None):
            if type(value) in not_callable:
                continue
            if not callable(value):
                not_callable.add(type(value))
            elif not isinstance(value, type | nn.Module) and not _is_looked_at_elsewhere(module, value):
                yield module, value


def _is_looked_at_elsewhere(module: nn.Module, value: Any) -> bool:
    if isinstance(value, MethodType) and value.__self__ is module:
        return True  # a method of its class
    return any(module.__dict__.get(key) is value for key in _SKIPPED)


def _plain(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__func__", function)


def _home(function: Any) -> str:
    if isinstance(function, BuiltinFunctionType):
        return "torch"
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


def _is_torchs(function: Any) -> bool:
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__", "")).startswith("torch")
    return True  # functions in C


_SPACES = (("torch.nn.functional", vars(nn.functional), _FUNCTIONS), ("torch", vars(torch), (BuiltinFunctionType,)))
# Of each space, what its functions are called, and those that are torch's own; None where another was there before.
_TORCHS: list[tuple[str, dict[str, Any], list[str], list[Any]]] = []
for _path, _space, _sorts in _SPACES:
    _names = [name for name, value in _space.items() if isinstance(value, _sorts)]
    _own = [_space[name] if _is_torchs(_space[name]) else None for name in _names]
    _TORCHS.append((_path, _space, _names, _own))


def _replaced_functions() -> Iterator[tuple[str, Any]]:
    for path, space, names, own in _TORCHS:
        now = list(map(space.get, names))
        if now == own:
            continue
        for name, function, before in zip(names, now, own, strict=True):
            if function is not before and callable(function):
                yield f"{path}.{name}", function
