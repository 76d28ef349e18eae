"""What a model's architecture asks of the engine, and whether the engine can give it.

Its config alone is not believed: a copy of the model without weights (on PyTorch's meta device) is run over two tokens
with an attention function that takes notes. A model that bypasses that function, or hands it things that it cannot
honour, is refused by name before anything runs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import UnsupportedModelError
from ...inputs.base_model import base_model
from ...patches.attention_interface import ATTENTION_NAME, AttentionCall
from ...patches.mask_probe import MASK_PROBE_NAME, NotedMask, attention_masks_noted
from ...patches.uncompiled import every_module
from ..attention.kv_storage import AttentionShape, kv_dtype
from ..states.state_layers import StateNotes, attention_expected, layer_kinds, refuse_by_states, refuse_unknown_kinds
from ..states.state_storage import StateShape
from .architecture_refusals import (
    refuse_dropped_layers,
    refuse_equal_numbers,
    refuse_own_positions,
    refuse_own_temperature,
    refuse_windows_of_the_cache,
)
from .code_in_use import CodeInUse, code_in_use, has_changed
from .custom_code import refuse_custom_code
from .generation_methods import refuse_methods, refuse_positions_from_elsewhere
from .own_code import AsMade, as_made
from .sharded import refuse_adapters_of_sharded, refuse_sharded
from .token_by_token import TokenByToken
from .trial_passes import attended_by
from .unpacking import unpack
from .user_layers import LENGTH_DEPENDENT_ROPE, made_like, rope_limit

_BYPASSES = (
    "{} does not call transformers' AttentionInterface: it brings an attention of its own, and that cannot be served"
)
# Positions of queries that masks are asked about: at the start, and so far from it that any window or chunk shows.
_QUERIES = (1, 6, 1_000_000)
_POSITION_TABLES = {"wpe", "embed_positions", "position_embeddings"}  # GPT-2's, OPT's and BART's, BERT's

# The calls of a pass, the states that it carries, and whether the model selects rows.
_Noted = tuple[list[AttentionCall], list[StateShape], bool]
# Of architectures looked at before; they hold no memory, as they come from copies without data.
_SEEN: dict[tuple[object, ...], tuple[_Noted, AsMade]] = {}
_MOST_ARCHITECTURES_KEPT = 16
_POSITIONS_IF_UNKNOWN = 1024


@dataclass(frozen=True)
class Architecture:
    """What the engine needs to know of a model."""

    name: str
    layers: int  # with attention
    kv_values_per_token: int  # over all layers that have K and V of their own
    kv_bytes_per_token: int
    vocab_size: int
    max_positions: int | None  # the model has no positions beyond these
    rope_limit: int | None  # in longer sequences, a length-dependent RoPE would change what is computed
    device: torch.device
    attention: tuple[AttentionShape, ...]  # of each layer, in the order in which they run
    states: tuple[StateShape, ...]  # that a pass carries from token to token, in the order of its calls
    slot_bytes: int  # of all of them, for one sequence
    selects_rows: bool  # whether the model can be told which tokens to compute logits of
    look: CodeInUse = field(repr=False, compare=False)  # the model as it was inspected
    own_code: TokenByToken = field(repr=False, compare=False)
    head_rows: int | None = None  # ids that have logits, where the head of the model tells
    parts: int = 1  # processes that have the model together, each a part of its weights


def inspect_model(model: nn.Module) -> Architecture:
    """Look at ``model`` without running it. If it is not supported, UnsupportedModelError says why."""
    inner = base_model(model)
    name = type(inner).__name__
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} puts learned tokens in front of every prompt (prompt learning); "
            "that is not supported. Adapters that change weights, such as LoRA, are"
        )
    modules = every_module(inner)
    device = _single_device(inner, modules, name)
    _refuse_by_config(inner, name)
    _refuse_repeated_layers(modules, name)
    refuse_equal_numbers(inner, name)
    look = code_in_use(inner)
    refuse_custom_code(inner, look, name)
    refuse_methods(inner, name)
    (calls, states, selects_rows), made = _attention_calls(inner, name, look)
    parts = getattr(inner, "_tp_size", None) or 1
    if parts > 1:  # the copy has the heads of all parts: the model itself shows those that are here
        refuse_adapters_of_sharded(model, name)
        notes = _noted_pass(inner, device, ATTENTION_NAME, selects_rows)[0]
        calls, states = notes.noted, notes.states.noted
    refuse_by_states(inner, layer_kinds(inner), states, name)
    _refuse_by_calls(inner, name, calls, states)
    refuse_positions_from_elsewhere(inner, name)
    refuse_own_temperature([call.layer for call in calls], name)
    refuse_windows_of_the_cache(inner, name, calls)
    config = inner.config.get_text_config(decoder=True)
    max_positions, of_rope = _learned_positions(inner), rope_limit(inner, _rope_limit(config))
    longest = _longest_position(config, max_positions, of_rope)
    own_code = TokenByToken(name, made, longest, selects_rows)
    own_code.refuse_mixed_tokens(inner, modules)
    shapes = tuple(_shape_of(call, calls) for call in calls)
    values = sum(shape.kv_values for shape in shapes if shape.source is None)
    return Architecture(
        name=name,
        layers=len(calls),
        kv_values_per_token=values,
        kv_bytes_per_token=values * inner.dtype.itemsize,
        vocab_size=_vocab_size(inner),
        max_positions=max_positions,
        rope_limit=of_rope,
        device=device,
        attention=shapes,
        states=tuple(states),
        slot_bytes=sum(each.bytes(inner.dtype) for each in states),
        selects_rows=selects_rows,
        look=look,
        own_code=own_code,
        head_rows=_head_rows(inner),
        parts=parts,
    )


def _shape_of(call: AttentionCall, calls: list[AttentionCall]) -> AttentionShape:
    _, kv_heads, qk_dim = call.k.shape
    source = None if call.source is None else [each.layer for each in calls].index(call.source)
    return AttentionShape(call.q.shape[1], kv_heads, qk_dim, call.v.shape[2], source)


def look_again(architecture: Architecture, model: nn.Module) -> Architecture:
    """With what a user may change between two calls: the weights' device and type, the size of the vocabulary."""
    inner = base_model(model)
    unpack(inner)
    modules = every_module(inner)
    device = _single_device(inner, modules, architecture.name)
    _refuse_repeated_layers(modules, architecture.name)
    refuse_dropped_layers(modules, architecture.name)
    if has_changed(inner, architecture.look):
        before, architecture = architecture, inspect_model(model)
        if (architecture.attention, architecture.states) != (before.attention, before.states):
            raise UnsupportedModelError(
                f"{architecture.name} has other layers than when this BatchGenerator was made: make a new one"
            )
    else:
        architecture.own_code.refuse_mixed_tokens(inner, modules)
    dtype = kv_dtype(model, device)
    return replace(
        architecture,
        kv_bytes_per_token=architecture.kv_values_per_token * dtype.itemsize,
        slot_bytes=sum(each.bytes(dtype) for each in architecture.states),
        vocab_size=_vocab_size(inner),
        device=device,
        head_rows=_head_rows(inner),
    )


