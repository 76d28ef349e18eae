"""Every architecture is either served or refused by name; neither runs the model nor leaves a trace on it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_families import CARRYING, FAMILIES, REFUSED, build, family_params, reference_generate
from support_parity import counted_tokens

from hf_batchllm import BatchGenerator, PromptError, UnsupportedModelError
from hf_batchllm.model.inspection import architecture
from hf_batchllm.model.inspection.architecture import inspect_model

SAYS = {  # by the zoo's reason, what the error says is in the way
    "unrouted": "brings an attention of its own",
    "mask": "mask|chunked_attention",
    "two-way": "both directions",
    "recurrent": "kind that is not supported|attends .* times|brings an attention of its own|carry a state",
    "repeated": "several times|attends .* times",
    "encoder": "encoder-decoder",
    "positions": "several prompts stand side by side",
    "forgets": r"generate\(\)'s cache forget all but the last 8 tokens",
}


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params())
def test_supported_families_are_understood(name: str) -> None:
    model = build(name)
    before = {key: repr(value) for key, value in vars(model.config).items()}
    state = torch.get_rng_state()
    architecture = BatchGenerator(model).architecture
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    attend = [kind for kind in kinds if (kind.endswith("attention") and kind != "linear_attention") or kind == "hybrid"]
    assert architecture.layers == len(attend)
    assert bool(architecture.states) == bool(architecture.slot_bytes) == (name in CARRYING)
    assert architecture.vocab_size == 101
    assert architecture.name == type(model).__name__
    assert {key: repr(value) for key, value in vars(model.config).items()} == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", family_params(table=REFUSED))
def test_what_cannot_be_right_is_refused_by_name(name: str) -> None:
    model: Any = REFUSED[name]()
    with pytest.raises(UnsupportedModelError, match=SAYS[REFUSED[name].why]) as caught:
        BatchGenerator(model)
    assert type(model).__name__.removesuffix("ForCausalLM")[:4] in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_layer_that_stands_in_two_places_is_refused(name: str) -> None:
    """The copy of the architecture that is run has two layers there."""
    model = FAMILIES[name]()
    layers = model.model.layers if name == "llama" else model.transformer.h
    generator = BatchGenerator(model)
    own, layers[1] = layers[1], layers[0]
    for call in (lambda: BatchGenerator(model), lambda: generator.generate([[1, 2]], max_new_tokens=2)):
        with pytest.raises(UnsupportedModelError, match="a layer that stands in several places"):
            call()
    layers[1] = own
    generator.generate([[1, 2]], max_new_tokens=2)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_copies_of_layers_need_a_number_of_their_own(name: str) -> None:
    model = FAMILIES[name]()
    layers = model.model.layers if name == "llama" else model.transformer.h
    layers[2] = copy.deepcopy(layers[1])
    with pytest.raises(UnsupportedModelError, match=r"layers 1 and 2 of .* have the same `layer_idx` \(1\)"):
        BatchGenerator(model)
    (layers[2].self_attn if name == "llama" else layers[2].attn).layer_idx = 2
    expected = reference_generate(model, [5, 6, 7, 8], max_new_tokens=6)
    assert BatchGenerator(model).generate([[5, 6, 7, 8]], max_new_tokens=6)[0].token_ids == expected


@pytest.mark.parametrize(
    ("name", "heads", "dims"),
    [("llama", 2, 32), ("deepseek_v3", 4, 36), ("gemma", 1, 32), ("gpt2", 4, 24)],
)
def test_the_size_of_a_token_in_the_cache(name: str, heads: int, dims: int) -> None:
    model = build(name)
    architecture = BatchGenerator(model).architecture
    assert architecture.kv_bytes_per_token == model.config.num_hidden_layers * heads * dims * 4


def test_weights_are_not_run_to_find_out() -> None:
    for name in ("llama", "gemma2", "gpt2", "stablelm"):
        with counted_tokens(build(name)) as sizes:
            BatchGenerator(build(name))
        assert sizes == []


def test_a_stray_window_that_the_masks_do_not_know_is_noticed() -> None:
    olmoe = FAMILIES["olmoe"]()
    olmoe.config.sliding_window = 4  # its layers pass it on, its masks are full
    with pytest.raises(UnsupportedModelError, match="mask alone"):
        BatchGenerator(olmoe)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_length_dependent_rope_is_refused_where_it_would_change_what_is_computed(rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    parameters["original_max_position_embeddings"] = 40
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    family = FAMILIES["llama"]
    config = {**family.config, "rope_parameters": parameters, "max_position_embeddings": 160}
    if rope == "dynamic":
        del parameters["original_max_position_embeddings"]
        config["max_position_embeddings"] = 40
    generator = BatchGenerator(replace(family, config=config)())
    with pytest.raises(PromptError, match="rotary"):
        generator.generate([list(range(3, 38))], max_new_tokens=8)
    ids = torch.tensor([list(range(3, 33))])
    expected = generator.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
    assert generator.generate(ids[0], max_new_tokens=8)[0].token_ids == expected[0, 30:].tolist()


def test_the_same_architecture_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    look = architecture._noted_passes

    def noted(model: Any, device: Any, name: str) -> Any:
        looks.append(name)
        return look(model, device, name)

    monkeypatch.setattr(architecture, "_noted_passes", noted)
    monkeypatch.setattr(architecture, "_SEEN", {})
    model = build("llama")
    first = inspect_model(model)
    assert inspect_model(model) == first == inspect_model(copy.deepcopy(model)) and len(looks) == 1
    other = type(model)(type(model.config)(**(model.config.to_dict() | {"num_hidden_layers": 1})))
    assert inspect_model(other).layers == 1 and len(looks) == 2
