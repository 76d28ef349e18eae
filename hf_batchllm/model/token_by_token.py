"""Code of an owner's inside a model must treat every token by itself: the engine's row holds many prompts.

Only attention, which the engine does itself, may bring tokens together. A module may mix tokens (a shift by one place,
a mean over the row), count positions by itself, or pass over which rows of logits are asked for. Its code does not say.
So the model runs over a few tokens, among other neighbours each time, with an attention that sees none of them: each
token must give the same logits. Models that run transformers' code alone are not run.

Nor can be seen what such code reads: a number in a closure, a tensor in a list. ``answers_of_own_code`` shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..patches.attention_interface import (
    ATTENTION_NAME,
    AttentionCall,
    attention_context,
    autocast_dtype,
    context_in_use,
    use_context,
)
from ..patches.attention_swap import AttentionSwap
from ..patches.mask_probe import MASK_PROBE_NAME, attention_masks_noted
from ..patches.uncompiled import Uncompiled, every_module, own_forward
from .batch_dependent import depends_on_batch
from .matmul_precision import multiplies_exactly

# Their modules treat tokens alike; where one does not, ``batch_dependent`` says so.
_THEIRS = frozenset(
    ["transformers", "torch", "peft", "accelerate", "bitsandbytes", "compressed_tensors", "torchao", "hf_batchllm"]
)
_TOKENS = 8
# Places in the row of each pass's tokens; the first half of the tokens is the same in all passes.
_ORDERS = ((0, 1, 2, 3, 4, 5, 6, 7), (6, 3, 0, 5, 2, 7, 4, 1), (7, 6, 5, 4, 3, 2, 1, 0))
_KEPT = (2, 5)  # rows asked for by `logits_to_keep`
# How far logits of the same token may be apart, of their size: rounding, which adds up over many layers.
_ROUNDING, _ROUNDING_OF_TF32, _ROUNDING_OF_HALF = 1e-4, 1e-2, 0.2
# The same, where passes are of one shape and the token is at one place: a product's rows are then rounded alike. Which
# kernel computes an expert may depend on how many of the tokens are sent to it; and some kernels add up in any order.
_ROUNDING_IN_PLACE, _ROUNDING_OF_CHANCE = 2e-3, 0.02
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configs
_SAME = slice(0, None, 2)  # places in such passes of what stays
_MIXED = "a token's logits depend on which other tokens stand beside it, or on its place in the row"

_Seen = tuple[tuple[object, ...], ...]
_known: weakref.WeakKeyDictionary[nn.Module, _Seen] = weakref.WeakKeyDictionary()  # what was tried and found good


def refuse_mixed_tokens(
    model: PreTrainedModel,
    modules: Sequence[nn.Module],
    name: str,
    is_theirs: Callable[[Any], bool],
    selects_rows: bool,
) -> None:
    """Tries the model where code in it is neither transformers' nor a known library's, once for the same code.

    modules: all of the model's.
    """
    own = _own_code(modules, is_theirs)
    if not own or _known.get(model) == own or depends_on_batch(model) is not None:
        return
    with _by_itself(model, modules):
        why = _difference(model, selects_rows)
    if why is None and _hides_tokens(model, modules):
        why = "it hides tokens by an attention mask of its own making"
    if why is not None:
        raise UnsupportedModelError(
            f"{name} runs code that is not transformers' own ({_place_of(model, own)}). Tried on a few tokens, {why}. "
            "Here many prompts stand side by side in one row, and only attention may bring tokens together: use "
            "model.generate, or take that code out"
        )
    _known[model] = own


def answers_of_own_code(model: PreTrainedModel, hooked: bool, is_theirs: Callable[[Any], bool]) -> torch.Tensor | None:
    """Logits of a few tokens, which change with nearly all that an owner's code reads; not numbers where it fails.

    None for models without such code. ``hooked``: whether an owner's hooks are on the model.
    """
    modules = every_module(model)
    if not hooked and not _own_code(modules, is_theirs):
        return None
    with _by_itself(model, modules):
        try:
            ids = _some_tokens(model, torch.Generator().manual_seed(1), _TOKENS)
            logits: torch.Tensor = _run(model, ids, range(_TOKENS)).clone()
            return logits
        except Exception:
            return torch.full((1,), torch.nan, dtype=torch.float32, device="cpu")


@contextmanager
def _by_itself(model: PreTrainedModel, modules: Sequence[nn.Module], attention: str = ATTENTION_NAME) -> Iterator[None]:
    """While the block runs, the model runs with an attention in which tokens do not see each other."""
    swap, grad_mode, context = AttentionSwap(model), torch.is_grad_enabled(), context_in_use()
    compiled = Uncompiled(modules)
    try:
        with (
            _random_numbers_kept(model),
            torch.no_grad(),
            swap.applied(attention),
            compiled.applied(),
            attention_context(_EachByItself(takes_masks=attention == MASK_PROBE_NAME)),
        ):
            yield
    finally:  # once more: an interrupt may have come while the block above restored things
        compiled.restore()
        swap.restore()
        torch.set_grad_enabled(grad_mode)
        use_context(context)


def _random_numbers_kept(model: PreTrainedModel) -> AbstractContextManager[None]:
    """While the block runs, torch's random numbers go on from where they are; then they are there again."""
    return torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else [])


