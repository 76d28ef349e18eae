"""The functions through which layers carry a state from token to token, and stand-ins that a step runs in their place.

Mixers of transformers (linear attention, state spaces, gated convolutions) call a few functions of their modeling
module: a causal short convolution, and one scan. Without a cache these begin with no state and drop the last one. While
``StateFunctions.applied`` runs, stand-ins are in their place. A stand-in steps aside unless this thread runs a step, in
``state_context(context)``; then it hands the packed tokens to the context, which knows whose they are.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..interrupts import act_on_interrupts
from .swap import Swap, count_lock, in_place
from .unmodified import code_home

Function = Callable[..., Any]
# Arguments that arrive beside the inputs and change nothing about what is computed.
_HARMLESS = frozenset(["position_ids", "cache_position", "logits_to_keep", "chunk_size"])
_HARMLESS |= frozenset(["use_mambapy", "use_associative_scan"])  # by which way it is computed


@dataclass(frozen=True)
class Convolution:
    """A causal convolution, channel by channel, over packed tokens."""

    x: torch.Tensor  # [tokens, channels]
    weight: torch.Tensor  # [channels, taps]
    bias: torch.Tensor | None  # [channels]
    activation: str | None


@dataclass(frozen=True)
class DeltaRule:
    """A gated delta rule over packed tokens; the queries are yet to be scaled."""

    q: torch.Tensor  # [tokens, heads, key_dim]
    k: torch.Tensor  # [tokens, heads, key_dim]
    v: torch.Tensor  # [tokens, value_heads, value_dim]
    decay: torch.Tensor  # [tokens, value_heads], or [tokens, value_heads, key_dim]: logarithms
    beta: torch.Tensor  # [tokens, value_heads]
    normalise: bool
    own: Function | None = None  # of the modeling module, for ``own_delta_rule``


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2's state space over packed tokens."""

    x: torch.Tensor  # [tokens, heads, head_dim]
    dt: torch.Tensor  # [tokens, heads]
    a: torch.Tensor  # [heads]
    b: torch.Tensor  # [tokens, groups, state_dim]
    c: torch.Tensor  # [tokens, groups, state_dim]
    d: torch.Tensor | None  # [heads]
    dt_bias: torch.Tensor | None  # [heads]
    softplus: bool
    limit: tuple[float, float]
    own: Function | None = None  # of the modeling module, for ``own_state_space``
    chunk: int = 64  # tokens that it takes at a time


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba-1's state space over packed tokens: a step of time and a state for each channel."""

    x: torch.Tensor  # [tokens, channels]
    dt: torch.Tensor  # [tokens, channels]
    a: torch.Tensor  # [channels, state_dim]
    b: torch.Tensor  # [tokens, state_dim]
    c: torch.Tensor  # [tokens, state_dim]
    d: torch.Tensor | None  # [channels]
    z: torch.Tensor | None  # [tokens, channels]  a gate
    dt_bias: torch.Tensor | None  # [channels]
    softplus: bool


class StateContext(Protocol):
    """One pass through the model: its spans, and the states that they begin with and leave behind."""

    def convolve(self, call: Convolution) -> torch.Tensor:  # [tokens, channels]
        """The next convolution of the pass."""

    def delta_rule(self, call: DeltaRule) -> torch.Tensor:  # [tokens, value_heads, value_dim]
        """The next delta rule of the pass."""

    def state_space(self, call: StateSpace) -> torch.Tensor:  # [tokens, heads, head_dim] float32
        """The next state space of the pass."""

    def selective_scan(self, call: SelectiveScan) -> torch.Tensor:  # [tokens, channels] float32
        """The next selective scan of the pass."""


_context: ContextVar[StateContext | None] = ContextVar("hf_batchllm_states", default=None)


@contextmanager
def state_context(context: StateContext | None) -> Iterator[None]:
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def states_in_use() -> StateContext | None:
    """The pass of this thread, if it runs a step."""
    return _context.get()


