"""Layers that attend to the K and V of an earlier layer: exact whatever a call does, and stored once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from support_adapters import EVERY, MODELS, assert_adapters_matter, assert_each, lora, thrice, wrapped
from support_adapters import generate as generate_adapted
from support_adapters import prompts as adapter_prompts
from support_attention_references import REFERENCES
from support_attention_references import references as references  # a fixture
from support_beam_cases import random_case
from support_beam_cases import run as run_beams
from support_device_loop import assert_best, model_on
from support_device_loop import device as device  # a fixture
from support_families import build, family_params, random_prompts
from support_parity import assert_parity, mixed_prompts, pages_of_memory
from support_parity import watched as watched  # a fixture
from support_score import assert_right, questions
from torch import nn

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.engine.kv_memory import KVMemory
from hf_batchllm.model.attention import torch_attention
from hf_batchllm.model.attention.kv_storage import AttentionShape, KVStorage
from hf_batchllm.model.attention.triton_attention import AttentionKernels
from hf_batchllm.patches.attention_interface import attention_context, attention_forward
from hf_batchllm.patches.shared_kv import GivenKV

SHARING = ["gemma4_shared", "gemma3n"]  # of five layers, the fourth reads the second's and the fifth the third's
# Numbers of a token in K and V of two sliding layers and a full one, 2 heads each.
OWN_VALUES = {"gemma4_shared": 2 * (2 * 32 + 48), "gemma3n": 2 * 3 * 32}
sharing = pytest.mark.parametrize("family", family_params(SHARING))


# -- exact -----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@sharing
@pytest.mark.parametrize("over", ["torch", "kernels"])
def test_preemption_small_steps_and_kept_prefixes(
    family: str, over: str, watched: list[Any], request: pytest.FixtureRequest
) -> None:
    if over == "kernels":
        request.getfixturevalue("references")
    prompts = random_prompts(random.Random(2), 97, "nested", 5)
    memory = pages_of_memory(build(family), 12, 8)
    small: dict[str, Any] = {"kv_memory": memory, "page_size": 8, "min_shared_tokens": 1, "max_batch_tokens": 19}
    result = BatchGenerator(build(family), **small).generate(
        prompts, max_new_tokens=14, eos_token_id=1000, progress=False
    )
    assert result.report.preemptions > 0
    assert_parity(family, prompts, result, 14)
    with BatchGenerator(build(family), keep_prefixes=4, page_size=16, min_shared_tokens=1) as generator:
        for _ in range(2):  # the second call moves the kept pages, and reads them
            result = generator.generate(prompts, max_new_tokens=6, progress=False)
            assert_parity(family, prompts, result, 6)
        assert result.report.computed_tokens < generator.plan(prompts).computed_tokens


@pytest.mark.some_cases
@sharing
def test_steps_launched_ahead_and_replayed(family: str, device: str) -> None:
    prompts = mixed_prompts(2)
    generator = BatchGenerator(model_on(device, family), page_size=16, steps_per_sync=4)
    result = generator.generate(prompts, max_new_tokens=24, progress=False)
    assert_best(device, family, prompts, result, 24)


@pytest.mark.some_cases
@sharing
def test_beams_and_scores(family: str) -> None:
    run_beams(random_case(random.Random(family), [family]))
    contexts, several = questions(count=4)
    with BatchGenerator(build(family), page_size=3, max_batch_tokens=11) as generator:
        assert_right(family, contexts, several, generator.score(contexts, several, progress=False))


def test_adapters_of_the_layers_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "shared", lambda: wrapped(lora(), lora(EVERY), family="gemma4_shared"))
    given, names = thrice(adapter_prompts(3))
    assert_adapters_matter("shared", adapter_prompts(3))
    assert_each("shared", given, names, generate_adapted("shared", given, names))


# -- stored once -----------------------------------------------------------------------------------------------


@sharing
@pytest.mark.parametrize("over", ["torch", "kernels"])
def test_what_is_shared_is_stored_and_written_once(
    family: str, over: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    writes: Counter[int] = Counter()  # by the address of the cache's K
    held: list[tuple[int, int]] = []  # bytes and tokens of each cache
    if over == "kernels":

        def counted(*args: Any, **options: Any) -> None:
            writes[args[5].data_ptr()] += 1
            REFERENCES.write(*args, **options)

        request.getfixturevalue("references")["kernels"] = AttentionKernels(**(vars(REFERENCES) | {"write": counted}))
    else:
        write_kv = torch_attention.write_kv

        def counted_kv(*args: Any) -> None:
            writes[args[2].data_ptr()] += 1
            write_kv(*args)

        monkeypatch.setattr(torch_attention, "write_kv", counted_kv)
    settle = KVMemory.settle

    def measured(self: KVMemory) -> None:
        assert self.storage is not None
        held.append((self.storage.bytes, self.storage.slots))
        settle(self)

    monkeypatch.setattr(KVMemory, "settle", measured)
    generator = BatchGenerator(build(family), page_size=16)
    result = generator.generate(mixed_prompts(1), max_new_tokens=4, progress=False)
    assert [shape.source for shape in generator.architecture.attention] == [None, None, None, 1, 2]
    assert generator.architecture.kv_values_per_token == OWN_VALUES[family]
    assert held == [(4 * OWN_VALUES[family] * slots, slots) for _, slots in held] and len(held) == 1
    assert set(writes.values()) == {result.report.steps} and len(writes) == 3


def test_nothing_is_reserved_for_a_layer_that_reads_anothers() -> None:
    storage = KVStorage(2, 3)
    own = AttentionShape(4, 2, 5, 7)
    storage.reserve([own, own._replace(source=0), own._replace(heads=8, source=0)], torch.float32, torch.device("cpu"))
    assert storage.bytes == 4 * 6 * own.kv_values


# -- who reads whose -------------------------------------------------------------------------------------------


def states(fill: float = 0.0) -> torch.Tensor:  # [1, kv_heads, tokens, dim]
    return torch.full((1, 2, 3, 4), fill)


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        (lambda k, v: (k, v, torch.float32), True),
        (lambda k, v: (k.clone(), v, torch.float32), False),  # equal numbers in other memory
        (lambda k, v: (k, v.clone(), torch.float32), False),  # the same K with a V of its own
        (lambda k, v: (k.add_(1), v, torch.float32), False),  # written to
        (lambda k, v: (k, v.add_(1), torch.float32), False),
        (lambda k, v: (k, v, torch.bfloat16), False),  # it would read what was kept in another type
    ],
)
def test_the_same_tensors_are_another_layers_and_no_others(change: Any, shared: bool) -> None:
    given, first, k, v = GivenKV(), nn.Identity(), states(), states()
    assert given.source(first, k, v, torch.float32) is None
    assert given.source(nn.Identity(), *change(k, v)) is (first if shared else None)


def test_a_place_in_memory_that_is_used_again_is_not_mistaken() -> None:
    given, layers = GivenKV(), [nn.Identity() for _ in range(50)]
    assert [given.source(layer, states(), states(), torch.float32) for layer in layers] == [None] * 50


def test_layers_that_stop_sharing_are_refused() -> None:
    """Its own pages would lack the tokens of earlier steps."""
    seen: list[Any] = []

    class Context:
        takes_masks, calls = False, 0
        storage = KVStorage(2, 3)

        def attend(self, call: Any) -> torch.Tensor:
            seen.append(self.storage.read_by(call)[0])
            return call.v

    first, later = nn.Identity(), nn.Identity()
    k, v = states(), states()
    with attention_context(Context()):
        for layer in (first, later):
            attention_forward(layer, k, k, v, None)
    assert seen[0] is seen[1]
    with attention_context(Context()):  # another step
        attention_forward(first, k, k, v, None)
        with pytest.raises(UnsupportedModelError, match="shared the K and V of an earlier layer in one step"):
            attention_forward(later, k, states(), states(), None)


def test_under_autocast_too(watched: list[Any]) -> None:
    """Layers are then handed the model's own type, and what they attend with is cast anew for each."""
    prompts, model = mixed_prompts(1), build("gemma4_shared")
    generator = BatchGenerator(model)
    with torch.autocast("cpu", torch.bfloat16):
        result = generator.generate(prompts, max_new_tokens=3, progress=False)
        whole = BatchGenerator(model, share_prefixes=False).generate(prompts, max_new_tokens=3, progress=False)
    same = sum(one.token_ids[0] == other.token_ids[0] for one, other in zip(result, whole, strict=True))
    assert same >= 0.8 * len(prompts)
