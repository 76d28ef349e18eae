"""What code of an owner's reaches by name: functions beside it, and the plain values that it reads.

Not seen: names that are put together while the code runs (``getattr``, ``globals()[...]``), files, and what lies deeper
than a few objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..patches.sharded_modules import local
from ..patches.uncompiled import every_module

# Their code reads what ``owners_state`` compares in another way, or what does not change.
_KNOWN_LIBRARIES = frozenset(
    ["transformers", "torch", "peft", "accelerate", "bitsandbytes", "compressed_tensors", "torchao", "hf_batchllm"]
)
_PLAIN = frozenset([int, float, bool, str, bytes, complex, type(None)])
_SEQUENCES = (list, tuple, set, frozenset)
_DEPTH = 5  # objects in objects
_MOST = 4096  # values that are compared, all in all
_WIDTH = 256  # of one list or dictionary


def functions_behind(value: Any) -> Iterator[FunctionType]:
    """The functions in what a class holds by a name: a method, a property, a wrapper with what it wraps."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, property):
            waiting += [each.fget, each.fset]
        elif isinstance(each, partial):
            waiting.append(each.func)
        elif isinstance(each, MethodType | staticmethod | classmethod):
            waiting.append(each.__func__)
        elif isinstance(each, FunctionType):
            yield each
            waiting.append(getattr(each, "__wrapped__", None))
            waiting += [held for held in _closure(each) if isinstance(held, FunctionType | MethodType | partial)]


def reached_from(roots: Iterable[FunctionType]) -> list[FunctionType]:
    """The functions themselves, and those that they call by name, as far as these are no known library's."""
    found: dict[int, FunctionType] = {}
    waiting = list(roots)
    while waiting:
        function = waiting.pop()
        if id(function) in found or is_of_a_known_library(function.__globals__.get("__name__", "")):
            continue
        found[id(function)] = function
        for value in map(function.__globals__.get, names_in(function.__code__)):
            waiting += functions_behind(value)
            if isinstance(value, type) and not is_of_a_known_library(value.__module__):
                waiting += [inner for held in vars(value).values() for inner in functions_behind(held)]
    return list(found.values())


def names_read_by(classes: Iterable[type], forwards: Iterable[Any] = ()) -> set[str]:
    """All names in the code of the classes, in ``forwards``, and in what these call by name."""
    held = (value for each in classes for value in vars(each).values())
    roots = [function for value in (*held, *forwards) for function in functions_behind(value)]
    return set[str]().union(*(names_in(each.__code__) for each in reached_from(roots)))


def names_in(code: CodeType) -> set[str]:
    """The global names and attributes in a function, and in those that are defined inside of it."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


class PlainReads:
    """Plain values that the classes of an owner's in a model can read, and that are no attribute of a module.

    ``now()`` is equal for as long as they are. Empty, and free, for a model without such classes.
    """

    def __init__(self, model: nn.Module, is_theirs: Callable[[Any], bool], functions: Iterable[Any] = ()) -> None:
        """functions: what else runs, such as the ``forward`` of a single module."""
        modules = every_module(model)
        kinds = dict.fromkeys(map(type, modules))
        bases = {base: None for kind in kinds for base in kind.__mro__ if not is_of_a_known_library(base.__module__)}
        self._classes = [base for base in bases if base is not object]
        roots = [each for base in self._classes for value in vars(base).values() for each in functions_behind(value)]
        for kind in kinds:  # of a known library's class, where its ``forward`` was replaced
            if (forward := getattr(kind, "forward", None)) is not None and not is_theirs(forward):
                roots += functions_behind(forward)
        self._objects: list[Any] = []
        for each in functions:
            roots += functions_behind(each)
            if not isinstance(each, FunctionType | type):  # a method, or an object that can be called
                roots += functions_behind(vars(type(each)).get("__call__"))
                self._objects.append(getattr(each, "__self__", each))
        self._functions = reached_from(roots)
        self._modules = [weakref.ref(each) for each in modules if not is_of_a_known_library(type(each).__module__)]
        self._spaces = list(_spaces_of(self._functions))

    def __bool__(self) -> bool:
        return bool(self._functions)

    def now(self, tensors: list[torch.Tensor] | None = None) -> tuple[object, ...]:
        """tensors: takes the tensors among what is read."""
        if not self._functions:
            return ()
        note = _Notes(tensors)
        found: list[object] = []
        for function in self._functions:
            found += [note(held) for held in (*_closure(function), function.__defaults__, function.__kwdefaults__)]
        found += [note(space.get(name)) for space, name in self._spaces]
        found += [note(each) for each in self._objects]
        for base in self._classes:
            found += [note(value) for value in vars(base).values()]
        for module in (ref() for ref in self._modules):
            if module is not None:
                own = (value for key, value in module.__dict__.items() if key not in _MODULES_OWN)
                found += [note(value) for value in own]
        return tuple(found)


_MODULES_OWN = frozenset(nn.Module().__dict__)


def _spaces_of(functions: Iterable[FunctionType]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each namespace, and a name in it by which the functions read something."""
    seen: set[tuple[int, str]] = set()
    for function in functions:
        names, space = names_in(function.__code__), function.__globals__
        spaces: list[Mapping[str, Any]] = [space]
        for value in map(space.get, names):
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
            if isinstance(value, ModuleType | type) and not is_of_a_known_library(home):
                spaces.append(vars(value))
        for each in spaces:
            for name in sorted(names):
                if name in each and (id(each), name) not in seen:
                    seen.add((id(each), name))
                    yield each, name


class _Notes:
    """Notes of values: equal for equal plain values, and elsewhere for the same objects."""

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        self._left = _MOST
        self._tensors = tensors

    def __call__(self, value: Any, depth: int = _DEPTH) -> object:
        kind = type(value)
        self._left -= 1
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, torch.Tensor):
            if self._tensors is not None:
                self._tensors.append(value)
            return id(value), _address(value)
        if self._left <= 0 or not depth:
            return id(value)
        if isinstance(value, _SEQUENCES):
            return kind, len(value), *[self(each, depth - 1) for each in islice(value, _WIDTH)]
        if isinstance(value, dict):
            return kind, len(value), *[(id(key), self(each, depth - 1)) for key, each in islice(value.items(), _WIDTH)]
        if isinstance(value, type | ModuleType | FunctionType | nn.Module | PreTrainedConfig) or is_of_a_known_library(
            kind.__module__
        ):
            return id(value)
        held = getattr(value, "__dict__", None)
        return id(value) if type(held) is not dict else (id(value), self(held, depth))


def _address(tensor: torch.Tensor) -> int | None:
    """A graph reads what lies there at the time, so that values written to a tensor need not be compared."""
    try:
        return local(tensor).data_ptr()
    except RuntimeError:  # a tensor made of others has no memory of its own
        return None


def _closure(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled in yet
            continue
    return found


def is_of_a_known_library(home: str) -> bool:
    return home.partition(".")[0] in _KNOWN_LIBRARIES