def _vocab_size(model: PreTrainedModel) -> int:
    rows: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
    stated: int = model.config.get_text_config(decoder=True).vocab_size
    return rows or stated


def _head_rows(model: PreTrainedModel) -> int | None:
    head: Any = model.get_output_embeddings()
    rows = getattr(head, "out_features", None)
    weight = getattr(head, "weight", None)
    if rows is None and isinstance(weight, torch.Tensor) and weight.ndim == 2:  # a head of the user's own class
        hidden = model.config.get_text_config(decoder=True).hidden_size
        rows = weight.shape[0] if weight.shape[1] == hidden and weight.shape[0] != hidden else None
    return rows if isinstance(rows, int) else None


def _single_device(model: PreTrainedModel, modules: Sequence[nn.Module], name: str) -> torch.device:
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    refuse_sharded(model, parameters, name)
    devices = {tensor.device for tensor in parameters}
    placed = set(getattr(model, "hf_device_map", {}).values())
    if torch.device("meta") in devices or (placed & {"disk", "cpu"} and len(placed) > 1):
        raise UnsupportedModelError(
            f"{name} has weights that are not in memory (on the meta device, or off-loaded): load it whole first"
        )
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(
            f"{name} is spread over several devices ({where}), one of which works at a time: it must be on a single "
            "one. Several processes can run a model together that is larger than a GPU: load it in each of them with "
            "`distributed_config=DistributedConfig(tp_size=...)` in the place of `device_map` "
            "(docs/larger-models.md)"
        )
    return devices.pop()


