"""How large steps are: the smaller the model, the more the device is given at a time.

And a part of a call's largest step is run to see its memory, once for a model as it is.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_attention_references import REFERENCES
from support_calls import answers, noted
from support_families import build
from support_kernels import plain
from support_memory_device import FAMILY, PAGE, Device, generate, tight
from support_memory_device import device as device  # a fixture
from support_memory_device import rehearsed as rehearsed  # a fixture
from support_parity import mixed_prompts
from torch import nn

from hf_batchllm import BatchGenerator
from hf_batchllm.engine import memory_rehearsal
from hf_batchllm.engine.call import Call
from hf_batchllm.engine.memory_rehearsal import LargestStep, Rehearsals
from hf_batchllm.engine.step_size import times_in_a_row, tokens_in_a_step
from hf_batchllm.kernels.cards import CARDS, Card
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.attention.triton_attention import TritonBackend
from hf_batchllm.model.runner import ModelRunner

pytestmark = plain


def ran(
    monkeypatch: pytest.MonkeyPatch, device: Device, model: Any, made: LargestStep
) -> tuple[list[LargestStep], int]:
    """The steps that are run for this one, whose hidden states would show it with 4,096 tokens; and what is found."""
    generator = BatchGenerator(model)
    backend = TritonBackend(REFERENCES, KVStorage(1, PAGE), torch.device("cpu"), generator._notices)
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
    """Not all configs of a user's call it `hidden_size`."""
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


def all_rows(model: Any) -> None:
    """Logits of all tokens then take the place of those that are asked for."""

    class Whole(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, position_ids: Any = None, use_cache: Any = None, **rest: Any) -> Any:
            rest.pop("logits_to_keep", None)
            return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **rest)

    Whole.__module__ = type(model).__module__
    model.__class__ = Whole


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(build(FAMILY)), config).eval()
    model.merge_adapter()
    return model


def first_mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


CHANGES: dict[str, Any] = {
    "another class": lambda model: setattr(first_mlp(model).down_proj, "__class__", Wide),
    "another module": lambda model: setattr(
        first_mlp(model), "down_proj", nn.Sequential(first_mlp(model).down_proj).eval()
    ),
    "all rows": all_rows,
    "wider head": lambda model: setattr(
        model, "lm_head", nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=True).eval()
    ),
    "adapter": lambda model: model.unmerge_adapter(),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("same", [False, True], ids=["new generator", "same generator"])
def test_a_model_that_has_changed_is_looked_at_again(
    change: str, same: bool, device: Device, rehearsed: list[int]
) -> None:
    prompts, model = (
        tight(device, mixed_prompts(6), 1.5),
        adapted() if change == "adapter" else copy.deepcopy(build(FAMILY)),
    )
    generator = BatchGenerator(model, page_size=PAGE)
    generate(generator, prompts)
    assert rehearsed
    rehearsed.clear()
    CHANGES[change](model)
    generate(generator if same else BatchGenerator(model, page_size=PAGE), prompts)
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
    assert rehearsed and generator._resources.kv._beside is not None


# -- how much at a time ----------------------------------------------------------------------------------------

GIB = 1 << 30
CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.engine.step_size.card_on", lambda device: CARDS[9, 0])


class Heavy:
    """A model of so many weights."""

    def __init__(self, weights: float, size: int = 2) -> None:
        self.weights = int(weights)
        self.nbytes = self.weights * size

    def numel(self) -> int:
        return self.weights

    def parameters(self) -> list[Any]:
        return [self]


def test_small_models_run_oftener(hopper: None) -> None:
    times = [times_in_a_row(Heavy(count), CUDA) for count in (0, 5e7, 6e8, 8e9, 7e10)]  # type: ignore[arg-type]
    assert times == sorted(times, reverse=True)
    assert times[0] == times[2] == 16 and times[3] in (3, 4) and times[4] == 2


def test_small_models_take_larger_steps(hopper: None) -> None:
    def tokens(weights: float, device: str = "cuda", free: int = 100 * GIB) -> int:
        return tokens_in_a_step(Heavy(weights), torch.device(device), free)  # type: ignore[arg-type]

    assert [tokens(count) for count in (0, 1e8, 6e8, 1e9, 1.7e9, 3e9, 8e9)] == [32768] * 3 + [16384] * 2 + [8192] * 2
    assert tokens(6e8, free=4 * GIB) == 8192, "memory for activations is not there in plenty"
    assert tokens(6e8, device="mps") == 8192 and tokens(6e8, device="cpu") == 512


@pytest.mark.parametrize("capability", [each for each in CARDS if each != (9, 0)])
def test_slower_cards_are_given_less(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def given(card: Card) -> tuple[int, int]:
        monkeypatch.setattr("hf_batchllm.engine.step_size.card_on", lambda device: card)
        model: Any = Heavy(1e9)
        return times_in_a_row(model, CUDA), tokens_in_a_step(model, CUDA, 100 * GIB)

    card, hopper = CARDS[capability], CARDS[9, 0]
    assert all(
        (this >= that) if card.bytes > hopper.bytes else (this <= that)
        for this, that in zip(given(card), given(hopper), strict=True)
    )


@pytest.mark.parametrize(("asked", "used"), [(None, 512), (48, 48)])
def test_what_is_asked_for_counts(asked: int | None, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = noted(monkeypatch, Call, "run", lambda self, *watch: self.memory.step_tokens)
    answers("llama", [[5, 6]], {"max_batch_tokens": asked}, max_new_tokens=2)
    assert budgets == [used]