class _EachByItself:
    """Attention in which a token sees itself alone, at its position."""

    def __init__(self, takes_masks: bool) -> None:
        self.takes_masks = takes_masks
        self.calls = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:  # [tokens, heads, v_dim]
        self.calls += 1
        # A product of q and k would not show the position: both are rotated alike.
        shares = call.q.shape[1] // call.k.shape[1]
        keys, values = (each.repeat_interleave(shares, dim=1) for each in (call.k, call.v))
        of_q, of_k = (each.float().cumsum(-1).mean(-1, keepdim=True).tanh() for each in (call.q, keys))
        return values * (1 + of_q + of_k).to(values.dtype)


def _some_tokens(model: PreTrainedModel, generator: torch.Generator, count: int) -> list[int]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    found: list[int] = torch.randint(vocabulary, (count,), generator=generator, device="cpu").tolist()
    return found


def _run(
    model: Any, tokens: Sequence[int], places: Sequence[int], use_cache: bool = False, **more: Any
) -> torch.Tensor:
    ids, positions = (torch.tensor([[*each]], device=model.device) for each in (tokens, places))
    output = model(input_ids=ids, position_ids=positions, use_cache=use_cache, return_dict=True, **more)
    logits: torch.Tensor = output.logits[0]
    return logits  # [tokens, vocabulary]


