"""What a user puts between ``generate`` and the layers is refused by name, tried, or shown to change nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_users import GREEDY, PROMPTS, assert_refused, tokens, tokens_alone
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from hf_batchllm import BatchGenerator, PromptError, UnsupportedModelError
from hf_batchllm.model.inspection import architecture

PREPARE, UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
Own = LlamaForCausalLM


def as_checkpoints_do(self: Any, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> dict[str, Any]:
    seen = past_key_values.get_seq_length() if past_key_values is not None else 0
    given = {"past_key_values": past_key_values, "attention_mask": kwargs.get("attention_mask")}
    places = torch.arange(seen, input_ids.shape[1])
    return {"input_ids": input_ids[:, seen:], "position_ids": places[None], "cache_position": places, **given}


def shifted(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    inputs = Own.prepare_inputs_for_generation(self, *args, **kwargs)
    return {**inputs, "position_ids": inputs["position_ids"] + 3}


def cut(self: Any, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
    inputs = Own.prepare_inputs_for_generation(self, input_ids, **kwargs)
    return inputs if input_ids.shape[1] <= 300 else {**inputs, "input_ids": input_ids[:, -300:]}


def embedded(self: Any, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
    inputs = Own.prepare_inputs_for_generation(self, input_ids, **kwargs)
    return {**inputs, "input_ids": None, "inputs_embeds": self.get_input_embeddings()(inputs["input_ids"])}


def forgetful(self: Any, outputs: Any, given: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    updated = Own._update_model_kwargs_for_generation(self, outputs, given, **kwargs)
    if updated.get("attention_mask") is not None:
        updated["attention_mask"][:, 0] = 0
    return updated


def reads_hidden_states(self: Any, outputs: Any, given: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    return {
        **Own._update_model_kwargs_for_generation(self, outputs, given, **kwargs),
        "last": outputs.hidden_states[-1],
    }


def passed_on(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(Own, name)(self, *args, **kwargs)

    return method


def of_subclass(**methods: Any) -> Any:
    model: Any = FAMILIES["llama"]()
    model.__class__ = type("MyLlama", (Own,), methods)
    return model


@pytest.mark.parametrize(
    "method", [passed_on(PREPARE), as_checkpoints_do], ids=["passed on", "as in code beside checkpoints"]
)
def test_a_usual_way_to_prepare_inputs_is_served_and_named_once(method: Any) -> None:
    model = of_subclass(**{PREPARE: method})
    generator = BatchGenerator(model)
    with pytest.warns(UserWarning, match=f"MyLlama has its own `{PREPARE}`") as caught:
        assert tokens(generator) == tokens_alone(model) == tokens(generator)
    assert len([each for each in caught if each.category is UserWarning]) == 1  # transformers has deprecated a name


def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError("where is the image?")


def theirs(method: Any) -> Any:
    """As transformers defines it for one model."""
    return types.FunctionType(method.__code__, {**globals(), "__name__": "transformers.models.new.modeling_new"})


REFUSED: list[tuple[str, Any, str]] = [
    (PREPARE, shifted, f"has its own `{PREPARE}`.*in the first pass the model is given other `position_ids`"),
    (PREPARE, cut, f"{PREPARE}`.*a prompt of 509 tokens, in the first pass the model is given other `input_ids`"),
    (PREPARE, embedded, f"has its own `{PREPARE}`.*a further argument, `inputs_embeds`"),
    (UPDATE, forgetful, f"has its own `{UPDATE}`.*in a later pass the model is given other `attention_mask`"),
    (UPDATE, reads_hidden_states, f"has its own `{UPDATE}`.*it failed .TypeError"),
    (PREPARE, theirs(fails), "does not generate from text alone.*where is the image"),
    (PREPARE, theirs(shifted), "positions in a way of its own"),
    *(
        (name, passed_on(name), f"has a `{name}` of its own")
        for name in ("generate", "_sample", "_prepare_cache_for_generation")
    ),
]


@pytest.mark.parametrize(("name", "method", "why"), REFUSED)
def test_a_method_that_changes_what_the_model_is_given_is_refused(name: str, method: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"MyLlama .*{why}"):
        BatchGenerator(of_subclass(**{name: method}))


def test_a_generate_that_comes_with_a_checkpoint_is_refused() -> None:
    model: Any = FAMILIES["llama"]()
    model.generate = partial(passed_on("generate"), model)  # as transformers sets ``custom_generate``
    with pytest.raises(UnsupportedModelError, match="has a `generate` of its own"):
        BatchGenerator(model)


def test_a_method_set_on_the_model_later_is_seen_by_the_next_call() -> None:
    model: Any = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    tokens(generator)
    model.prepare_inputs_for_generation = types.MethodType(shifted, model)
    assert_refused(model, generator, "LlamaForCausalLM has its own", lambda: next(generator.stream(PROMPTS)))
    del model.prepare_inputs_for_generation
    assert tokens(generator) == tokens_alone(model)


def doubled(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value * 2, mask, **kwargs)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "doubled", doubled)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "doubled", masking_utils.sdpa_mask)


@pytest.mark.usefixtures("registered")
def test_an_attention_function_of_ones_own_is_refused_until_it_is_gone() -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    expected = tokens(generator)
    model.set_attn_implementation("doubled")
    back = r'attends by `doubled`.*doubled.*call model.set_attn_implementation\("sdpa"\)'
    assert_refused(model, generator, back, lambda: generator.score([PROMPTS[0]]))
    model.set_attn_implementation("eager")
    assert tokens(generator) == expected


def makes_masks(*args: Any, _made: Any = masking_utils.sdpa_mask, **kwargs: Any) -> Any:
    return _made(*args, **kwargs)


def with_prefix(*args: Any, _causal: Any = modeling_llama.create_causal_mask, **kwargs: Any) -> Any:
    return _causal(*args, **kwargs, or_mask_function=lambda batch, head, query, key: key < 4)


def looks_ahead(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < query + 2


REPLACED: dict[str, tuple[Any, str, Any, str]] = {
    "attention by name": (AttentionInterface._global_mapping, "sdpa", doubled, "attends by `sdpa`"),
    "attention for itself": (
        modeling_llama.ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", doubled, "attends by `sdpa`"
    ),
    "who makes masks": (
        AttentionMaskInterface._global_mapping, "sdpa", makes_masks, "attention masks made by the function"
    ),
    "what masks are asked for": (
        vars(modeling_llama), "create_causal_mask", with_prefix, "modeling_llama.create_causal_mask` has been replaced"
    ),
    "what is below masks": (
        vars(masking_utils), "causal_mask_function", looks_ahead,
        "masking_utils.causal_mask_function` has been replaced",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_in_transformers_is_seen_before_and_after_the_first_call(
    what: str,
) -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    expected = tokens(generator)
    home, name, instead, why = REPLACED[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(home, name, instead)
        assert_refused(FAMILIES["llama"](), generator, why)
    assert tokens(generator) == expected


def test_what_the_model_does_not_use_is_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)  # the model attends by SDPA
    monkeypatch.setattr(modeling_gemma2, "create_causal_mask", doubled)
    assert tokens(generator) == tokens_alone(model)
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="attends by `eager`"):
        tokens(generator)


def test_an_attention_layer_exchanged_for_another_is_looked_at_itself() -> None:
    class Windowed(modeling_llama.LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs, sliding_window=3)  # which SDPA ignores

    model: Any = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    tokens(generator)
    model.model.layers[1].self_attn.__class__ = Windowed
    assert_refused(model, generator, "mask alone")


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        ("config", "sliding_window", 3, r"self_attn\.sliding_window` is 8, and the config makes it 3"),
        ("config", "layer_types", ["full_attention"] * 3, "Gemma2"),
        ("config", "is_causal", False, "Gemma2"),
        ("model.layers.1.self_attn", "is_causal", False, "both directions"),
    ],
)
def test_what_is_changed_after_loading_is_refused_where_layers_do_not_follow(
    where: str, name: str, value: Any, why: str
) -> None:
    model = FAMILIES["gemma2"]()
    generator = BatchGenerator(model)
    tokens(generator)
    setattr(model.config if where == "config" else model.get_submodule(where), name, value)
    assert_refused(model, generator, why)


def scaled(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn.scaling = 0.01


def rotated(model: Any, patch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *rest: rotate(q * 3, k, *rest))


def smaller_window(model: Any, patch: pytest.MonkeyPatch) -> None:
    for module in (model.config, *model.modules()):
        if getattr(module, "sliding_window", None):
            module.sliding_window = 3


@pytest.mark.parametrize(("family", "change"), [("llama", scaled), ("llama", rotated), ("gemma2", smaller_window)])
def test_what_layers_follow_is_run_as_it_is_in_generate(
    family: str, change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[family]()
    generator = BatchGenerator(model)
    before = tokens(generator)
    change(model, monkeypatch)
    generator.forget_prefixes()
    assert before != tokens(generator) == tokens_alone(model) == tokens(BatchGenerator(model))


def test_an_unchanged_model_is_not_inspected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = BatchGenerator(FAMILIES["gemma2"]())
    monkeypatch.setattr("hf_batchllm.model.inspection.architecture.inspect_model", None)
    for _ in range(2):
        assert len(generator.generate(PROMPTS, **GREEDY)) == len(PROMPTS)
    generator.model.train().eval()
    generator.generate(PROMPTS, **GREEDY)


def test_a_rope_that_depends_on_lengths_is_known_by_its_layer() -> None:
    family = FAMILIES["llama"]
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    settings = {**family.config, "rope_parameters": dynamic, "max_position_embeddings": 40}
    model = replace(family, config=settings)()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    model.config.max_position_embeddings = 500
    with pytest.raises(PromptError, match="rotary"):
        BatchGenerator(model).generate([list(range(3, 38))], max_new_tokens=8)


def with_dynamic_rope(model: Any, config: Any) -> Any:
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config.max_position_embeddings = 40
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


@pytest.mark.parametrize("own_config", [True, False])
def test_a_rope_put_in_place_of_another_is_seen_by_each_generator(own_config: bool) -> None:
    model: Any = FAMILIES["llama"]()
    first = BatchGenerator(model)
    second = BatchGenerator(with_dynamic_rope(model, model.config if own_config else deepcopy(model.config)))
    for generator in (first, second):
        with pytest.raises(PromptError, match="rotary"):
            generator.generate([list(range(3, 38))], max_new_tokens=8)


CELL = """
from transformers import LlamaForCausalLM

def of_helper():
    return 1

def helper():
    return of_helper()

class InANotebook(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(helper(), -1)
        return output
"""


def test_functions_of_a_notebook_matter_where_the_model_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec(CELL, vars(notebook))
    model: Any = FAMILIES["llama"]()
    model.__class__ = vars(notebook)["InANotebook"]
    generator = BatchGenerator(model)
    before, looks = tokens(generator), list[int]()
    with monkeypatch.context() as patch:
        inspect = architecture.inspect_model
        patch.setattr(architecture, "inspect_model", lambda model: looks.append(1) or inspect(model))
        for number in range(2):
            exec(f"def another(): return {number}", vars(notebook))
            assert tokens(generator) == before and not looks
    exec("def of_helper(): return 3", vars(notebook))
    assert before != tokens(generator) == tokens_alone(model)
