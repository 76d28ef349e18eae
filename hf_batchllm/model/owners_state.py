"""What a model's owner may do to it between two steps, and how it is noticed.

Captured graphs replay what the model was when they were captured, and kept prefixes hold what it computed. Neither must
be used once the model is another.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedConfig

from ..inputs.base_model import base_model
from ..patches.attention_interface import autocast_dtype
from ..patches.attention_swap import steps_lock
from ..patches.sharded_modules import local
from ..patches.uncompiled import every_module, own_forward
from ..patches.unmodified import code_home, is_idle
from .code_in_use import NOTEBOOK, token_of
from .code_reach import names_read_by
from .glance import Glance
from .matmul_precision import matmul_settings

# Forwards that quantisation puts on single modules: they compute with tensors and do nothing else.
_TENSOR_CODE = ("transformers.integrations.", "compressed_tensors.quantization.")

# What modules hold that is looked at in a way of its own, or has no part in a forward pass.
_APART = frozenset(
    [
        *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"),
        *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_non_persistent_buffers_set"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        *("_forward_hooks_always_called", "_is_hf_initialized"),
        *("generate", "generation_config", "warnings_issued"),
        # Of accelerated(): what stands in for methods, and what is left.
        *("generate_batch", "init_continuous_batching", "continuous_batching_context_manager", "last_report"),
        # Of gradient checkpointing, which trainers switch off and on again around each rollout.
        *("_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks"),
    ]
)
# PEFT's notes of the active adapters.
_NOTES = (
    "_active_adapter",
    "_disable_adapters",
    "active_adapters",
    "disable_adapters",
    "active_adapter",
    "_adapters_disabled",
)
_NOT_OWN = _APART.union(_NOTES)
# The layers of a RoPE that depends on the length note these while they run.
_NOTED_BY_ROPE = ("long_inv_freq", "original_inv_freq", "max_seq_len_cached")
_ATTENTION = "_attn_implementation"  # of a config: another attention runs in any case
# Compared by value.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_CONTAINERS = (dict, list, set, OrderedDict)


def not_in_graphs(model: nn.Module) -> str | None:
    """Why ``model`` cannot be captured: a replay would skip Python code of its owner's. None if it can be."""
    with steps_lock(base_model(model).config):
        return _not_in_graphs(model)


def _not_in_graphs(model: nn.Module) -> str | None:
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "the hooks on all modules would not be called"
    if not any(has_hooks(module) or "forward" in module.__dict__ for module in every_module(model)):
        return None  # names take long to make
    for name, module in model.named_modules():
        where = f"`{name}`" if name else "the model"
        if has_hooks(module):
            return f"the hooks on {where} would not be called"
        forward = own_forward(module)
        if forward is not None and not code_home(forward).startswith(_TENSOR_CODE):
            return f"{where} has a `forward` of its own, which would not be called"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether it has hooks that do something. transformers leaves idle ones behind."""
    return bool(_hooks_in(module.__dict__))


def stamp_of(model: nn.Module, device: torch.device) -> list[object]:
    """Equal for as long as a model that runs no custom code computes the same, but for the values of its weights.

    Modules, parameters and buffers are not held: what the user takes out is freed. A step in another thread is waited
    for: it puts forwards in place for as long as it runs.
    """
    with steps_lock(base_model(model).config):
        modules = [_noted_module(name, module) for name, module in model.named_modules()]
        return [_settings(device), list(vars(nn.functional).values()), *modules]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and tensors that are attributes of modules, each once."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        held = module.__dict__
        for each in (*held["_parameters"].values(), *held["_buffers"].values(), *held.values()):
            if isinstance(each, torch.Tensor):
                found[id(each)] = each
    return list(found.values())


def _noted_module(name: str, module: nn.Module) -> tuple[object, ...]:
    held, kind = module.__dict__, type(module)
    notes = {
        key: _noted(each) for key, each in held.items() if key not in _NOT_OWN and not key.endswith(_NOTED_BY_ROPE)
    }
    return name, kind, token_of(getattr(kind, "forward", None)), _hooks_in(held), notes


def _noted(value: Any) -> object:
    """Equal for equal plain values, and for the same objects. The digest of the weights tells what tensors hold."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        return {key: _noted(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return list(map(_noted, value))
    return type(value) if isinstance(value, (torch.Tensor, PreTrainedConfig)) else token_of(value)


