"""``model.generate_batch`` under ``accelerated``, as TRL calls it: transformers' own results, in its own form."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_accelerated import accelerated_throughout as served
from support_accelerated import model as model  # a fixture
from support_families import FAMILIES
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_batchllm import accelerated

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [20], [5, 6, 7, 8, 9]]


def config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 6, "eos_token_id": 99, "do_sample": False, **fields})


def small(**fields: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=8, **fields)


def alone(model: Any, ids: list[int], **options: Any) -> list[int]:
    """What ``generate`` gives for one prompt."""
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 99, **options}
    made = model.generate(torch.tensor([ids]), pad_token_id=0, **given)
    return made[0, len(ids) :].tolist()


@contextmanager
def said() -> Iterator[list[str]]:
    """What users are warned of."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in caught if "Warning: " not in str(each.message)]


def test_results_are_those_of_generate_and_have_the_form_of_generate_batch(model: Any) -> None:
    expected = [alone(model, ids) for ids in PROMPTS]
    with served(model):
        assert model.generate_batch([], config()) == {} == model.generate_batch(None, config())
        outputs = model.generate_batch(PROMPTS, config())
        assert model.last_report.sequences == len(PROMPTS)
    assert list(outputs) == ["req_0", "req_1", "req_2", "req_3"]
    for (name, output), ids, tokens in zip(outputs.items(), PROMPTS, expected, strict=True):
        assert type(output) is GenerationOutput and output.request_id == name
        assert (output.prompt_ids, output.generated_tokens) == (ids, tokens)
        assert output.is_finished() and output.status is RequestStatus.FINISHED and output.error is None
        assert output.logprobs == [] and output.timestamps is None  # which were not asked for
        assert output.created_time <= output.lifespan[0] <= output.lifespan[1]


def test_beside_transformers_own() -> None:
    model = FAMILIES["llama"]()
    batching = small(return_logprobs=True)
    theirs = model.generate_batch(PROMPTS, config(), batching)
    with served(model):
        ours = model.generate_batch(PROMPTS, config(), batching)
    assert list(ours) == list(theirs)
    for name, output in theirs.items():
        assert ours[name].generated_tokens == output.generated_tokens
        assert ours[name].logprobs == pytest.approx(output.logprobs, abs=1e-4)


EARLY, REPEATING = {"eos_token_id": list(range(60))}, {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1}


@pytest.mark.parametrize(
    ("fields", "beside", "as_generate"),
    [
        (EARLY, {}, EARLY),  # it belongs to the answer
        ({"eos_token_id": -1}, {}, {"eos_token_id": None}),
        ({}, {"max_new_tokens": 2}, {"max_new_tokens": 2}),
        # What transformers drops or passes over:
        (REPEATING, {}, REPEATING),
        ({"num_beams": 3}, {}, {"num_beams": 3}),
        ({**EARLY, "min_new_tokens": 4}, {}, {**EARLY, "min_new_tokens": 4}),
    ],
    ids=str,
)
def test_each_option_counts_as_in_generate(
    fields: dict[str, Any], beside: dict[str, Any], as_generate: dict[str, Any]
) -> None:
    model = FAMILIES["llama"]()  # which repeats itself
    expected, plain = ([alone(model, ids, **each) for ids in PROMPTS] for each in (as_generate, {}))
    with served(model):
        outputs = model.generate_batch(PROMPTS, config(**fields), **beside)
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert expected != plain


def test_the_models_own_config_is_for_calls_without_one() -> None:
    model = FAMILIES["llama"]()
    expected, ids = alone(model, [5, 6, 7]), [[5, 6, 7]]
    model.generation_config = config(repetition_penalty=3.0, max_new_tokens=4)
    with served(model):
        given = model.generate_batch(ids, config())["req_0"].generated_tokens
        left_out = model.generate_batch(ids)["req_0"].generated_tokens
    assert given == expected  # as in transformers, which does not merge the two
    assert left_out == alone(model, ids[0], max_new_tokens=4) != expected[:4]


def test_without_any_limit_answers_end_where_the_models_positions_do() -> None:
    model = FAMILIES["llama"]()
    positions = model.config.max_position_embeddings
    with served(model):
        output = model.generate_batch([[5, 6, 7]], GenerationConfig(eos_token_id=-1))["req_0"]
        shorter = model.generate_batch([[5, 6, 7]], GenerationConfig(eos_token_id=-1, max_length=8))["req_0"]
    assert len(output.generated_tokens) == positions - 3
    assert shorter.generated_tokens == output.generated_tokens[:5]


# -- samples ---------------------------------------------------------------------------------------------------


def test_samples_follow_their_distribution_and_their_logprobs_are_those_they_were_drawn_with(model: Any) -> None:
    drawn = config(do_sample=True, temperature=0.7, top_k=3, num_return_sequences=400, max_new_tokens=1)
    with served(model):
        outputs = list(model.generate_batch(PROMPTS[:1], drawn, small(return_logprobs=True, seed=3)).values())
    with torch.no_grad():
        logits = model(torch.tensor(PROMPTS[:1])).logits[0, -1] / 0.7
    best = logits.topk(3)
    expected = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
    for output in outputs:
        assert output.logprobs == pytest.approx([expected[token] for token in output.generated_tokens], abs=1e-4)
    for token, logprob in expected.items():
        share = sum(output.generated_tokens == [token] for output in outputs) / len(outputs)
        assert share == pytest.approx(torch.tensor(logprob).exp().item(), abs=0.08)