def _refuse_by_config(model: PreTrainedModel, name: str) -> None:
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head to generate with: load it as AutoModelForCausalLM"
        )
    if wanted := _asked_for_beside_text(model):
        raise UnsupportedModelError(
            f"{name} cannot run on text alone: its forward pass asks for {' and '.join(f'`{each}`' for each in wanted)}"
        )
    refuse_unknown_kinds(model, name)


def _asked_for_beside_text(model: PreTrainedModel) -> list[str]:
    parameters = inspect.signature(type(model).forward).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in several]
    return [name for name in needed if name not in ("self", "input_ids")]


def _refuse_repeated_layers(modules: Sequence[nn.Module], name: str) -> None:
    """Looks at the model itself: a copy of its architecture does not show changes to its list of layers."""
    for module in modules:
        if isinstance(module, nn.ModuleList):
            layers = [each for each in module._modules.values() if isinstance(each, GradientCheckpointingLayer)]
            if len(set(layers)) < len(layers):
                raise UnsupportedModelError(
                    f"{name} has a layer that stands in several places, and would overwrite its own K and V; that is "
                    "not supported: put copies there (copy.deepcopy), and give each a `layer_idx` of its own"
                )


def _refuse_by_calls(
    model: PreTrainedModel, name: str, calls: list[AttentionCall], states: Sequence[StateShape]
) -> None:
    if not calls and not states:
        raise UnsupportedModelError(_BYPASSES.format(name))
    if calls:
        refuse_own_positions(model, name)
    expected = attention_expected(model)
    if expected is not None and len(calls) != expected:
        raise UnsupportedModelError(
            f"{name} has {expected} layers, and attends {len(calls)} times through transformers' AttentionInterface; "
            "layers with an attention of their own are not supported"
        )
    if len({call.layer for call in calls}) != len(calls):
        raise UnsupportedModelError(f"{name} runs an attention layer several times in a pass; that is not supported")


class _NoteTaker:
    """Notes each call and answers with a tensor of the right shape."""

    def __init__(self, takes_masks: bool) -> None:
        self.takes_masks = takes_masks
        self.calls = 0
        self.noted: list[AttentionCall] = []
        self.states = StateNotes()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        self.noted.append(call)
        return torch.zeros(*call.q.shape[:2], call.v.shape[2], dtype=call.q.dtype, device=call.q.device)


def _attention_calls(model: PreTrainedModel, name: str, look: CodeInUse) -> tuple[_Noted, AsMade | None]:
    """The calls of one pass, from a copy of the architecture without weights where that can be made and run."""
    # Such a copy depends on this alone. Making and running it takes half a second where there are many layers.
    key = look.architecture
    if key in _SEEN:
        return _SEEN[key]
    made = None
    try:
        # The copy's weights are never filled in, yet making them may draw random numbers: the caller's must not move.
        # In bfloat16: on the meta device the grouped products of experts are defined for that type alone.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            skeleton: nn.Module = type(model)(copy.deepcopy(model.config))
            skeleton = skeleton.to(torch.bfloat16).eval()
        made = as_made(skeleton)
        with made_like(skeleton, model, name) as alike:
            noted = _noted_passes(skeleton, torch.device("meta"), name)
            alike.check(noted[0])
        if len(_SEEN) >= _MOST_ARCHITECTURES_KEPT:
            _SEEN.pop(next(iter(_SEEN)), None)
        _SEEN[key] = noted, made
        return noted, made
    except UnsupportedModelError:
        raise
    except Exception:
        # Some architectures read values of tensors (which expert, how long): the model itself runs over two tokens.
        try:
            return _noted_passes(model, next(model.parameters()).device, name), made
        except UnsupportedModelError:
            raise
        except Exception as error:
            why = f"{{}} cannot be run with an attention function from outside: {error}"
            bypasses = not model._can_set_attn_implementation()
            raise UnsupportedModelError((_BYPASSES if bypasses else why).format(name)) from error


def _noted_passes(model: nn.Module, device: torch.device, name: str) -> _Noted:
    """The calls of a pass as the engine makes it, checked against the masks that the model would ask for."""
    selects = _selects_rows(model, device)
    notes, _ = _noted_pass(model, device, ATTENTION_NAME, selects)
    with attention_masks_noted() as masks:
        for call in _noted_pass(model, device, MASK_PROBE_NAME, selects)[0].noted:
            _refuse_by_mask(call, masks.get(id(call.mask)), name, drops_rows=not selects and _knows_rows(type(model)))
    return notes.noted, notes.states.noted, selects


