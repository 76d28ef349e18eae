"""Models with real PEFT adapters as they are, and through the other doors: accelerated(model), pipelines, plans."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support_accelerated import GREEDY, TEXTS, made
from support_adapters import EVERY, MODELS, PAGES, build, having, lora, peft, prompts, thrice, wrapped
from support_families import FAMILIES, reference_generate
from support_kernels import plain
from support_untouched import fingerprint
from support_untouched import never_runs as never_runs  # a fixture
from transformers import LlamaConfig, LlamaForCausalLM

from hf_batchllm import BatchGenerator, accelerated
from hf_batchllm.errors import OptionValueError, UnsupportedModelError

pytestmark = plain
GIVEN = prompts(5)
INPUTS = {"input_ids": torch.tensor([[5, 6, 7], [8, 6, 9]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}


def assert_as_it_is(model: Any, **config: Any) -> None:
    before = fingerprint(model)
    result = BatchGenerator(model, **PAGES, **config).generate(GIVEN, max_new_tokens=4, progress=False)
    assert fingerprint(model) == before
    assert result.token_ids == [reference_generate(model, prompt, max_new_tokens=4) for prompt in GIVEN]


@pytest.mark.some_cases
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_active_stays_active(kind: str) -> None:
    assert_as_it_is(build(kind))


def test_several_at_once_merged_or_switched_off() -> None:
    model = wrapped(lora(), lora(EVERY, use_rslora=True))
    model.base_model.set_adapter(["a", "b"])
    assert_as_it_is(model)
    with model.disable_adapter():
        assert_as_it_is(model)
    model.set_adapter("b")
    model.merge_adapter()
    assert_as_it_is(model)
    assert_as_it_is(model.unload())


def test_an_adapter_that_takes_the_place_of_layers() -> None:
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(
            LlamaForCausalLM(config), peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM")
        ).eval()
        for name, parameter in model.named_parameters():
            if "adaption" in name:
                parameter.data.add_(torch.randn(parameter.shape))
    model.generation_config.eos_token_id = None
    assert_as_it_is(model)
    for name in ("default", None):
        with pytest.raises(OptionValueError, match="'default' replaces whole layers"):
            BatchGenerator(model).generate(GIVEN, adapter=name, max_new_tokens=2)


def test_dropout_of_adapters_in_training_is_warned_of() -> None:
    model = wrapped(lora(lora_dropout=0.1)).train()
    with pytest.warns(UserWarning, match="the model is in training mode and has dropout"):
        BatchGenerator(model).generate(GIVEN, adapter="b", max_new_tokens=2, progress=False)
    assert model.training


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "prompt learning"),
        (lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "prompt learning"),
        (lambda: peft.LilyConfig(r=4, target_modules=["q_proj"]), "the adapter 'default' mixes its experts by all"),
        (lambda: peft.PolyConfig(r=4, target_modules=["q_proj"]), "the adapter 'default' needs to be told a task"),
    ],
)
def test_what_looks_further_than_at_one_token_is_refused_by_name(config: Any, why: str) -> None:
    model = peft.get_peft_model(FAMILIES["llama"](), config())
    with pytest.raises(UnsupportedModelError, match=why):
        BatchGenerator(model).generate(GIVEN, max_new_tokens=2)


def test_an_accelerated_peft_model() -> None:
    model = wrapped(lora(task_type="CAUSAL_LM"), lora(["o_proj"], task_type="CAUSAL_LM"))
    for name in ("a", "b", None):
        with having(model, name):
            expected = model.generate(**INPUTS, **GREEDY)
            before = fingerprint(model)
            with warnings.catch_warnings(), accelerated(model):
                warnings.simplefilter("error")
                assert torch.equal(model.generate(**INPUTS, **GREEDY), expected)
                assert model.generate.last_report.sequences == 2
            assert fingerprint(model) == before


def test_rows_that_peft_gives_to_different_adapters_go_its_way() -> None:
    model = wrapped(lora(task_type="CAUSAL_LM"), lora(["o_proj"], task_type="CAUSAL_LM"))
    names = ["b", "__base__"]
    expected = model.generate(**INPUTS, **GREEDY, adapter_names=names)
    with pytest.warns(UserWarning, match="not accelerated, .* where it is called `adapter`"), accelerated(model):
        assert torch.equal(model.generate(**INPUTS, **GREEDY, adapter_names=names), expected)
    ours = BatchGenerator(model).generate(**INPUTS, **GREEDY, adapter=["b", None])
    assert torch.equal(ours, expected)


@pytest.mark.some_cases
@pytest.mark.parametrize("kind", ["lora", "transformers"])
def test_a_pipeline(kind: str) -> None:
    model = copy.deepcopy(build(kind))
    pipe = made(model=model)
    for name in ("a", "b"):
        model.set_adapter(name)
        expected = pipe(TEXTS, **GREEDY)
        with warnings.catch_warnings(), accelerated(pipe):
            warnings.simplefilter("error")
            assert pipe(TEXTS, **GREEDY) == expected


def test_a_plan_says_what_a_call_will_compute() -> None:
    given, names = thrice(GIVEN)
    generator = BatchGenerator(build("lora"), **PAGES)
    plan = generator.plan(given, adapter=names)
    result = generator.generate(given, adapter=names, max_new_tokens=2, progress=False)
    assert plan.computed_tokens == result.report.computed_tokens > generator.plan(given).computed_tokens


@pytest.mark.some_cases
@pytest.mark.parametrize("kept", [0, 8])
def test_scores(kept: int) -> None:
    kind, choices = "lora", [[1, 2], [3], [4, 5, 6]]
    given, names = thrice(GIVEN[:3])
    model = copy.deepcopy(build(kind))
    before = fingerprint(model)
    with BatchGenerator(model, **PAGES, keep_prefixes=kept) as generator:
        for _ in range(2):
            result = generator.score(given, choices=choices, adapter=names)
            assert fingerprint(model) == before
    assert bool(result.report.cached_tokens) == bool(kept)
    for row in result:
        ids = torch.tensor([given[row.index] + choices[row.choice]])
        with having(model, names[row.index]), torch.no_grad():
            expected = model(ids).logits[0].log_softmax(dim=-1)
        first = len(given[row.index])
        expected = expected[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, atol=1e-4, rtol=0)


def test_what_is_wrong_is_named() -> None:
    generator, three = BatchGenerator(build("lora")), [[5], [6], [7]]
    with pytest.raises(OptionValueError, match="list of 2 and there are 3 prompts"):
        generator.score(three, choices=[[1]], adapter=["a", None])
    for call in (partial(generator.score, choices=[[1]]), generator.plan):
        with pytest.raises(OptionValueError, match="the model has 'a', 'b'"):
            call(three, adapter="c")


def test_it_is_said_which_adapter_answered() -> None:
    model = wrapped(lora())
    model.set_adapter("b")
    generator = BatchGenerator(model)
    given = [[3, 4], [4], [5]]
    named = generator.generate(given, adapter=["a", None, "b"], max_new_tokens=1)
    assert [each.adapter for each in named] == ["a", None, "b"]
    assert generator.generate(given, max_new_tokens=1)[0].adapter == "b"  # the active one
    scores = generator.score(given[:2], choices=[[5], [6]], adapter=[None, "a"])
    assert [each.adapter for each in scores] == [None, None, "a", "a"]
    assert generator.score([[3]], [[5]])[0].adapter == "b"
    model.base_model.set_adapter(["a", "b"])
    assert generator.generate(given, max_new_tokens=1)[0].adapter == "a+b"
    with model.disable_adapter():
        assert generator.generate(given, max_new_tokens=1)[0].adapter is None