def test_samples_stand_beside_each_other_and_repeat_with_the_seed(model: Any) -> None:
    drawn = config(do_sample=True, num_return_sequences=3)
    with served(model):
        outputs = model.generate_batch(PROMPTS[:2], drawn, small(seed=1))
        again = model.generate_batch(PROMPTS[:2], drawn, small(seed=1))
        other = model.generate_batch(PROMPTS[:2], drawn, small(seed=2))
    assert list(outputs) == [f"req_{index}{child}" for index in range(2) for child in ("__child#0", "__child#1", "")]
    tokens = [[output.generated_tokens for output in each.values()] for each in (outputs, again, other)]
    assert tokens[0] == tokens[1] != tokens[2] and tokens[0][0] != tokens[0][1]


def test_nothing_cuts_off_unlikely_tokens_that_the_config_does_not_name(model: Any) -> None:
    drawn = config(do_sample=True, temperature=100.0, num_return_sequences=500, max_new_tokens=1)
    with served(model):
        outputs = model.generate_batch([[5]], drawn)
    assert len({output.generated_tokens[0] for output in outputs.values()}) > 60  # `generate` keeps 50 by default


def test_greedy_samples_are_equal(model: Any) -> None:
    with served(model):
        greedy = config()
        greedy.num_return_sequences = 3
        outputs = model.generate_batch(PROMPTS[:1], greedy)
        assert model.last_report.sequences == 1
    assert [output.generated_tokens for output in outputs.values()] == [alone(model, PROMPTS[0])] * 3


# -- errors ----------------------------------------------------------------------------------------------------


def test_a_bad_request_has_an_error_and_the_others_run(model: Any) -> None:
    with served(model), said() as found:
        outputs = model.generate_batch([PROMPTS[0], [1000], [], PROMPTS[1]], config())
    assert [output.status.name for output in outputs.values()] == ["FINISHED", "FAILED", "FAILED", "FINISHED"]
    assert "1000" in outputs["req_1"].error and outputs["req_1"].prompt_ids == [1000]
    assert outputs["req_1"].generated_tokens == [] and outputs["req_3"].generated_tokens == alone(model, PROMPTS[1])
    assert [text for text in found if text.startswith("generate_batch: req_1 failed: has token id 1000")]


def test_what_has_no_effect_is_named(model: Any) -> None:
    with accelerated(model), said() as found:
        for _ in range(2):
            model.generate_batch(PROMPTS[:1], config(eos_token_id=None), temperature=0.5)
    assert len(found) == 2
    assert found[0].startswith("`temperature` has no effect: of its keyword arguments, generate_batch reads")
    assert found[1].startswith("the generation_config has no `eos_token_id`, so no token ends an answer")


# -- what is left to transformers ------------------------------------------------------------------------------


def test_what_is_not_served_runs_in_transformers_way_with_one_warning() -> None:
    model = FAMILIES["llama"]()
    with accelerated(model), said() as found:
        outputs = model.generate_batch(PROMPTS, config(), small(), record_timestamps=True)
        assert model.last_report is None
    assert all(len(output.timestamps) == len(output.generated_tokens) > 0 for output in outputs.values())
    assert found == [
        "not accelerated, transformers' own continuous batching runs instead: `record_timestamps` is not supported: "
        "tokens come in bursts here"
    ]


def test_a_manager_is_transformers_own_and_nothing_runs_beside_it() -> None:
    model, ids = FAMILIES["llama"](), torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=3)
    with accelerated(model), said() as found:
        with model.continuous_batching_context_manager(config(), continuous_batching_config=small()) as manager:
            assert type(manager) is ContinuousBatchingManager
            manager.add_request([5, 6, 7])
            output = manager.get_result()
            assert torch.equal(model.generate(ids, max_new_tokens=3), expected)  # while its thread waits
            assert model.last_report is None
        assert torch.equal(model.generate(ids, max_new_tokens=3), expected)
        assert model.last_report is not None
    assert output.generated_tokens == alone(model, [5, 6, 7])
    assert len(found) == 2
    assert "own continuous batching runs instead: `init_continuous_batching` makes a manager of single" in found[0]
    assert "put all prompts into a list, and call model.generate_batch(prompts)" in found[0]
    assert "the model's own generate runs instead: transformers' own manager runs on the model: stop() it" in found[1]


def test_generate_that_turns_to_continuous_batching_is_left_to_it() -> None:
    model, ids = FAMILIES["llama"](), torch.tensor([[5, 6, 7]])
    given = {"generation_config": config(), "continuous_batching_config": small(), "cache_implementation": "paged"}
    expected = model.generate(ids, **given)
    with accelerated(model), said() as found:
        assert str(model.generate(ids, **given)) == str(expected)
    (why,) = [each for each in found if "not accelerated" in each]
    assert why.endswith('runs instead: `cache_implementation` is "paged": transformers\' own continuous batching')


def test_wrong_calls_get_the_errors_of_transformers(model: Any) -> None:
    with accelerated(model), pytest.raises(TypeError, match="inputs"):
        model.generate_batch()


# -- the model -------------------------------------------------------------------------------------------------


def test_a_model_in_training_runs_as_in_evaluation_and_stays_in_training() -> None:
    model = FAMILIES["gpt2"]()
    expected = alone(model, PROMPTS[0])
    model.train()
    model.transformer.h[0].eval()  # frozen by its user
    before = [module.training for module in model.modules()]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    with served(model):
        assert model.generate_batch(PROMPTS[:1], config())["req_0"].generated_tokens == expected
    assert [module.training for module in model.modules()] == before
