"""The zoo is fit for parity tests, and transformers hands an attention function what the zoo says.

A throw-away function is registered with transformers' ``AttentionInterface``: it writes down what it
gets and computes attention in the plainest way, from its arguments alone. Where the logits under it
equal the model's own, those arguments say all that an attention function has to know. What makes a
model one to refuse shows here too, each reason by something that can be seen from outside.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest
import torch
from support_families import (
    ATTENDING,
    CARRYING,
    FAMILIES,
    PROMPT_KINDS,
    REFUSED,
    WINDOW,
    build,
    family_params,
    gaps,
    random_prompts,
    reference_generate,
    reference_steps,
)
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from hf_batchllm.patches.attention_interface import CACHE_NAME

LENGTH = 45  # tokens of a probe's prompt: several windows
SEES_NO_POSITIONS = {"gpt_bigcode", "persimmon", "ctrl"}  # `position_ids` end before the attention function
UNSTEADY = {"ministral3"}  # they reach it in 5.23, not in 5.17
DROPS_KWARGS = {"stablelm", "nemotron"}  # the decoder layer passes none of the caller's kwargs on
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}


@dataclass(frozen=True)
class Call:
    """What one layer handed to the attention function."""

    module: torch.nn.Module
    heads: int
    kv_heads: int
    dims: tuple[int, int]  # of queries and keys, and of values
    mask: torch.Tensor | None
    kwargs: dict[str, Any]

    @property
    def window(self) -> int | None:
        return self.kwargs.get("sliding_window")


@dataclass
class Probe:
    """Which argument to ignore, how packed tokens fall into sequences; the calls, and the masks that were asked for."""

    ignored: str = ""
    lengths: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)


_probe = Probe()


def _allowed(lengths: list[int], window: int | None) -> torch.Tensor:
    """[tokens, tokens]: causal, each sequence for itself, and no further back than the window."""
    at = torch.arange(sum(lengths))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = at[:, None] - at[None, :]
    return (sequence[:, None] == sequence[None, :]) & (back >= 0) & (back < (window or len(at)))


# The parameters' names matter: AFMoE and Doge pass the mask by name.
def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    dims = (key.shape[-1], value.shape[-1])
    _probe.calls.append(Call(module, query.shape[1], key.shape[1], dims, attention_mask, dict(kwargs)))
    kwargs = {name: given for name, given in kwargs.items() if name != _probe.ignored}
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * kwargs.get("scaling", query.shape[-1] ** -0.5)
    if (cap := kwargs.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    lengths = _probe.lengths or [query.shape[2]]
    scores = scores.masked_fill(~_allowed(lengths, kwargs.get("sliding_window")), -torch.inf)
    if (sinks := kwargs.get("s_aux")) is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def _written_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What the model asks of a mask, token by token: [1, 1, queries, keys], True where one may look."""
    queries, keys = torch.arange(kwargs["q_length"])[:, None], torch.arange(kwargs["kv_length"])[None, :]
    mask = kwargs["mask_function"](0, 0, queries, keys).expand(len(queries), keys.shape[1])[None, None]
    _probe.masks.append(mask)
    return mask


AttentionInterface.register("zoo_probe", _attend)
AttentionInterface.register("zoo_probe_masks", _attend)
AttentionMaskInterface.register("zoo_probe_masks", _written_mask)