class OwnersState:
    """What the owner has set on a model: taken when it is made, compared with the model's state of later.

    Modules, parameters and buffers are not held: what the owner takes out is freed. Python reads much of it every
    time, so the loops read the modules' ``__dict__``, past their ``__getattr__``. A step in another thread is waited
    for: it puts forwards in place for as long as it runs.

    at_a_glance: for who asks often, and not for long: then all of it is held.
    """

    def __init__(self, model: nn.Module, device: torch.device, at_a_glance: bool = False) -> None:
        self._glance: Glance | None = None
        with steps_lock(base_model(model).config):
            self._take(model, device)
            if at_a_glance:
                self._glance = Glance(model.modules())

    def _take(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._settings = _settings(device)
        self._model = weakref.ref(model)
        self._modules = [_ModuleState(name, module) for name, module in model.named_modules()]
        self._code = _Code({entry.kind for entry in self._modules})
        configs: dict[int, PreTrainedConfig] = {}
        for entry in self._modules:
            for value in entry.own.values():
                if isinstance(value, PreTrainedConfig):
                    _collect(value, configs)
        self._configs = [(config, _fields_of(config, frozen=True)) for config in configs.values()]

    def change(self, model: nn.Module, adapters: bool = True, written: bool = False) -> str | None:
        """What is another now, for a message; None if nothing is.

        adapters: whether it matters which adapters are active.
        written: whether it matters what has been written to parameters (see ``weights_digest`` for what goes unnoticed)
            rather than where parameters and buffers are.
        """
        if model is not self._model():
            return "the model"
        with steps_lock(base_model(model).config):
            return self._change(model, adapters, written)

    def _change(self, model: nn.Module, adapters: bool, written: bool) -> str | None:
        if _settings(self._device) != self._settings:
            return "a setting of PyTorch (autocast, hooks on all modules, the default dtype, the matmul precision)"
        if written or self._glance is None or not self._glance.untouched():
            for entry in self._modules:
                if entry.is_another(adapters, written):
                    return f"`{entry.name}`" if entry.name else "the model"
            if self._glance is not None:
                self._glance = Glance(model.modules())
        for config, fields in self._configs:
            if not _same(_fields_of(config), fields):
                return "the model's config"
        return self._code.change()

    def pass_over_changes_since(self, before: OwnersState) -> None:
        """Attributes that passes have written since then are no changes of the owner's: counters, records."""
        if len(before._modules) == len(self._modules):
            for entry, other in zip(self._modules, before._modules, strict=True):
                entry.written = {
                    key
                    for key, value in entry.own.items()
                    if key in other.own and not _equal(value, other.own[key]) and not isinstance(value, nn.Module)
                }

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, buffers and other tensors of the modules, each once."""
        seen: set[int] = set()
        for entry in self._modules:
            for tensor in entry.tensors():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


class _ModuleState:
    """A module, what it holds and what it is made of."""

    __slots__ = (
        "buffers",
        "children",
        "hooks",
        "kind",
        "module",
        "name",
        "notes",
        "own",
        "parameters",
        "plain",
        "written",
    )

    def __init__(self, name: str, module: nn.Module) -> None:
        held = module.__dict__
        self.name = name
        self.module = weakref.ref(module)
        self.kind = type(module)
        self.own = {key: _frozen(value) for key, value in held.items() if key not in _NOT_OWN}
        self.written: set[str] = set()  # attributes that are not compared
        self.notes = _notes_in(held)
        self.plain = [key for key, value in self.own.items() if isinstance(value, torch.Tensor)]
        self.hooks = _hooks_in(held)
        self.children = [(key, None if each is None else weakref.ref(each)) for key, each in held["_modules"].items()]
        self.parameters = [_place(key, each) for key, each in held["_parameters"].items()]
        self.buffers = [_place(key, each) for key, each in held["_buffers"].items()]

    def is_another(self, adapters: bool, written: bool) -> bool:
        module = self.module()
        if module is None or type(module) is not self.kind:
            return True
        held = module.__dict__
        now = {key: value for key, value in held.items() if key not in _NOT_OWN}
        now.update((key, self.own[key]) for key in self.written)
        if not _same(now, self.own):
            return True
        if _hooks_in(held) != self.hooks or (adapters and _notes_in(held) != self.notes):
            return True
        children = held["_modules"]
        if len(children) != len(self.children):
            return True
        for (key, child), (before, ref) in zip(children.items(), self.children, strict=True):
            if key != before or child is not (None if ref is None else ref()):
                return True
        parameters = [_place(key, each) for key, each in held["_parameters"].items()]
        if written:  # forward passes write to buffers, often what was there before: the digest tells
            return parameters != self.parameters
        if [place[:2] for place in parameters] != [place[:2] for place in self.parameters]:
            return True
        buffers = [_place(key, each) for key, each in held["_buffers"].items()]
        return [place[:2] for place in buffers] != [place[:2] for place in self.buffers]

    def tensors(self) -> Iterator[torch.Tensor]:
        module = self.module()
        if module is None:
            return
        held = module.__dict__
        for each in (*held["_parameters"].values(), *held["_buffers"].values(), *map(held.get, self.plain)):
            if isinstance(each, torch.Tensor):
                yield each


class _Code:
    """The code that modules of some classes run: their ``forward``, and what stands beside it in its file."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._forwards = [(kind, *_forward_of(kind)) for kind in kinds]
        homes = {kind.__module__ for kind in kinds if not kind.__module__.startswith("torch.")}
        bases = {base for kind in kinds for base in kind.__mro__ if not base.__module__.startswith("torch.")}
        spaces: list[tuple[str, Mapping[str, Any]]] = [
            (home, vars(sys.modules[home])) for home in homes if home in sys.modules
        ]
        self._beside: list[tuple[str, Mapping[str, Any], dict[str, object]]] = [
            (home, space, {name: value for name, value in space.items() if isinstance(value, (FunctionType, type))})
            for home, space in spaces
            if home != NOTEBOOK
        ]
        for home, space in spaces:
            if home == NOTEBOOK:  # each cell may define a function anew that the model has no part in
                names = names_read_by(bases)
                beside = {name: each for name, each in space.items() if isinstance(each, (FunctionType, type))}
                self._beside.append((home, space, {name: each for name, each in beside.items() if name in names}))
        functions: list[tuple[str, Mapping[str, Any]]] = [
            (f"{base.__module__}.{base.__qualname__}", vars(base)) for base in bases if base is not object
        ]
        functions += [("torch", vars(torch)), ("torch.nn.functional", vars(nn.functional))]
        self._beside += [
            (home, space, {name: value for name, value in space.items() if isinstance(value, _FUNCTIONS)})
            for home, space in functions
        ]

    def change(self) -> str | None:
        for kind, *before in self._forwards:
            if [*_forward_of(kind)] != before:
                return f"the code of {kind.__name__}"
        for home, space, beside in self._beside:
            if not all(map(is_, map(space.get, beside), beside.values())):
                return f"`{next(name for name, value in beside.items() if space.get(name) is not value)}` of {home}"
        return None


def _forward_of(kind: type) -> tuple[Any, Any, Any]:
    forward = getattr(kind, "forward", None)
    return forward, getattr(forward, "__code__", None), kind.__call__


def _settings(device: torch.device) -> tuple[Any, ...]:
    everywhere = nn.modules.module
    return (
        autocast_dtype(device),
        torch.get_default_dtype(),
        matmul_settings(device),
        _named(everywhere._global_forward_hooks),
        _named(everywhere._global_forward_pre_hooks),
        nn.Module._call_impl,
        *_modes(),
    )


def _modes() -> list[tuple[int, type]]:
    """The function and dispatch modes that a caller runs under: they may change what any operation gives."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [(id(mode), type(mode)) for mode in modes if not isinstance(mode, DeviceContext)]


def _hooks_in(held: dict[str, Any]) -> tuple[Any, ...]:
    after, before = held["_forward_hooks"], held["_forward_pre_hooks"]
    return (*_named(before), *_named(after)) if after or before else ()


def _named(hooks: dict[int, Any]) -> tuple[tuple[int, int], ...]:
    """Each hook by its number, which no other one gets, and by itself. Without the idle ones."""
    return tuple((key, id(hook)) for key, hook in hooks.items() if not is_idle(hook))


def _notes_in(held: dict[str, Any]) -> list[Any] | None:
    notes = [held.get(note) for note in _NOTES]
    return None if notes == _NO_NOTES else [_frozen(note) for note in notes]


_NO_NOTES = [None] * len(_NOTES)


def _place(name: str, tensor: torch.Tensor | None) -> tuple[str, object, int | None]:
    """A tensor's name, how it lies in memory, and its version. One made in inference mode has no version."""
    if tensor is None:
        return name, None, None
    try:
        lies: object = local(tensor).data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:  # a tensor made of others has no memory of its own
        lies = id(tensor)
    return name, lies, None if tensor.is_inference() else tensor._version


def _frozen(value: Any) -> Any:
    """A copy of dictionaries, lists and sets, which do not change any more; anything else as it is."""
    if type(value) not in _CONTAINERS:
        return value
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return set(value) if isinstance(value, set) else [_frozen(each) for each in value]


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether two dictionaries hold the same objects, or equal ones."""
    try:
        if now == then:
            return True
    except Exception:  # what cannot be compared, such as tensors, is another
        pass
    return all(
        key in now and key in then and _equal(now[key], then[key])
        for key in now.keys() | then.keys()
        if not key.endswith(_NOTED_BY_ROPE)
    )


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:
        return False


def _collect(config: PreTrainedConfig, found: dict[int, PreTrainedConfig]) -> None:
    if id(config) not in found:
        found[id(config)] = config
        for value in vars(config).values():
            if isinstance(value, PreTrainedConfig):
                _collect(value, found)


def _fields_of(config: PreTrainedConfig, frozen: bool = False) -> dict[str, Any]:
    fields = vars(config).items()
    return {key: _frozen(value) if frozen else value for key, value in fields if not key.startswith(_ATTENTION)}