class _Given:
    """The arguments of a call by name. Whatever nobody has asked for in the end must be harmless."""

    def __init__(self, name: str, bound: inspect.BoundArguments) -> None:
        self._name = name
        self._loose = bound.arguments.pop("kwargs", {})  # the own function takes them and passes over them
        self._left = bound.arguments

    def one(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, self._loose.pop(name, default))

    def packed(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.one(name)
        if tensor.shape[0] != 1:
            raise UnsupportedModelError(f"a batch of {tensor.shape[0]} sequences came to `{self._name}`, not one row")
        return tensor[0]

    def none(self, *names: str) -> None:
        for name in names:
            value = self.one(name)
            if value is not None and value is not False:
                raise UnsupportedModelError(f"`{name}` is handed to `{self._name}`; that is not supported")

    def end(self) -> None:
        tensors = [name for name, each in self._loose.items() if isinstance(each, torch.Tensor)]
        self.none(*(name for name in (*self._left, *tensors) if name not in _HARMLESS))


def _convolved(given: _Given, own: Function, context: StateContext) -> Any:
    call = Convolution(given.packed("hidden_states").T, given.one("weight"), given.one("bias"), given.one("activation"))
    given.none("seq_idx", "initial_states", "return_final_states")
    given.end()
    return context.convolve(call).T[None]


def _ruled(given: _Given, own: Function, context: StateContext) -> Any:
    q, k, v, decay, beta = (given.packed(name) for name in ("query", "key", "value", "g", "beta"))
    call = DeltaRule(q, k, v, decay, beta, bool(given.one("use_qk_l2norm_in_kernel")), own)
    given.none("initial_state", "output_final_state", "cu_seqlens")
    given.end()
    return context.delta_rule(call)[None], None


def _spaced(given: _Given, own: Function, context: StateContext) -> Any:
    x, dt, b, c = (given.packed(name) for name in ("hidden_states", "dt", "B", "C"))
    low, high = given.one("dt_limit") or (0.0, math.inf)
    a, d, bias = (given.one(name) for name in ("A", "D", "dt_bias"))
    softplus, chunk = bool(given.one("dt_softplus")), given.one("chunk_size")
    call = StateSpace(x, dt, a, b, c, d, bias, softplus, (low, high), own, chunk)
    given.none("initial_states", "return_final_states", "z", "seq_idx", "cu_seqlens")
    given.end()
    return context.state_space(call)[None]


def _scanned(given: _Given, own: Function, context: StateContext) -> Any:
    x, dt, b, c = (given.packed(name).T for name in ("hidden_states", "dt", "B", "C"))
    gate = given.one("z")
    z = None if gate is None else gate[0].T
    a, d, bias = (given.one(name) for name in ("A", "D", "delta_bias"))
    call = SelectiveScan(x, dt, a, b, c, d, z, bias, bool(given.one("delta_softplus")))
    given.none("return_last_state")
    given.end()
    return context.selective_scan(call).T[None]


def own_delta_rule(
    call: DeltaRule, tokens: slice, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, value_heads, value_dim], [value_heads, key_dim, value_dim]
    """The modeling module's own function over some of the tokens, from ``state`` on; and the state that it leaves."""
    assert call.own is not None
    shared = call.v.shape[1] // call.q.shape[1]  # older functions want as many heads of q and k as of v
    q, k = (x[tokens].repeat_interleave(shared, 1) for x in (call.q, call.k))
    parts = (x[None] for x in (q, k, call.v[tokens], call.decay[tokens], call.beta[tokens]))
    out, left = call.own(
        **dict(zip(("query", "key", "value", "g", "beta"), parts, strict=True)),
        initial_state=None if state is None else state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=call.normalise,
    )
    return out[0], left[0]


def own_state_space(
    call: StateSpace, tokens: slice, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, heads, head_dim], [heads, head_dim, state_dim]
    """The model's own state space, on one span: see ``own_delta_rule``."""
    assert call.own is not None
    x, dt, b, c = (each[None, tokens] for each in (call.x, call.dt, call.b, call.c))
    out, left = call.own(
        **{"hidden_states": x, "dt": dt, "A": call.a, "B": b, "C": c, "D": call.d, "dt_bias": call.dt_bias},
        chunk_size=call.chunk,
        dt_softplus=call.softplus,
        dt_limit=call.limit,
        initial_states=None if state is None else state[None],
        return_final_states=True,
    )
    return out[0], left[0]


_STAND_INS: dict[str, Callable[[_Given, Function, StateContext], Any]] = {
    "causal_conv1d_fn": _convolved,
    "torch_chunk_gated_delta_rule": _ruled,
    "chunk_kimi_delta_attention": _ruled,
    "mamba2_chunk_scan": _spaced,
    "mamba_selective_scan": _scanned,
}


def _passed_over(given: _Given, own: Function, context: StateContext) -> None:
    """The mixer goes on to the functions above, as where no package has a kernel for the whole of it."""


# A whole mixer in one kernel, for models in train mode: all tokens of a row would be of one sequence.
_IN_TRAINING = {"mamba_inner_fn": _passed_over, "mamba2_split_conv1d_scan_combined": _passed_over}


def _stand_in(name: str, own: Function) -> Function:
    signature, run = inspect.signature(own), (_STAND_INS | _IN_TRAINING)[name]

    @functools.wraps(own)
    def function(*given: Any, **named: Any) -> Any:
        context = _context.get()
        if context is None:
            return own(*given, **named)
        act_on_interrupts()
        return run(_Given(name, signature.bind(*given, **named)), own, context)

    function.__dict__[_OWN] = own
    return function


# Proved one by one, against each sequence by itself: what else a mixer does, no list of functions would show.
_KNOWN_MIXERS = frozenset(
    [
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet"),
        *("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"),
        *("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"),
        *("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"),
        *("Zamba2MambaMixer", "Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"),
    ]
)


def is_known_mixer(module: nn.Module) -> bool:
    """Whether its functions are all through which tokens reach those after them."""
    return type(module).__name__ in _KNOWN_MIXERS


def mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The layers that call such functions: each with its name, and the names of the functions."""
    known: dict[type[nn.Module], list[str]] = {}  # a model has many modules of few classes
    for name, module in model.named_modules():
        cls = type(module)
        if cls not in known:
            known[cls] = _called_by(cls)
        if known[cls]:
            yield name, module, known[cls]


def _called_by(cls: type[nn.Module], names: Iterable[str] = _STAND_INS) -> list[str]:
    forward: Any = inspect.getattr_static(cls, "forward", None)  # that of a ScriptModule cannot be asked for
    forward = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    if not code_home(forward).startswith("transformers.models."):
        return []
    held = [(name, forward.__globals__.get(name)) for name in forward.__code__.co_names]
    homes = {name: _written_in(each) for name, each in held if callable(each) and not isinstance(each, type)}
    if any(not home.startswith(("transformers.", "torch")) for home in homes.values()):
        return []  # of a user's function nobody knows what it keeps; some of these run in ``generate`` alone
    return [name for name in names if homes.get(name, "").startswith("transformers.models.")]


def _written_in(function: Any) -> str:
    """The Python module in which a function was written, past what transformers has put around it."""
    function = _unwrapped(function)
    while code_home(function).startswith("transformers.") and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return code_home(function)


_OWN = "_hf_batchllm_own"  # what a stand-in keeps: the function in whose place it is
_applied: dict[
    tuple[int, str], tuple[int, Function]
] = {}  # by module and name: how often applied, and the own function


def own_function(home: dict[str, Any], name: str) -> Function:
    """The function that a modeling module has of its own, also while a stand-in is in its place."""
    return _unwrapped(home[name])


def _unwrapped(function: Function) -> Function:
    own: Function = getattr(function, _OWN, function)
    return own


class StateFunctions(Swap):
    """The stand-ins for one model's mixers. Modules of transformers hold them for all models, so each is counted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        classes = {type(module) for _, module, _ in mixers(model)}
        called = [(cls, name) for cls in classes for name in _called_by(cls, (*_STAND_INS, *_IN_TRAINING))]
        self._places = [(inspect.unwrap(cls.forward).__globals__, name) for cls, name in called]
        self._entered: list[tuple[dict[str, Any], str]] = []

    def apply(self) -> None:
        in_place[self] = None
        for place, name in self._places:
            self._entered.append((place, name))
            self._enter(place, name)

    def restore(self) -> None:
        while self._entered:
            self._leave(*self._entered[-1])
            self._entered.pop()
        in_place.pop(self, None)

    @staticmethod
    def _enter(place: dict[str, Any], name: str) -> None:
        with count_lock:
            own = _unwrapped(place[name])  # an interrupt may have left a stand-in there
            count, _ = _applied.get((id(place), name), (0, own))
            if place[name] is own:
                place[name] = _stand_in(name, own)
            _applied[id(place), name] = count + 1, own

    @staticmethod
    def _leave(place: dict[str, Any], name: str) -> None:
        with count_lock:
            count, own = _applied.get((id(place), name), (0, _unwrapped(place[name])))
            if count > 1:
                _applied[id(place), name] = count - 1, own
            else:
                place[name] = own
                _applied.pop((id(place), name), None)