def _selects_rows(model: nn.Module, device: torch.device) -> bool:
    parameters = inspect.signature(base_model(model).forward).parameters
    if "logits_to_keep" in parameters:
        return True
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()) or not _knows_rows(type(model)):
        return False
    # A `forward(*args, **kwargs)` around that of a class which selects rows: it may pass on everything, or not.
    try:
        return _noted_pass(model, device, ATTENTION_NAME, selects_rows=True)[1] == 1
    except Exception:  # the passes without `logits_to_keep` tell what is wrong, if anything is
        return False


def _knows_rows(cls: type) -> bool:
    """Whether the ``forward`` of a class, or one that it overrides, can be told which logits to compute."""
    forwards = (vars(each)["forward"] for each in cls.__mro__ if "forward" in vars(each))
    return any("logits_to_keep" in inspect.signature(forward).parameters for forward in forwards)


def _noted_pass(model: nn.Module, device: torch.device, attention: str, selects_rows: bool) -> tuple[_NoteTaker, int]:
    """Notes of a pass over two tokens, and the number of rows of logits. ``selects_rows``: the second alone."""
    notes = _NoteTaker(takes_masks=attention == MASK_PROBE_NAME)
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    states = None if notes.takes_masks else notes.states  # with a cache, states are carried in it
    with attended_by(model, every_module(model), attention, notes, states):
        # Without a cache, transformers reads the positions for packed sequences before it describes a mask: on the
        # meta device there are none to read.
        # As the engine runs it: a few classes hand `logits_to_keep` on to their attention, and with a number of
        # tokens, or none, Gemma 4 hands its last layers copies of the masks.
        rows = {"logits_to_keep": torch.tensor([1], device=device)} if selects_rows else {}
        output = model(input_ids=ids, position_ids=positions, use_cache=notes.takes_masks, **rows)
    logits = getattr(output, "logits", None)
    return notes, 0 if logits is None else logits.shape[1]


def _refuse_by_mask(call: AttentionCall, mask: NotedMask | None, name: str, drops_rows: bool) -> None:
    """A layer's mask must say no more than causality and the layer's ``sliding_window`` say: it is left out."""
    if call.mask is None:
        return  # the model asks for no mask
    if mask is None and drops_rows:
        raise UnsupportedModelError(
            f"{name} has a `forward` of its own that does not pass `logits_to_keep` on. Without it, the class below "
            "changes its attention masks on the way; that is not supported: let `forward` take it, and pass it on"
        )
    if mask is None:
        raise UnsupportedModelError(f"{name} changes its attention masks on the way; that is not supported")
    for at in _QUERIES:
        window = call.window or at + 1
        keys = {0, at // 2, at - window, at - window + 1, at - 1, at, at + 1}
        if any(key >= 0 and mask.sees(at, key) != (at - window < key <= at) for key in keys):
            raise UnsupportedModelError(
                f"{name} keeps in its attention mask alone which tokens see which (a window, chunks, both directions); "
                "that is not supported"
            )


def _learned_positions(model: PreTrainedModel) -> int | None:
    """The rows of the model's table of learned positions, if it has one: it stands beside the table of tokens.

    An encoder for images or sounds may have a table as well, which says nothing of text.
    """
    tokens = model.get_input_embeddings()
    for module in every_module(model):
        beside = module._modules
        if any(each is tokens for each in beside.values()):
            for name in _POSITION_TABLES & beside.keys():
                if isinstance(table := beside[name], nn.Embedding):
                    return table.num_embeddings - getattr(table, "offset", 0)
    return None


def _longest_position(config: PreTrainedConfig, *limits: int | None) -> int:
    """How many positions the model knows, and computes alike whatever the longest among them is."""
    stated = getattr(config, "max_position_embeddings", None)
    known = [each for each in (stated, *limits) if isinstance(each, int) and each > 0]
    return min(known, default=_POSITIONS_IF_UNKNOWN)


def _rope_limit(config: PreTrainedConfig) -> int | None:
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = parameters.values() if all(isinstance(value, dict) for value in parameters.values()) else [parameters]
    limits = []
    for rope in each:
        if rope.get("rope_type", rope.get("type")) in LENGTH_DEPENDENT_ROPE:
            trained = rope.get("original_max_position_embeddings")
            trained = trained or getattr(config, "original_max_position_embeddings", None)
            limits.append(trained or config.max_position_embeddings)
    return min(limits) if limits else None
