"""Every processor works on a row as ``model.generate`` has it work on that prompt alone.

The scores of each step are compared, along the tokens that were picked here, for prompts of different lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_distributions import brief
from support_families import build
from support_generate_alone import (
    BIAS,
    FAMILY,
    NEW_TOKENS,
    PAGE,
    SAMPLED,
    SYNTH_ID,
    Trace,
    as_alone,
    prompts,
)
from support_generate_alone import trace as trace  # a fixture
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation import logits_process as processors

from hf_batchllm import BatchGenerator
from hf_batchllm.inputs.resolve_options import resolve_each, resolve_options
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling.device_options import why_not_on_device
from hf_batchllm.sampling.host_sampler import HostSampler

MANY_EOS = list(range(0, 101, 9))
WATERMARKS = {
    "lefthash": WatermarkingConfig(bias=2.5),
    "selfhash": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2, greenlist_ratio=0.4),
    "SynthID": SYNTH_ID,
}


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 1, "renormalize_logits": True},
        {"encoder_repetition_penalty": 2.5},
        {"encoder_no_repeat_ngram_size": 2, "repetition_penalty": 0.7},
        {"bad_words_ids": [[7], [8, 9], [5, 5]]},
        {"sequence_bias": BIAS},
        {"forced_bos_token_id": 12},
        {"forced_eos_token_id": [4, 6], "eos_token_id": [4, 6]},
        {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": MANY_EOS},
        {"suppress_tokens": list(range(40))},
        {"begin_suppress_tokens": list(range(50)), "forced_bos_token_id": 12},
        {"remove_invalid_values": True, "suppress_tokens": [3], "renormalize_logits": True},
        {
            **{"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[8, 9]], "min_new_tokens": 4},
            **{"eos_token_id": MANY_EOS, "suppress_tokens": [1, 2], "sequence_bias": BIAS, "renormalize_logits": True},
        },
        {**SAMPLED, "top_h": 0.4},
        {**SAMPLED, "typical_p": 0.6, "top_k": 0},
        {**SAMPLED, "epsilon_cutoff": 0.02, "top_k": 0},
        {**SAMPLED, "eta_cutoff": 0.03, "temperature": 1.7},
        {
            **{**SAMPLED, "temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9},
            **{"epsilon_cutoff": 0.001, "eta_cutoff": 0.001, "renormalize_logits": True},
            **{"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3},
        },
    ],
    ids=brief,
)
def test_options_mean_what_they_mean_to_each_prompt_alone(options: dict[str, Any], trace: Trace) -> None:
    count = 3 if options.get("do_sample") else 1
    result = as_alone(trace, {"num_return_sequences": count, **options})
    assert len(result) == 5 * count
    assert trace.changed


@pytest.mark.some_cases
@pytest.mark.parametrize("name", WATERMARKS)
@pytest.mark.parametrize("more", [{}, {**SAMPLED, "num_return_sequences": 2}], ids=["greedy", "sampled"])
def test_watermarks(name: str, more: dict[str, Any], trace: Trace) -> None:
    as_alone(trace, {"watermarking_config": WATERMARKS[name], "renormalize_logits": True, **more})


# -- guidance --------------------------------------------------------------------------------------------------

NEGATIVE = torch.randint(97, (5, 6), generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], *[[1] * 6] * 3, [0, 1, 1, 1, 1, 1]])


@pytest.mark.some_cases
@pytest.mark.parametrize("negative", [None, NEGATIVE], ids=["", "negative prompts"])
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "num_return_sequences": 2, "top_k": 9}], ids=brief)
def test_guidance(negative: torch.Tensor | None, options: dict[str, Any], trace: Trace) -> None:
    given = {"max_new_tokens": 6, "guidance_scale": 1.8, **options}
    rows = {} if negative is None else {"negative_prompt_ids": negative, "negative_prompt_attention_mask": MASK}

    def theirs(_: int, index: int) -> dict[str, Any]:
        return given | {name: tensor[index : index + 1] for name, tensor in rows.items()}

    with pytest.warns(UserWarning, match="`guidance_scale` has transformers run the model once more"):
        as_alone(trace, given | rows, theirs)


@pytest.mark.filterwarnings("ignore:.guidance_scale. has transformers run")
def test_negative_prompts_are_for_those_that_are_guided(trace: Trace) -> None:
    scales = [2.0, None, 1.0, 1.5, None]
    each = [{"max_new_tokens": 5} | ({} if scale is None else {"guidance_scale": scale}) for scale in scales]

    def theirs(_: int, index: int) -> dict[str, Any]:
        return {**each[index], "negative_prompt_ids": NEGATIVE[index : index + 1]}

    configs = [GenerationConfig(**options) for options in each]
    as_alone(trace, {"generation_config": configs, "negative_prompt_ids": NEGATIVE}, theirs)


# -- different settings ----------------------------------------------------------------------------------------


def configs() -> list[GenerationConfig]:
    kinds: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 2, "max_new_tokens": 7},
        {**SAMPLED, "num_return_sequences": 3, "temperature": 0.8, "top_k": 9, "max_new_tokens": NEW_TOKENS},
        {**SAMPLED, "num_return_sequences": 2, "typical_p": 0.7, "repetition_penalty": 1.2, "max_new_tokens": 5},
        {"min_new_tokens": 3, "max_new_tokens": 9},
    ]
    made = [GenerationConfig(**{"do_sample": False, "eos_token_id": MANY_EOS, **kind}) for kind in kinds]
    return [made[at] for at in (0, 1, 3, 2, 1, 0)]


def test_each_prompt_has_its_own_settings(trace: Trace) -> None:
    own = configs()

    def theirs(_: int, index: int) -> dict[str, Any]:
        chosen = own[index].to_diff_dict()
        return {name: chosen[name] for name in chosen.keys() - {"num_return_sequences", "transformers_version"}}

    result = as_alone(trace, {"generation_config": own}, theirs, prompts(6))
    assert [(g.index, g.sample) for g in result] == [
        (index, sample) for index, config in enumerate(own) for sample in range(config.num_return_sequences or 1)
    ]


def test_settings_of_others_change_no_tokens() -> None:
    own, generator = configs(), BatchGenerator(build(FAMILY), **PAGE)
    result = generator.generate(prompts(6), own, seed=8)
    for config in dict.fromkeys(own):
        for generation in generator.generate(prompts(6), config, seed=8):
            if own[generation.index] is config:
                mixed = next(g for g in result if (g.index, g.sample) == (generation.index, generation.sample))
                assert mixed.token_ids == generation.token_ids


def test_rows_with_the_same_settings_are_processed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    for kind in (processors.TemperatureLogitsWarper, processors.SuppressTokensLogitsProcessor):
        original = kind.__call__

        def counted(self: Any, ids: Any, scores: torch.Tensor, original: Any = original) -> torch.Tensor:
            rows.append(len(scores))
            return original(self, ids, scores)

        monkeypatch.setattr(kind, "__call__", counted)
    kinds = [GenerationConfig(do_sample=True, temperature=t, suppress_tokens=[4], max_new_tokens=3) for t in (0.5, 2.0)]
    model: Any = build(FAMILY)
    resolved = [resolve_options(model, kind, {}) for kind in kinds]
    sampler = HostSampler(model, resolved * 20, 3)
    requests = [Request(index, np.arange(1, 2 + index % 5, dtype=np.int32), 3) for index in range(40)]
    sampler(torch.randn(40, 101), requests)
    assert rows == [20] * 4


# -- what is told of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, SAMPLED, {**SAMPLED, "top_k": 0, "top_p": 0.8, "repetition_penalty": 1.2}], ids=brief
)
def test_to_be_told_of_scores_changes_no_token(options: dict[str, Any]) -> None:
    model: Any = build(FAMILY)
    resolved = [resolve_options(model, None, {"max_new_tokens": 5, **options})] * 9
    requests = [Request(index, np.arange(1, 2 + index, dtype=np.int32), 5) for index in range(9)]
    logits, told = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1)) * 3, []
    tokens = HostSampler(model, resolved, 1)(logits, requests)
    assert HostSampler(model, resolved, 1, record=lambda *given: told.append(given))(logits, requests) == tokens
    assert [request for requests, _, _ in told for request in requests] == requests
    scores = torch.cat([scores for _, _, scores in told])
    assert torch.equal(torch.cat([raw for _, raw, _ in told]), logits)
    assert (scores[range(9), tokens] > -torch.inf).all()
    if options:
        assert (scores == -torch.inf).any()


@pytest.mark.parametrize(
    "given",
    [
        {"logits_processor": [processors.MinLengthLogitsProcessor(3, 1)]},
        {"logits_processor": lambda index, ids: pytest.fail("it was called")},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: [1]},
        {"guidance_scale": 1.5},
        {"watermarking_config": WATERMARKS["lefthash"]},
        {"watermarking_config": SYNTH_ID},
        {"top_h": 0.5, "do_sample": True, "top_p": 0.5},
        {"top_h": 0.5, "do_sample": True, "typical_p": 0.5},
    ],
    ids=" ".join,
)
def test_the_device_leaves_to_the_host_what_it_cannot_do(given: dict[str, Any]) -> None:
    model: Any = build(FAMILY)
    reason = why_not_on_device(resolve_options(model, None, {"max_new_tokens": 3, **given}), model, 97)
    assert reason is not None and f"`{next(iter(given))}`" in reason and "waits" in reason
    nothing = resolve_options(model, None, {"max_new_tokens": 3, "logits_processor": []})
    assert why_not_on_device(nothing, model, 97) is None


def test_configs_with_the_same_watermark_share_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a million entries."""
    kept: list[Any] = []
    init = processors.WatermarkLogitsProcessor.__init__

    def noted(self: processors.WatermarkLogitsProcessor, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        kept.append(self)

    model = build(FAMILY)
    configs = [
        GenerationConfig(max_new_tokens=3 + place, watermarking_config=WatermarkingConfig(bias=bias))
        for place, bias in enumerate([2.5, 2.5, 2.5, 4.0])
    ]
    resolved = resolve_each(model, configs, {})
    monkeypatch.setattr(processors.WatermarkLogitsProcessor, "__init__", noted)
    sampler = HostSampler(model, resolved, None)
    requests = [Request(index, np.array([5, 6], dtype=np.int32), 3 + index) for index in range(4)]
    sampler(torch.zeros(4, 101), requests)
    assert sorted(each.bias for each in kept) == [2.5, 4.0]
