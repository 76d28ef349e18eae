"""``invariant=True`` on a GPU, in half precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build, family_params
from support_invariant import a_file_that_was_cut_off_is_the_same, alone, in_a_list, model_of
from support_parity import pages_of_memory
from support_word_tokenizer import word_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from hf_batchllm import BatchGenerator, UnsupportedModelError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", family_params(["llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "qwen3_moe"]))
def test_on_a_gpu(family: str) -> None:
    gives_the_same(copy.deepcopy(build(family)).to("cuda", torch.bfloat16))


def test_products_that_are_convolutions_on_a_gpu() -> None:
    config = GPT2Config(**{**build("gpt2").config.to_dict(), "n_embd": 256, "n_head": 4, "n_inner": None})
    torch.manual_seed(3)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16).eval()
    for name, each in model.named_parameters():
        torch.nn.init.normal_(each, mean=float("ln_" in name and "weight" in name), std=0.1)
    gives_the_same(model)


def gives_the_same(model: Any) -> None:
    expected = alone(model)
    with BatchGenerator(model, invariant=True, max_batch_tokens=200, min_shared_tokens=4) as generator:
        assert in_a_list(generator)[0] == expected
    for settings in ({"share_prefixes": False}, {"cuda_graphs": False}, {"steps_per_sync": 1}, {"kv_memory": 0.01}):
        with BatchGenerator(model, invariant=True, **settings) as generator:
            assert in_a_list(generator)[0] == expected, settings
    with BatchGenerator(model, invariant=True, keep_prefixes=8) as generator:
        for _ in range(2):
            found = in_a_list(generator, prompt_logprobs=None)[0]  # which are not kept
            assert found == alone(model, prompt_logprobs=None)


@pytest.mark.parametrize("family", family_params(["llama", "gemma3", "mixtral"]))
def test_memory_runs_out_on_a_gpu(family: str) -> None:
    model = model_of(family, torch.bfloat16, "cuda")
    options = {"max_new_tokens": 90, "eos_token_id": 1000}  # one that never comes
    expected = alone(model, page_size=16, **options)
    memory = pages_of_memory(model, 12, 16)
    with BatchGenerator(model, invariant=True, page_size=16, min_shared_tokens=4, kv_memory=memory) as generator:
        for more in ({}, {"prompt_lookup_num_tokens": 4}):
            found, result = in_a_list(generator, **options, **more)
            assert found == expected and result.report.preemptions > 0


def test_a_call_that_was_cut_off_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", torch.bfloat16, "cuda")
    with BatchGenerator(model, word_tokenizer(97), invariant=True, min_shared_tokens=4) as generator:
        a_file_that_was_cut_off_is_the_same(generator, tmp_path, monkeypatch)


def test_what_is_refused_on_a_gpu() -> None:
    model = copy.deepcopy(build("llama")).to("cuda")
    with pytest.raises(UnsupportedModelError, match=r"is in float32.*load it with dtype=torch.bfloat16"):
        BatchGenerator(model, invariant=True)
    model.bfloat16()
    with pytest.raises(UnsupportedModelError, match="leave `fuse=False` out"):
        BatchGenerator(model, invariant=True, fuse=False)
    with BatchGenerator(model, invariant=True) as generator:
        with pytest.raises(UnsupportedModelError, match="leave `num_beams` out"):
            generator.generate([[5, 6]], num_beams=2, max_new_tokens=2, progress=False)
        with pytest.raises(UnsupportedModelError, match="ask for 32 at most"):
            generator.generate([[5, 6]], logprobs=33, max_new_tokens=2, progress=False)
        assert generator.generate([[5, 6]], max_new_tokens=2, progress=False)[0].token_ids
