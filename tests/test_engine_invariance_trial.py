"""Before the same bits are promised it is tried whether steps give them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_families import build
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.engine import invariance_trial
from hf_batchllm.model.fixed_attention import FixedAttention
from hf_batchllm.model.fixed_passes import ROWS, WIDE_ROWS
from hf_batchllm.model.runner import ModelRunner


def steps_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step from now on."""
    rows, own = [], ModelRunner.step

    def step(self: ModelRunner, batch: Any) -> Any:
        rows.append(len(batch.attention.positions))
        return own(self, batch)

    monkeypatch.setattr(ModelRunner, "step", step)
    return rows


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_a_model_is_tried_once(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = copy.deepcopy(build("mixtral")), steps_of(monkeypatch)
    counts = []
    for _ in range(2):  # generators
        with BatchGenerator(model, invariant=True, page_size=page_size) as gen:
            for _ in range(2):
                gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
                counts.append(len(rows))
    assert counts == [14, 16, 18, 20]  # the steps of the trial, then two of each call
    assert rows[:12] == [9, 43, 1, *[32] * 9]
    with BatchGenerator(model, page_size=page_size) as gen:
        gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
    assert len(rows) == 22


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_what_is_tried_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the passes of a CPU: the sequence has keys for several parts, and its last tokens come in pieces."""
    model, rows = copy.deepcopy(build(family)), steps_of(monkeypatch)
    monkeypatch.setattr(invariance_trial, "_ON_CPU", replace(invariance_trial._ON_GPU, beside=(3, 9)))
    with BatchGenerator(model, invariant=True) as gen:
        gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
    assert rows[:6] == [300, 2 * 300 + 8, 3 * 300 + 6 * 8, 2, 7, 70]
    assert rows[6:21] == list(invariance_trial._ON_GPU.single)


def off_in_one_row(
    monkeypatch: pytest.MonkeyPatch, size: int, place: int, is_asked: Callable[[torch.Tensor], bool] = lambda row: True
) -> None:
    """Attention gives the numbers of a row other last bits, in passes of this size: at one place, for some rows."""
    own = FixedAttention.attend

    def attend(self: FixedAttention, call: Any) -> torch.Tensor:
        made = own(self, call)
        if len(made) == size and is_asked(call.q[place]):
            made[place] = made[place].nextafter(torch.tensor(torch.inf))
        return made

    monkeypatch.setattr(FixedAttention, "attend", attend)


@pytest.mark.parametrize("place", range(ROWS))
def test_each_place_of_a_pass_is_tried(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer()
    off_in_one_row(monkeypatch, ROWS, place)
    with BatchGenerator(model, invariant=True) as gen:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM gave other bits .* than alone"):
                gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
        monkeypatch.undo()
        assert len(gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)[0].token_ids) == 2


def test_each_place_is_tried_with_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place may matter for few numbers: here for one of the tokens alone, and not for the last one."""
    model, queries = one_layer(), dict[bytes, torch.Tensor]()
    own = FixedAttention.attend

    def attend(self: FixedAttention, call: Any) -> torch.Tensor:
        queries.update({row.numpy().tobytes(): row for row in call.q[: self.end - self.begin]})
        return own(self, call)

    with monkeypatch.context() as patch, BatchGenerator(model, invariant=True) as gen:
        patch.setattr(FixedAttention, "attend", attend)
        gen.generate([[1, 2, 3]], max_new_tokens=1, progress=False)
    assert len(queries) > 9
    first = next(iter(queries.values()))
    off_in_one_row(monkeypatch, ROWS, 29, lambda row: torch.equal(row, first))
    with (
        BatchGenerator(copy.deepcopy(model), invariant=True) as gen,
        pytest.raises(UnsupportedModelError, match="gave other bits at another place of a step than alone"),
    ):
        gen.generate([[1, 2, 3]], max_new_tokens=1, progress=False)


@pytest.mark.some_cases
@pytest.mark.parametrize("place", range(WIDE_ROWS))
def test_each_place_of_a_wide_pass_is_tried(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer()
    monkeypatch.setattr(invariance_trial, "_WIDE_FROM", 0)
    off_in_one_row(monkeypatch, WIDE_ROWS, place)
    with (
        BatchGenerator(model, invariant=True) as gen,
        pytest.warns(UserWarning, match=f"passes of {ROWS} rows here.* LlamaForCausalLM gave other bits"),
    ):
        gen.generate([[1, 2, 3]], max_new_tokens=1, progress=False)


def one_layer() -> Any:
    """What attention gives reaches the logits alone: there are no later keys."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).eval()


@pytest.mark.parametrize("seed", [3, 6, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_heads_of_ten_channels(dtype: torch.dtype, seed: int) -> None:
    """How their products add up may depend on where rows begin in memory: 40 bytes lie between them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        sizes = {"n_embd": 40, "n_head": 4, "n_layer": 2, "vocab_size": 103, "n_positions": 256}
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, initializer_range=0.3)).to(dtype).eval()
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(103, (count,), generator=dice).tolist() for count in (103, 57, 103, 12, 33, 103)]
    asked: dict[str, Any] = {"max_new_tokens": 1, "prompt_logprobs": 0, "progress": False}
    with BatchGenerator(model, invariant=True) as gen:
        try:
            together = gen.generate(prompts, **asked)
        except UnsupportedModelError:
            return  # as well: the trial has seen it
        for place, prompt in enumerate(prompts):
            assert gen.generate([prompt], **asked)[0].prompt_logprobs == together[place].prompt_logprobs
