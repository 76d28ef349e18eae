"""Code of an owner's inside a model: served where it treats every token by itself, refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_owners import PROMPTS, tokens, tokens_alone
from torch import nn
from transformers import LlamaForCausalLM

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.patches.attention_interface import CACHE_NAME


class Around(nn.Module):
    """A module of an owner's around one of the model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Shifted(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # as in RWKV
        return self.inner(hidden + nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])


class Louder(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 3 * self.inner(hidden)


class CountsFromTheFirst(Around):
    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, position_ids[:, :1] + torch.arange(hidden.shape[1])[None])


class WithoutPositions(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        return super().forward(input_ids=input_ids, **more)


class EveryRow(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        return super().forward(input_ids=input_ids, **more)


class LastRows(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        output: Any = super().forward(input_ids=input_ids, **more)
        output.logits = output.logits[:, -logits_to_keep:]  # a number, in older code that comes with checkpoints
        return output


class HidesPlaces(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        cache = more.get(CACHE_NAME)
        seen = 0 if cache is None else cache.get_seq_length()
        mask = torch.ones(1, seen + input_ids.shape[1], dtype=torch.long)
        mask[:, 2:4] = 0
        return super().forward(input_ids, mask, **more)


class JustAround(LlamaForCausalLM):
    def forward(self, *args: Any, **more: Any) -> Any:
        output: Any = super().forward(*args, **more)
        output.logits = output.logits.double() * 2
        return output


def _mlp(kind: type[Around]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[1].mlp = kind(model.model.layers[1].mlp)

    return change


def _class(kind: type) -> Callable[[Any], None]:
    return lambda model: setattr(model, "__class__", kind)


def _by_the_largest(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden / hidden.abs().max())


def _rotary(model: Any) -> None:
    model.model.rotary_emb = CountsFromTheFirst(model.model.rotary_emb)


REFUSED = {
    "shifted": (_mlp(Shifted), "which other tokens stand beside"),
    "by the largest number of a step": (_by_the_largest, "which other tokens stand beside"),
    "counts positions": (_rotary, "its place in the row"),
    "drops positions": (_class(WithoutPositions), "its place in the row"),
    "hides places": (_class(HidesPlaces), "hides tokens"),
    "gives every row": (_class(EveryRow), "logits_to_keep"),
    "gives the last rows": (_class(LastRows), "logits_to_keep"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_is_refused_before_and_after_the_first_call(name: str) -> None:
    change, why = REFUSED[name]
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    tokens(generator)
    change(model)
    for call in (lambda: BatchGenerator(model), lambda: tokens(generator)):
        with pytest.raises(UnsupportedModelError, match=f"not transformers' own.*{why}"):
            call()


class LittleMixed(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(hidden)
        return hidden + 0.1 * hidden.mean(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_little_mixing_is_seen_in_half_precision_too(dtype: torch.dtype) -> None:
    model = FAMILIES["llama"]().to(dtype)
    _mlp(LittleMixed)(model)
    with pytest.raises(UnsupportedModelError, match="which other tokens stand beside"):
        BatchGenerator(model)


class Normed(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # which torch refuses for a single token
        return self.inner(nn.functional.batch_norm(hidden[0], None, None, training=True)[None])


class NeverAlone(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] == 1:
            raise ValueError("one is not enough")
        return self.inner(hidden)


@pytest.mark.parametrize(("kind", "why"), [(Normed, "stand beside"), (NeverAlone, "a single token .one is not enough")])
def test_an_error_on_a_single_token_hides_nothing(kind: type[Around], why: str) -> None:
    model = FAMILIES["llama"]()
    _mlp(kind)(model)
    with pytest.raises(UnsupportedModelError, match=why):
        BatchGenerator(model)


class CountsPasses(Around):
    passes = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.inner(hidden) * self.passes


class Drops(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.functional.dropout(hidden, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_from_pass_to_pass_is_refused_and_random_numbers_are_not(dtype: torch.dtype) -> None:
    counting, dropping = FAMILIES["llama"]().to(dtype), FAMILIES["llama"]().to(dtype)
    _mlp(CountsPasses)(counting)
    with pytest.raises(UnsupportedModelError, match="other logits for the same tokens from pass to pass"):
        BatchGenerator(counting)
    _mlp(Drops)(dropping)
    assert len(tokens(BatchGenerator(dropping))) == len(PROMPTS)


@pytest.mark.filterwarnings("error")  # nothing that transformers will take away is called, and the trial runs
@pytest.mark.parametrize("change", [_mlp(Louder), _class(JustAround)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_treats_each_token_by_itself_is_served(change: Callable[[Any], None], dtype: torch.dtype) -> None:
    model = FAMILIES["llama"]().to(dtype)
    change(model)
    state = torch.get_rng_state()
    generator = BatchGenerator(model)
    assert torch.equal(state, torch.get_rng_state())
    found = tokens(generator)
    assert dtype == torch.bfloat16 or found == tokens_alone(model)


def test_the_same_code_is_tried_once() -> None:
    passes: list[int] = []
    model: Any = FAMILIES["llama"]()
    _mlp(Louder)(model)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: passes.append(len(output[0])))
    generator = BatchGenerator(model)
    tokens(generator)
    passes.clear()
    tokens(generator)
    first = passes.copy()
    passes.clear()
    tokens(generator)
    assert passes == first
    assert len(passes) == generator.last_report.steps  # type: ignore[union-attr]


def test_dynamic_quantisation_is_warned_of() -> None:
    class Linear(nn.Linear):  # quantised ones do not run on every CPU
        __module__ = "torch.ao.nn.quantized.dynamic.modules.linear"

    model: Any = FAMILIES["llama"]()
    model.model.layers[0].mlp.up_proj.__class__ = Linear
    with pytest.warns(UserWarning, match="dynamic quantisation"):
        tokens(BatchGenerator(model))


def test_a_replaced_attention_of_torchs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    before, attend = tokens(generator), nn.functional.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", lambda *args, **more: attend(*args, **more) / 2)
        for call in (lambda: BatchGenerator(model), lambda: tokens(generator)):
            with pytest.raises(UnsupportedModelError, match="scaled_dot_product_attention` has been replaced"):
                call()
        model.set_attn_implementation("eager")
        assert tokens(generator) == before
    assert tokens(generator) == before


def kept_tokens(generator: BatchGenerator) -> list[list[int]]:
    """A call whose prompts share enough for a prefix to be kept."""
    more = [[*PROMPTS[0][:25], 60 + each] for each in range(3)]
    found = generator.generate([*PROMPTS, *more], max_new_tokens=6, do_sample=False)
    return [each.token_ids for each in found][: len(PROMPTS)]


class Reads(Around):
    """Code whose effect stands outside of what a module shows."""

    factor = 1.0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.held = SimpleNamespace(factor=1.0)
        self.listed = [torch.ones(1)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * self.held.factor * self.listed[0] * self.factor * self.by_method()

    def by_method(self) -> float:
        return 1.0


def _change_held(reads: Reads, patch: pytest.MonkeyPatch) -> None:
    reads.held.factor = 0.2


def _change_listed(reads: Reads, patch: pytest.MonkeyPatch) -> None:
    reads.listed[0].data.mul_(0.2)


def _change_class(reads: Reads, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "factor", 0.2)


def _change_method(reads: Reads, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "by_method", lambda self: 0.2)


@pytest.mark.parametrize("change", [_change_held, _change_listed, _change_class, _change_method])
def test_kept_prefixes_are_dropped_where_an_owners_code_computes_something_else(
    change: Callable[[Reads, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = FAMILIES["llama"]()
    _mlp(Reads)(model)
    generator = BatchGenerator(model, keep_prefixes=64, page_size=4)
    before = kept_tokens(generator)
    assert kept_tokens(generator) == before and generator.last_report.cached_tokens  # type: ignore[union-attr]
    change(model.model.layers[1].mlp, monkeypatch)
    assert before != kept_tokens(generator) == tokens_alone(model)


@pytest.mark.parametrize("where", ["hook", "forward"])
def test_kept_prefixes_know_what_a_closure_reads(where: str) -> None:
    model: Any = FAMILIES["llama"]()
    factor, mlp = [1.0], model.model.layers[0].mlp
    if where == "hook":
        mlp.register_forward_hook(lambda module, args, output: output * factor[0])
    else:
        forward = mlp.forward
        mlp.forward = lambda hidden: forward(hidden) * factor[0]
    generator = BatchGenerator(model, keep_prefixes=64, page_size=4)
    before = kept_tokens(generator)
    assert kept_tokens(generator) == before and generator.last_report.cached_tokens  # type: ignore[union-attr]
    factor[0] = 0.2
    assert before != kept_tokens(generator) == tokens_alone(model)


@pytest.mark.parametrize(("home", "name"), [(nn.functional, "silu"), (nn.functional, "linear"), (torch, "rsqrt")])
def test_kept_prefixes_know_torchs_functions(home: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model, keep_prefixes=64, page_size=4)
    before, function = kept_tokens(generator), getattr(home, name)
    monkeypatch.setattr(home, name, lambda *args, **more: function(*args, **more) * 0.7)
    assert before != kept_tokens(generator) == tokens_alone(model)
