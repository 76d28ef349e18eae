"""A part of a call's largest step is run to see its memory, once for a model as it is."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_attention_twins import TWINS
from support_families import build
from support_kernels import plain
from support_memory_device import FAMILY, PAGE, Device, generate, tight
from support_memory_device import device as device  # a fixture
from support_memory_device import rehearsed as rehearsed  # a fixture
from support_parity import mixed_prompts
from torch import nn

from hf_batchllm import BatchGenerator
from hf_batchllm.engine import memory_rehearsal
from hf_batchllm.engine.memory_rehearsal import LargestStep, Rehearsals
from hf_batchllm.model.kv_storage import KVStorage
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.model.triton_attention import TritonBackend

pytestmark = plain


def ran(
    monkeypatch: pytest.MonkeyPatch, device: Device, model: Any, made: LargestStep
) -> tuple[list[LargestStep], int]:
    """The steps that are run for this one, whose hidden states would show it with 4,096 tokens; and what is found."""
    generator = BatchGenerator(model)
    backend = TritonBackend(TWINS, KVStorage(1, PAGE), torch.device("cpu"), generator._notices)
    runner = ModelRunner(model, generator.architecture, backend)
    steps: list[LargestStep] = []

    def noted(runner: Any, storage: Any, step: LargestStep, memory: Any) -> int:
        steps.append(step)
        return memory_of(step.tokens, step.samples)

    monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._rehearsed", noted)
    monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._PART_BYTES", 4096 * 24 * 4)
    found = Rehearsals(model, generator.config)._step(runner, backend, made, device)  # type: ignore[arg-type]
    assert found is not None
    return steps, found


def memory_of(tokens: int, samples: int) -> int:
    return 70_000 * tokens + 900_000 * samples


@pytest.mark.parametrize("step", [(32768, 20480, 512), (20480, 20480, 1), (32768, 9, 512), (9000, 20, 1024)])
def test_a_part_of_a_large_step_shows_its_memory(
    step: tuple[int, int, int], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = build(FAMILY), LargestStep(*step)
    monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._width", lambda _: 24 * 4)
    steps, found = ran(monkeypatch, device, model, made)
    assert steps == [LargestStep(4096, -(-made.samples * 4096 // made.tokens), made.longest)]
    whole = memory_of(made.tokens, made.samples)
    assert whole <= found <= 1.01 * whole + 900_000 * made.tokens // 4096


@pytest.mark.parametrize("kind", ["quantised", "packed", "autocast", "no width"])
def test_where_memory_does_not_grow_with_tokens_the_whole_step_is_run(
    kind: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are unpacked or cast for a product take as much in a small step."""
    model, made = copy.deepcopy(build(FAMILY)), LargestStep(32768, 512, 512)
    if kind == "quantised":
        model.config.quantization_config = SimpleNamespace(quant_method="awq")
    elif kind == "packed":
        model.lm_head.extra = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    elif kind == "no width":
        monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._width", lambda _: None)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        steps, found = ran(monkeypatch, device, model, made)
    assert steps == [made] and found == memory_of(made.tokens, made.samples)


def test_a_config_without_the_usual_name_of_its_width() -> None:
    """Not all configs of an owner's call it `hidden_size`."""
    text = SimpleNamespace(width=24)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: text),
        get_input_embeddings=lambda: nn.Embedding(9, 24),
        dtype=torch.bfloat16,
    )
    assert memory_rehearsal._width(model) == 48
    model.get_input_embeddings = lambda: None
    assert memory_rehearsal._width(model) is None
    text.hidden_size = 32
    assert memory_rehearsal._width(model) == 64


class Wide(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([x] * 8, -1)[..., : x.shape[-1]])


def other_class(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.__class__ = Wide


def all_rows(model: Any) -> None:
    """Logits of all tokens then take the place of those that are asked for."""

    class Whole(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, position_ids: Any = None, use_cache: Any = None, **rest: Any) -> Any:
            rest.pop("logits_to_keep", None)
            return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **rest)

    Whole.__module__ = type(model).__module__
    model.__class__ = Whole


def wider_head(model: Any) -> None:
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=True).eval()


@pytest.mark.some_cases
@pytest.mark.parametrize("change", [other_class, all_rows, wider_head])
@pytest.mark.parametrize("same", [False, True], ids=["new generator", "same generator"])
def test_a_model_that_has_changed_is_looked_at_again(
    change: Any, same: bool, device: Device, rehearsed: list[int]
) -> None:
    prompts, model = mixed_prompts(6), copy.deepcopy(build(FAMILY))
    tight(device, prompts, 1.5)
    generator = BatchGenerator(model, page_size=PAGE)
    generate(generator, prompts)
    assert rehearsed
    rehearsed.clear()
    change(model)
    generate(generator if same else BatchGenerator(model, page_size=PAGE), prompts)
    assert rehearsed


def test_a_merged_adapter_is_another_model(device: Device, rehearsed: list[int]) -> None:
    peft = pytest.importorskip("peft")
    prompts = mixed_prompts(6)
    tight(device, prompts, 1.5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(build(FAMILY)), config).eval()
    model.merge_adapter()
    generate(BatchGenerator(model, page_size=PAGE), prompts)
    assert rehearsed
    rehearsed.clear()
    model.unmerge_adapter()
    generate(BatchGenerator(model, page_size=PAGE), prompts)
    assert rehearsed


def test_a_passing_failure_is_not_kept(device: Device, rehearsed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, model, forward = mixed_prompts(6), copy.deepcopy(build(FAMILY)), nn.Embedding.forward
    tight(device, prompts, 1.5)

    def particular(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if not ids.any():
            raise ValueError("no zeros, please")
        return forward(self, ids)

    with monkeypatch.context() as for_now:
        for_now.setattr(nn.Embedding, "forward", particular)
        generate(BatchGenerator(model, page_size=PAGE), prompts)
    rehearsed.clear()
    generator = BatchGenerator(model, page_size=PAGE)
    generate(generator, prompts)
    assert rehearsed and generator._kv._beside is not None
