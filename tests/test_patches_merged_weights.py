"""Merged weights: for their user nothing has happened to them.

``test_patches_fused_restore.py`` saves them, loads them, trains them and casts them, in every family.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support_families import family_params
from support_fused import FORWARDS, Fusing, assert_same_logits, logits_of_steps, new_model, some_prompts
from support_fused import fusing as fusing  # a fixture
from support_kernels import INTERPRETED
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_batchllm import BatchGenerator, accelerated
from hf_batchllm.patches import fusion, merged_weights
from hf_batchllm.patches.merged_weights import merge, merged, unmerge, why_not_merge

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
IDS = torch.tensor([[1, 2, 3, 4, 5]])


def qkv(model: Any, layer: int = 1) -> list[nn.Parameter]:
    attention = model.model.layers[layer].self_attn
    return [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]


def groups(model: Any) -> Iterator[list[nn.Parameter]]:
    for index, layer in enumerate(model.model.layers):
        yield qkv(model, index)
        yield [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]


def memory(model: Any) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in model.named_parameters()}


def looks(model: Any) -> dict[str, Any]:
    """All that is to be seen of parameters but their addresses."""
    return {
        name: (id(each), type(each), each.shape, each.stride(), each.dtype, each.requires_grad, each._version,
               each.is_leaf, each.storage_offset(), each.untyped_storage().nbytes(), each.detach().clone().tolist())
        for name, each in model.named_parameters()
    }  # fmt: skip


@pytest.fixture
def generating(fusing: Fusing) -> Iterator[Any]:
    """A generator, the model of which has been merged by a first call."""
    with BatchGenerator(new_model(), page_size=16, min_shared_tokens=1) as generator:
        generate(generator)
        assert all(merged(group) is not None for group in groups(generator.model))
        yield generator


def generate(generator: BatchGenerator) -> list[list[int]]:
    return generator.generate(some_prompts(), max_new_tokens=4, progress=False).token_ids


def assert_as_a_new_one(generator: BatchGenerator) -> None:
    """It gives what a model gives that has the same weights and has never been merged."""
    fresh = copy.deepcopy(generator.model)
    assert all(merged(group) is None for group in groups(fresh))
    assert generate(generator) == generate(BatchGenerator(fresh, page_size=16, min_shared_tokens=1, fuse=False))
    assert all(merged(group) is not None for group in groups(generator.model))


# -- merging and unmerging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", family_params(["llama", "qwen2", "gemma3"]))
def test_nothing_is_to_be_seen_of_it(family: str, fusing: Fusing) -> None:
    model = new_model(family)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before, places = looks(model), memory(model)
    generator = BatchGenerator(model)
    generate(generator)
    assert looks(model) == before
    assert memory(model) != places
    merged_places = memory(model)
    generate(generator)
    assert memory(model) == merged_places, "merged once"
    generator.close()
    assert looks(model) == before
    assert all(merged(group) is None for group in groups(model))
    generator.close()
    assert looks(model) == before


def test_the_product_is_of_the_parameters_themselves() -> None:
    weights = qkv(new_model())
    values = torch.cat([each.detach() for each in weights])
    whole = merge(weights)
    assert torch.equal(whole, values) and torch.equal(merged(weights), values)
    with torch.no_grad():
        weights[1].fill_(7.0)
    assert whole[96:128].eq(7.0).all() and not whole[:96].eq(7.0).any()
    assert merged(weights[:2]) is None and merged([weights[1], weights[0], weights[2]]) is None


def test_the_memory_lives_as_long_as_a_part_of_it() -> None:
    weights = qkv(new_model())
    whole = merge(weights)
    memory = StorageWeakRef(whole.untyped_storage())
    del whole
    assert unmerge(weights[0]) and unmerge(weights[1]) and not unmerge(weights[0])
    assert not memory.expired() and merged(weights) is None
    assert unmerge(weights[2])
    assert memory.expired()


def test_the_library_keeps_no_weights_alive(generating: BatchGenerator) -> None:
    memory = StorageWeakRef(merged(qkv(generating.model)).untyped_storage())
    generating.model.to(torch.bfloat16)  # or to a CPU, to make room on the GPU
    gc.collect()
    assert memory.expired()


def test_other_views_are_not_torn_away(fusing: Fusing) -> None:
    model = new_model()
    kept = model.state_dict()
    generator = BatchGenerator(model)
    generate(generator)
    assert "share their memory with something else" in generator.last_report.fused
    assert all(kept[name].data_ptr() == each.data_ptr() for name, each in model.named_parameters())
    del kept
    generate(generator)
    assert generator.last_report.fused == "3 of 3 layers"
    kept = model.state_dict()
    generator.close()
    assert all(kept[name].data_ptr() == each.data_ptr() for name, each in model.named_parameters())


@pytest.mark.parametrize("fails", [1, 2, 5])
def test_an_error_in_the_midst_of_it(fails: int, fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    before, calls, from_dlpack = looks(model), [], torch.from_dlpack

    def failing(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == fails:
            raise KeyError("broken")
        return from_dlpack(*args)

    generator = BatchGenerator(model, page_size=16, min_shared_tokens=1)
    with monkeypatch.context() as patched:
        patched.setattr(merged_weights, "from_dlpack", failing)
        with pytest.raises(KeyError):
            generate(generator)
    calls.clear()
    assert looks(model) == before
    assert_as_a_new_one(generator)
    generator.close()
    assert looks(model) == before


def test_without_memory_for_it_the_rest_is_fused(fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = new_model(), []
    own = logits_of_steps(monkeypatch, model, fuse=False)

    def merge_two(parameters: Any) -> torch.Tensor:
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(parameters))
        return merge(parameters)

    monkeypatch.setattr(fusion, "merge", merge_two)
    assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32)
    assert set(fusing) == {FORWARDS - 4} and sizes == [3, 2]


def test_two_generators_of_one_model_share_it(fusing: Fusing) -> None:
    model = new_model()
    first, second = BatchGenerator(model), BatchGenerator(model)
    generate(first)
    places = memory(model)
    expected = generate(second)
    assert memory(model) == places
    first.close()
    assert generate(second) == expected and all(merged(group) is not None for group in groups(model))
    second.close()
    assert all(merged(group) is None for group in groups(model))


def test_accelerated_gives_them_back(fusing: Fusing) -> None:
    model, prompt = new_model(), torch.tensor([[1, 2, 3, 4]])
    expected = model.generate(prompt, max_new_tokens=4)
    with accelerated(model):
        assert torch.equal(model.generate(prompt, max_new_tokens=4), expected)
        assert merged(qkv(model)) is not None
    assert fusing and merged(qkv(model)) is None


def test_kept_prefixes_stay(fusing: Fusing) -> None:
    with BatchGenerator(new_model(), keep_prefixes=4, page_size=16, min_shared_tokens=1) as generator:
        first = generate(generator)
        assert generate(generator) == first
        assert generator.last_report.cached_tokens > 0


def test_no_trace_of_old_parts_is_kept() -> None:
    old = qkv(new_model())
    merge(old)
    assert any(whole == merged_weights._parts[old[0].data_ptr()] for whole in merged_weights._parts.values())
    del old
    gc.collect()
    assert any(whole.expired() for whole in merged_weights._parts.values())
    merge(qkv(new_model())[:2])
    assert sum(whole.expired() for whole in merged_weights._parts.values()) <= 2, "those of the last line itself"


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "do not take the same input"),
        ([torch.zeros(2, 3), torch.zeros(2, 3).bfloat16()], "are of different types or on different devices"),
        ([torch.zeros(2, 3).double()] * 2, "are float64"),
        ([torch.zeros(2, 3)] * 2, "share their memory with something else"),
    ],
)
def test_what_cannot_be_merged(parameters: list[torch.Tensor], why: str) -> None:
    assert (why_not_merge([nn.Parameter(each) for each in parameters]) or "").startswith(why)


# -- what users do with their models --------------------------------------------------------------------------


def test_saved_while_merged(generating: BatchGenerator, tmp_path: Path) -> None:
    save_file(generating.model.state_dict(), tmp_path / "model.safetensors")  # refuses tensors that share memory
    assert_as_a_new_one(generating)


def test_pickled_while_merged(generating: BatchGenerator) -> None:
    weight = qkv(generating.model)[1]
    file = io.BytesIO()
    torch.save(weight, file)
    assert len(file.getvalue()) < weight.nbytes + 3000, "not the others' values with it"
    whole = pickle.loads(pickle.dumps(generating.model))
    states = zip(generating.model.state_dict().values(), whole.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in states)


def test_weights_loaded_into_it(generating: BatchGenerator) -> None:
    model = generating.model
    places, other = memory(model), {name: each * 1.1 for name, each in model.state_dict().items()}
    model.load_state_dict(other)
    assert memory(model) == places
    assert all(torch.equal(each, other[name]) for name, each in model.named_parameters())
    assert_as_a_new_one(generating)


def test_other_parameters_in_place_of_some(generating: BatchGenerator) -> None:
    attention = generating.model.model.layers[1].self_attn
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight.detach() * 1.3)
    generating.model.model.layers[0].mlp.up_proj.weight.data *= 1.2
    generating.model.model.layers[2].mlp.up_proj.weight.data = generating.model.model.layers[2].mlp.up_proj.weight * 2
    assert_as_a_new_one(generating)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cast_between_two_calls(dtype: torch.dtype, generating: BatchGenerator, fusing: Fusing) -> None:
    model = generating.model
    model.to(dtype)
    fusing.clear()
    plain = new_model().to(dtype)
    assert generate(generating) == generate(BatchGenerator(plain, page_size=16, min_shared_tokens=1, fuse=False))
    if dtype == torch.float64:
        assert "is float64" in generating.last_report.fused
    else:
        assert set(fusing) == {FORWARDS}
    model.float()
    assert_as_a_new_one(generating)


def test_copied_while_merged(generating: BatchGenerator) -> None:
    model = generating.model
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for each in reference.parameters():
            each.zero_()
    assert all(each.any() for each in qkv(model))
    assert all(merged(group) is None for group in groups(reference))
    assert_as_a_new_one(generating)


def test_a_tied_head_stays_tied(fusing: Fusing) -> None:
    model = new_model()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    with BatchGenerator(model) as generator:
        place = model.lm_head.weight.data_ptr()
        generate(generator)
        assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.data_ptr() == place
        assert generator.last_report.fused == "3 of 3 layers"


def test_in_inference_mode(fusing: Fusing) -> None:
    """What a call in there merges can be trained later."""
    model = new_model()
    with torch.inference_mode(), BatchGenerator(model) as generator:
        tokens = generate(generator)
        assert not any(each.is_inference() for each in model.parameters())
    with BatchGenerator(model) as generator:
        assert generate(generator) == tokens
        model(IDS, labels=IDS).loss.backward()
    assert all(each.grad is not None for each in model.parameters())