def _difference(model: PreTrainedModel, selects_rows: bool) -> str | None:
    """In words that follow "tried on a few tokens"; None if each token is treated by itself."""
    generator = torch.Generator().manual_seed(0)
    same = _some_tokens(model, generator, _TOKENS // 2)
    found: list[torch.Tensor] = []  # of each pass, the logits of the tokens that are the same

    allowed = _rounding(model)
    config = model.config.get_text_config(decoder=True)
    has_experts = any(getattr(config, each, 0) for each in _EXPERTS)
    loosely, exact = min(allowed, _ROUNDING_OF_CHANCE), not has_experts
    # In half precision rounding may send a token to another expert; what mixes tokens shows in most of them.
    share = 0.5 if allowed == _ROUNDING_OF_HALF else 0.0

    def far(one: torch.Tensor, other: torch.Tensor, allowed: float = allowed) -> bool:
        one, other = one.float(), other.float()
        apart = (one - other).norm(dim=-1) > allowed * one.norm(dim=-1)
        return bool(apart.float().mean() > share)

    def from_one_state() -> torch.Tensor:
        with _random_numbers_kept(model):
            return _run(model, in_order, order)

    try:
        for order in _ORDERS:
            tokens = same + _some_tokens(model, generator, _TOKENS // 2)
            in_order = [tokens[place] for place in order]
            logits = _run(model, in_order, order)
            found.append(logits[[order.index(place) for place in range(len(same))]])
            again = _run(model, in_order, order)
            exact = exact and torch.equal(logits, again)
            if far(logits, again, loosely):
                if far(from_one_state(), from_one_state(), loosely):
                    return (
                        "it gives other logits for the same tokens from pass to pass: it counts passes, keeps another "
                        "state, or draws random numbers that torch.manual_seed does not reach"
                    )
                return None  # it draws random numbers, as dropout does: no two passes are alike, whatever the tokens
        one, other = (_run(model, _mixed(same, model, generator), range(_TOKENS))[_SAME] for _ in range(2))
    except Exception:  # a call will show the error
        return None
    in_place = far(one, other, min(allowed, _ROUNDING_IN_PLACE) if exact else loosely)
    if in_place or any(far(found[0], each) for each in found[1:]):
        return _MIXED
    try:
        alone = [_run(model, [token], [place]) for place, token in enumerate(same)]
    except Exception as error:  # steps of one token are usual
        return f"its forward pass fails with a single token ({error})"
    if far(found[0], torch.cat(alone)):
        return _MIXED
    if selects_rows:
        for kept in (_KEPT[:1], _KEPT):
            try:
                rows = _run(model, in_order, order, logits_to_keep=torch.tensor(kept, device=model.device))
            except Exception as error:
                return f"its forward pass fails with a tensor of places as `logits_to_keep` ({error})"
            if rows.shape[0] != len(kept) or far(logits[list(kept)], rows):
                return "its forward pass takes `logits_to_keep` and does not give the logits of those places"
    return None


def _mixed(same: Sequence[int], model: PreTrainedModel, generator: torch.Generator) -> list[int]:
    """The same tokens, each between two others."""
    others = _some_tokens(model, generator, _TOKENS - len(same))
    return [token for pair in zip(same, others, strict=True) for token in pair]


def _hides_tokens(model: PreTrainedModel, modules: Sequence[nn.Module]) -> bool:
    """No mask is given to it, so one that hides a token is of its own making; this library's attention has none."""
    config = model.config.get_text_config(decoder=True)
    special = (config.pad_token_id, config.eos_token_id, config.bos_token_id)
    flat = [each for given in special for each in (given if isinstance(given, list) else [given])]
    known = [each for each in flat if isinstance(each, int) and 0 <= each < config.vocab_size]
    tokens = [*_some_tokens(model, torch.Generator().manual_seed(2), _TOKENS), *known]
    try:
        with _by_itself(model, modules, MASK_PROBE_NAME), attention_masks_noted() as masks:
            _run(model, tokens, range(len(tokens)), use_cache=True)
    except Exception:  # a call will show the error
        return False
    return any(mask.given is not None and not bool(mask.given.bool().all()) for mask in masks.values())


def _rounding(model: PreTrainedModel) -> float:
    dtype = autocast_dtype(model.device) or model.dtype
    if dtype not in (torch.float32, torch.float64):
        return _ROUNDING_OF_HALF
    return _ROUNDING if multiplies_exactly(model.device) else _ROUNDING_OF_TF32


def _own_code(modules: Sequence[nn.Module], is_theirs: Callable[[Any], bool]) -> _Seen:
    """Each module with code of its owner's, by what would show another one in its place."""
    classes: dict[type, object] = {}  # the `forward` of a class, where it is not theirs; else None
    own: list[tuple[object, ...]] = []
    for module in modules:
        cls = type(module)
        if cls not in classes:
            forward = getattr(cls, "forward", None)
            known = cls.__module__.partition(".")[0] in _THEIRS and is_theirs(forward)
            classes[cls] = None if known else forward or cls
        code = classes[cls]
        if "forward" in module.__dict__ and (set_on_it := own_forward(module)) is not None:
            code = code if is_theirs(set_on_it) else set_on_it
        if code is not None:
            own.append((id(module), cls, id(code), getattr(code, "__code__", None)))
    return tuple(own)


def _place_of(model: nn.Module, own: _Seen) -> str:
    known = {entry[0] for entry in own}
    # The innermost first: what is around it may be a class of the owner's as well.
    for path, module in reversed(list(model.named_modules())):
        if id(module) in known:
            return f"{f'`{path}`, ' if path else ''}{type(module).__module__}.{type(module).__qualname__}"
    return type(model).__qualname__