@contextmanager
def probing(model: PreTrainedModel, name: str = "zoo_probe", **settings: Any) -> Iterator[Probe]:
    """The model with the probe for its attention; afterwards as it was."""
    global _probe
    before, _probe = model.config._attn_implementation, Probe(**settings)
    model.set_attn_implementation(name)
    try:
        yield _probe
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: list[int], **kwargs: Any) -> torch.Tensor:
    """[tokens, vocabulary], with no cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False, **kwargs).logits[0]


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(101) for _ in range(length)]


def changed(ids: list[int], position: int) -> list[int]:
    return [(token + 7) % 101 if at == position else token for at, token in enumerate(ids)]


# ---------------------------------------------------------------------------------- the zoo is fit for parity tests


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params())
def test_attention_decides(name: str) -> None:
    """What comes early moves the last logits as far as the windows reach, and not at all beyond."""
    model = build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    ids = prompt_of(1)
    with probing(model) as probe:
        logits_of(model, ids)
    windows = [call.window for call in probe.calls]
    reach = LENGTH - 1 if None in windows else sum(window - 1 for window in windows if window is not None)
    base = logits_of(model, ids)[-1]
    far = [] if name in CARRYING else [reach]  # a state may forget
    moved = {back: (logits_of(model, changed(ids, LENGTH - 1 - back))[-1] - base).abs().max() for back in (4, 7, *far)}
    assert min(moved.values()) > (1e-2 if reach > 7 else 0), moved
    if reach < LENGTH - 1 and name not in CARRYING:
        assert torch.equal(logits_of(model, changed(ids, LENGTH - 2 - reach))[-1], base)


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params())
def test_greedy_tokens_are_clear_and_varied(name: str) -> None:
    model = build(name)
    steps = [reference_steps(model, prompt_of(seed, 3 + 9 * seed), max_new_tokens=20) for seed in (1, 3)]
    ahead = torch.cat([gaps(logits) for _, logits in steps])
    assert (ahead < 1e-3).float().mean() < 0.04, ahead.min()
    assert len({tuple(tokens) for tokens, _ in steps}) == len(steps)
    assert sum(len(set(tokens)) for tokens, _ in steps) / len(steps) > 4  # no token for ever


def test_a_family_is_the_same_model_every_time() -> None:
    ids = prompt_of(2)
    assert torch.equal(logits_of(FAMILIES["gpt_oss"](), ids), logits_of(FAMILIES["gpt_oss"](), ids))
    assert build("llama") is build("llama")


def test_building_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    FAMILIES["llama"]()
    assert torch.equal(torch.get_rng_state(), state)


def test_reference_generate_stops_at_an_eos_token() -> None:
    model, ids = build("llama"), prompt_of(3, 9)
    tokens = reference_generate(model, ids, max_new_tokens=6)
    assert len(tokens) == 6
    assert reference_generate(model, ids, max_new_tokens=6, eos_token_id=tokens[0]) == tokens[:1]


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_random_prompts(kind: str) -> None:
    prompts = random_prompts(random.Random(0), 50, kind, count=6)
    assert len(prompts) >= 6
    assert all(1 <= len(prompt) <= 70 and max(prompt) < 50 for prompt in prompts)
    assert prompts == random_prompts(random.Random(0), 50, kind, count=6)
    starts = {tuple(prompt[:WINDOW]) for prompt in prompts}
    assert len(starts) == {"prefix": 1, "nested": 1, "equal": 1, "prefix_of_another": 1}.get(kind, len(starts))


# --------------------------------------------------------------- what transformers hands to an attention function


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params(ATTENDING))
def test_the_arguments_say_it_all(name: str) -> None:
    """The model's own logits come out, though no mask went in; packed sequences do not notice each other."""
    model = build(name)
    prompts = [prompt_of(4), prompt_of(5, 3), prompt_of(6, 2 * WINDOW + 1)]
    own = [logits_of(model, ids) for ids in prompts]
    lengths = [len(ids) for ids in prompts]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with probing(model, lengths=lengths) as probe:
        assert model.config._attn_implementation == "zoo_probe"
        packed = logits_of(model, [*chain(*prompts)], position_ids=positions, zoo_note="here")
    torch.testing.assert_close(packed, torch.cat(own), **CLOSE)
    assert all(call.mask is None for call in probe.calls)
    assert len({id(call.module) for call in probe.calls}) == len(probe.calls) == model.config.num_hidden_layers
    assert [call.module.layer_idx for call in probe.calls] == list(range(len(probe.calls)))
    for call in probe.calls:
        assert ("zoo_note" in call.kwargs) == (name not in DROPS_KWARGS)
        assert ("position_ids" in call.kwargs) == (name not in SEES_NO_POSITIONS) or name in UNSTEADY
        assert getattr(call.module, "is_causal", True)


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params())
def test_each_argument_counts(name: str) -> None:
    """An attention function that ignores a window, a soft-cap, a sink or the scale does not pass by luck."""
    model, ids = build(name), prompt_of(7)
    own = logits_of(model, ids)
    with probing(model) as probe:
        logits_of(model, ids)
    for argument in ("sliding_window", "softcap", "s_aux", "scaling"):
        given = [call for call in probe.calls if call.kwargs.get(argument) is not None]
        if argument == "scaling":
            given = [call for call in given if abs(call.kwargs["scaling"] - call.dims[0] ** -0.5) > 1e-3]
        if given:
            with probing(model, ignored=argument):
                assert (logits_of(model, ids) - own).abs().max() > 1e-2, argument


# ------------------------------------------------------------------------------------------------ what to refuse


