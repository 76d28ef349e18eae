"""What ``accelerated(model)`` leaves to the model's own ``generate``: it says why, once, and gives what that gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_accelerated import beyond_eight, fails_alike, falls_back, reasons, same
from support_accelerated import inputs as inputs  # fixtures
from support_accelerated import model as model
from support_accelerated import tokenizer as tokenizer
from support_families import FAMILIES
from support_letter_tokenizers import letter_tokenizer
from torch import nn
from transformers import (
    DynamicCache,
    StoppingCriteriaList,
    set_seed,
)
from transformers.generation import (
    ConfidenceCriteria,
    MinLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    utils,
)

from hf_batchllm import accelerated


def _take_two(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.cat([input_ids, input_ids[:, :2]], dim=1)


FALLBACKS: dict[str, dict[str, Any]] = {
    "`stopping_criteria` has a function, which": {"stopping_criteria": [beyond_eight], "pad_token_id": 0},
    "`stopping_criteria` has a ConfidenceCriteria": {  # it looks at the first row, and ends all
        "stopping_criteria": [ConfidenceCriteria(0.3)],
        "eos_token_id": 99,
        "pad_token_id": 0,
        "output_scores": True,
        "return_dict_in_generate": True,
    },
    "`stopping_criteria` has a StoppingCriteriaList": {
        "stopping_criteria": [StoppingCriteriaList([beyond_eight])],
        "eos_token_id": 99,
        "pad_token_id": 0,
    },
    "`logits_processor` has a PrefixConstrainedLogitsProcessor": {
        "logits_processor": [PrefixConstrainedLogitsProcessor(lambda row, ids: [20 + row, 40 + row], 1)]
    },
    "`prefix_allowed_tokens_fn` is called by `generate` with padded rows": {
        "inputs": torch.tensor([[0, 0, 5, 6], [9, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        "prefix_allowed_tokens_fn": lambda row, ids: [20 + len(ids) + row],
    },
    "`logits_processor` is called by `generate` with padded rows": {
        "inputs": torch.tensor([[0, 0, 5, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1]]),
        "logits_processor": [lambda ids, scores: scores.roll(ids.shape[1], dims=-1)],
    },
    "`logits_processor` is called by `generate` with padded rows: pass rows": {
        "inputs": torch.tensor([[0, 0, 5, 6], [9, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        "logits_processor": [MinLengthLogitsProcessor(6, list(range(90)))],
        "eos_token_id": list(range(90)),
        "pad_token_id": 0,
    },
    "`attention_mask` marks padding on the right": {
        "inputs": torch.tensor([[5, 6, 0, 0], [9, 5, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]),
    },
    "`attention_mask` marks padding on the right, and": {"inputs": torch.tensor([[5, 6, 7, 0]]), "pad_token_id": 0},
    "`stop_strings` ends rows one by one": {
        "stop_strings": ["ab", "c"],
        "tokenizer": letter_tokenizer(),
        "pad_token_id": 0,
    },
    "`logits_processor`": {"logits_processor": [lambda ids, scores: -scores]},
    "`past_key_values`": {"past_key_values": lambda: DynamicCache()},
    "`custom_generate`": {"custom_generate": lambda: _take_two},
    "`trust_remote_code`": {"trust_remote_code": True},
    "`inputs_embeds`": {"inputs_embeds": torch.ones(2, 3, 48) / 9, "inputs": None, "attention_mask": None},
    "`position_ids`": {"position_ids": torch.arange(4)[None]},
    "`logits_to_keep` is an input of Gemma3ForCausalLM": {"logits_to_keep": 1},
    "row 0: is masked in its middle": {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])},
    "there are no `input_ids`": {"inputs": None, "bos_token_id": 3},
    "`max_new_tokens` must be a whole number": {"max_new_tokens": 2.5},
}


MADE_ANEW = ("past_key_values", "custom_generate")  # for each call


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_is_not_supported_goes_to_the_original_and_says_why_once(model: Any, reason: str) -> None:
    def call(model: Any) -> Any:
        given = {"inputs": torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]]), "max_new_tokens": 4, **FALLBACKS[reason]}
        return model.generate(**{name: value() if name in MADE_ANEW else value for name, value in given.items()})

    for _ in range(2):  # once in each block
        falls_back(model, reason, call)


def test_sharded_models_run_in_step_as_transformers_has_them(
    model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda module: True)
    monkeypatch.setattr(utils, "_get_torch_distributed_world_size", lambda: 2)
    monkeypatch.setattr(type(model), "_has_unfinished_sequences", lambda self, finished, *_, **__: not finished)
    falls_back(model, "`synced_gpus`", lambda model: model.generate(**inputs, max_new_tokens=3))


def test_each_reason_is_told_apart(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]])
    hole = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    with reasons() as said, accelerated(model):
        for _ in range(2):
            model.generate(ids, trust_remote_code=True, max_new_tokens=2)
        for mask in (hole, hole.flip(0), hole.roll(1, dims=1)):
            model.generate(ids, attention_mask=mask, max_new_tokens=2)
        model.generate(ids, attention_mask=hole & hole.flip(0), max_new_tokens=2)
    assert len(said) == 3
    assert said[0].startswith("`trust_remote_code`") and said[1].startswith("row 0: is masked")
    assert said[2].endswith("(and so for 1 more)")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 0},
        {"num_return_sequences": 2},
        {"max_length": 4, "max_new_tokens": None},
        {"do_sample": True, "temperature": 0.0},
        {"seed": 3},
        {"prompts": [[5]]},
        {"input_ids": torch.tensor([[5, 6]])},
        {"inputs": torch.tensor([5, 6])},
        {"inputs": [[5, 6]]},
        {"inputs": torch.tensor([[5.0, 6.0]])},
        {"inputs": None},
        {"stopping_criteria": lambda *_: []},
        {"generation_config": {"max_new_tokens": 4}},
    ],
    ids=" ".join,
)
def test_errors_of_generate_are_its_own(model: Any, arguments: dict[str, Any]) -> None:
    arguments = {"inputs": torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]]), "max_new_tokens": 4, **arguments}
    said = fails_alike(model, lambda model: model.generate(**arguments))
    assert bool(said) == ("generation_config" in arguments)  # its error would not tell anybody what is wrong


def test_wrong_calls_and_typos(model: Any) -> None:
    ids = torch.tensor([[5, 6]])
    with accelerated(model):
        with pytest.raises(TypeError, match="positional"):
            model.generate(*[None] * 20)
        with pytest.raises(TypeError, match="multiple values"):
            model.generate(ids, inputs=ids)
        with (
            pytest.warns(UserWarning, match="did you mean `max_new_tokens`"),
            pytest.raises(ValueError, match="not used by the model"),
        ):
            model.generate(ids, max_new_token=3)


def test_what_is_refused_late_has_not_moved_the_random_state(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]])
    set_seed(1)
    expected = model.generate(ids, do_sample=True, max_new_tokens=40)
    set_seed(1)
    # Twenty tokens of memory: found out when the cache is there, after the seed was drawn.
    with accelerated(model, kv_memory=1 << 14, page_size=4), pytest.warns(UserWarning, match="raise `kv_memory`"):
        assert same(model.generate(ids, do_sample=True, max_new_tokens=40), expected)


class Identity(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_replaced_layer_is_noticed_at_once_and_then_remembered() -> None:
    model = FAMILIES["llama"]()
    model.model.layers[1].self_attn = Identity()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = model.generate(ids, max_new_tokens=4, use_cache=False)
    passes: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    with reasons() as said, accelerated(model):
        for _ in range(3):
            assert same(model.generate(ids, max_new_tokens=4, use_cache=False), expected)
    assert len(passes) <= 3 * 4 + 2  # the model itself is looked at, once
    assert len(said) == 1 and "layers with an attention of their own" in said[0]
