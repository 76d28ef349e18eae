"""Digests of weights and of models: any value that changes shows, and so do values that change places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator
from hf_batchllm.model.inspection.fingerprint import fingerprint
from hf_batchllm.model.inspection.weights_digest import Digest
from hf_batchllm.wording import differing

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool]


def made(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (values > 0) if dtype == torch.bool else (40 * values).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (7, 9), (64, 64), (96, 4096)], ids=str)
def test_every_change_shows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = made(*shape, dtype)
    bits = tensor.view(torch.uint8)

    def seen(change: Callable[[], object]) -> bool:
        before, kept = Digest([tensor]), bits.clone()
        assert Digest([tensor]) == before
        change()
        other = Digest([tensor]) != before
        assert other == (not torch.equal(bits, kept)), "the digest tells something else than the bits"
        bits.copy_(kept)
        assert Digest([tensor]) == before
        return other

    def exchange(one: object, other: object) -> None:
        tensor[one], tensor[other] = tensor[other].clone(), tensor[one].clone()

    assert seen(lambda: bits[-1, -1:].bitwise_xor_(1))
    seen(lambda: exchange(0, -1))  # rows
    seen(lambda: exchange((slice(None), 0), (slice(None), -1)))  # columns
    if shape[1] > 1:
        half = shape[1] // 2
        columns = [*range(half, 2 * half), *range(half), *range(2 * half, shape[1])]
        seen(lambda: tensor.copy_(tensor[:, columns]))
        seen(lambda: exchange((0, 0), (1, 1)))
        top = torch.iinfo(torch.uint8).max // 2 + 1  # the highest bit, which is the sign's
        for step in (1, 2, 4, 8):  # signs of two columns, or of all: in sums of words some cancel out
            last = tensor.element_size() - 1
            places = [last + tensor.element_size() * column for column in range(step - 1, shape[1], step)]
            if dtype != torch.bool and places:
                assert seen(lambda places=places: flip(bits, places[:2], top))
                assert seen(lambda places=places: flip(bits, places, top))


def flip(bits: torch.Tensor, places: list[int], mask: int) -> None:
    bits[:, places] = bits[:, places] ^ mask


def test_what_a_tensor_is_counts() -> None:
    zeros = torch.zeros(4, 6)
    assert Digest([zeros]) == Digest([zeros.clone()])
    assert Digest([zeros]) != Digest([zeros.view(6, 4)])
    assert Digest([zeros]) != Digest([zeros.half()])
    assert Digest([zeros]) != Digest([zeros, zeros])
    assert Digest([zeros, zeros + 1]) != Digest([zeros + 1, zeros])
    assert Digest([torch.empty(4, 0)]) == Digest([torch.empty(4, 0)])
    assert Digest([]) == Digest([])


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole[:, :3000],
        lambda whole: whole[3:40].T,
        lambda whole: whole.view(-1)[1:],
        lambda whole: whole[0, 0],
        lambda whole: whole.view(8, 5, 4099).permute(2, 0, 1),
    ],
)
def test_tensors_that_lie_otherwise_in_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = made(40, 4099, torch.bfloat16)
    tensor = view(whole)
    before = Digest([tensor])
    assert Digest([tensor]) == before
    tensor.view(-1)[-1:].neg_() if tensor.is_contiguous() else tensor[-1].neg_()
    assert Digest([tensor]) != before


def test_sparse_weights_and_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        made_there = torch.ones(5, 5)
        before = Digest([made_there])
        made_there[1, 1] = 2
    assert Digest([made_there]) != before
    for layout in (torch.ones(3, 3).to_sparse(), torch.ones(3, 3).to_sparse_csr()):
        before = Digest([layout])
        assert Digest([layout]) == before
        assert Digest([layout * 2]) != before


def test_a_transposed_view_of_the_same_memory_shows() -> None:
    tensor = torch.randn(64, 64)
    assert Digest([tensor]) != Digest([tensor.t()])


# -- models ----------------------------------------------------------------------------------------------------


def test_a_model_in_use_has_its_fingerprint() -> None:
    model = copy.deepcopy(build("llama"))
    before = fingerprint(model)
    with BatchGenerator(model) as generator:
        generator.generate([[5, 6, 7], [8, 9]], max_new_tokens=3)
        assert fingerprint(model) == before  # weights may be merged now
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.T.contiguous().T  # the same values lie otherwise in memory
    assert fingerprint(model) == before
    assert fingerprint(model.to(torch.bfloat16)) != before


def test_a_rope_that_depends_on_the_length_leaves_the_fingerprint() -> None:
    config = copy.deepcopy(build("llama").config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config.max_position_embeddings = 16
    model = type(build("llama"))(config).eval()
    before = fingerprint(model)
    model(torch.arange(40)[None])
    assert fingerprint(model) == before
    model.config.rope_parameters["factor"] = 2.0
    assert differing(before, fingerprint(model)) == "another config"


def test_the_last_bits_of_frequencies_depend_on_the_processor() -> None:
    model = copy.deepcopy(build("llama"))
    before, buffer = fingerprint(model), model.model.rotary_emb.inv_freq
    buffer.copy_(torch.nextafter(buffer, torch.tensor(torch.inf)))
    assert fingerprint(model) == before
    buffer[1] *= 1.02
    assert differing(before, fingerprint(model)) == "other buffers"


@pytest.mark.parametrize("kind", ["lora", "saved", "transformers"])
def test_adapters_are_told_apart_from_weights(kind: str) -> None:
    pytest.importorskip("peft")
    from support_adapters import build as build_adapted

    model: Any = copy.deepcopy(build_adapted(kind))
    before = fingerprint(model)
    with torch.no_grad():
        next(each for name, each in model.named_parameters() if "lora_B" in name)[1] += 1
    assert differing(before, fingerprint(model)) == "other adapters"
    if kind == "lora":
        assert differing(before, fingerprint(copy.deepcopy(model).unload())) == "other adapters"
        louder: Any = copy.deepcopy(build_adapted(kind))
        next(each for each in louder.modules() if hasattr(each, "lora_A")).scaling["a"] *= 2
        assert differing(before, fingerprint(louder)) == "other adapters"
    with torch.no_grad():
        next(each for name, each in model.named_parameters() if "embed_tokens" in name)[1] += 1
    assert differing(before, fingerprint(model)) == "other weights and other adapters"


def test_a_padding_token_that_is_set_changes_no_fingerprint() -> None:
    tokenizer = word_tokenizer(97)
    before = fingerprint(build("llama"), tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    assert differing(before, fingerprint(build("llama"), tokenizer)) == ""