def disagreements(model: PreTrainedModel) -> set[str]:
    """What the masks that the model asks for say beyond the arguments of its attention calls."""
    # With a number of tokens to keep, or none, Gemma 4 hands its last layers copies of the masks.
    takes = inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": torch.arange(LENGTH)} if "logits_to_keep" in takes else {}
    with probing(model, "zoo_probe_masks") as probe:
        logits_of(model, prompt_of(8), **keep)
    found = set()
    for call in probe.calls:
        if call.mask is None or not any(call.mask is mask for mask in probe.masks):
            found.add("a mask of its own")
        elif call.mask[0, 0].triu(1).any():
            found.add("looks ahead")
        elif not torch.equal(call.mask[0, 0], _allowed([LENGTH], call.window)):
            found.add("sees less than its arguments say")
    return found


@dataclass(frozen=True)
class Seen:
    """A model from outside: its config, and one short forward under the probe."""

    can_set: bool
    encoder_decoder: bool
    other_layers: set[str]  # kinds that are neither full nor sliding attention
    layers: int
    is_set: bool = False
    calls: list[Call] = field(default_factory=list)
    own_logits: bool = False  # they came out under the probe
    masks: set[str] = field(default_factory=set)
    own_positions: bool = False  # a prompt's logits change if another stands before it in the row
    forgets: bool = False  # logits with generate's cache differ from those without

    def reasons(self) -> set[str]:
        """Why not to run it, all of it general: no architecture is named."""
        modules = {id(call.module) for call in self.calls}
        signs = {
            "encoder": self.encoder_decoder,
            "unrouted": not self.can_set or not self.is_set or not self.calls,
            # The kinds of the layers, or fewer attention modules than layers: RecurrentGemma had no kinds in 5.17.
            "recurrent": bool(self.other_layers - {"chunked_attention"}) or 0 < len(modules) < self.layers,
            "mask": bool(self.masks & {"a mask of its own", "sees less than its arguments say"}),
            "two-way": "looks ahead" in self.masks or any(not getattr(c.module, "is_causal", True) for c in self.calls),
            "repeated": len(modules) < len(self.calls),
            "positions": self.own_positions,
            "forgets": self.forgets,
        }
        return {why for why, shows in signs.items() if shows}


def observe(model: PreTrainedModel) -> Seen:
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    can_set, layers = model._can_set_attn_implementation(), config.num_hidden_layers
    seen = Seen(can_set, bool(config.is_encoder_decoder), kinds, layers)
    if seen.encoder_decoder:
        return seen
    own = logits_of(model, prompt_of(9))
    with probing(model) as probe:
        is_set = config._attn_implementation == "zoo_probe"
        same = torch.allclose(logits_of(model, prompt_of(9)), own, **CLOSE)
    masks = disagreements(model) if is_set else set()
    seen = replace(seen, is_set=is_set, calls=probe.calls, own_logits=same, masks=masks)
    if not same or seen.reasons():
        return seen
    return replace(seen, own_positions=counts_along_the_row(model), forgets=forgets(model))


def counts_along_the_row(model: PreTrainedModel) -> bool:
    ids = prompt_of(9)
    positions = torch.arange(LENGTH).repeat(2)[None]
    try:
        with probing(model, lengths=[LENGTH, LENGTH]):
            packed = logits_of(model, ids + ids, position_ids=positions)
    except TypeError:  # it takes no positions
        return True
    return not torch.allclose(packed[LENGTH:], packed[:LENGTH], **CLOSE)


@torch.no_grad()
def forgets(model: PreTrainedModel) -> bool:
    ids = torch.tensor([prompt_of(9)])
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    steps = ids.split(LENGTH - 2, dim=1)
    try:
        parts = [model(input_ids=step, use_cache=True, **{CACHE_NAME: cache}).logits[0] for step in steps]
    except RuntimeError:  # a mask of one layer's length is used for all
        return True
    return not torch.allclose(torch.cat(parts), logits_of(model, prompt_of(9)), **CLOSE)


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params(ATTENDING))
def test_nothing_speaks_against_a_family(name: str) -> None:
    assert observe(build(name)).reasons() == set()


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params(table=REFUSED))
def test_what_speaks_against_a_refused_model_can_be_seen(name: str) -> None:
    family = REFUSED[name]
    seen = observe(family())
    # In older versions of transformers, Moshi's mask is its own, which is seen before what its cache forgets.
    assert family.why in seen.reasons() or (family.why == "forgets" and "mask" in seen.reasons()), seen
    if family.why in ("mask", "two-way"):
        assert not seen.own_logits  # run all the same, it would be wrong in silence
