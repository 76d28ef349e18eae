"""Tensors in, tensors out: what ``model.generate`` takes and gives, down to shapes, padding and lengths."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import support_step_tensors
import torch
from support_accelerated import tokenizer as tokenizer  # a fixture
from support_calls import failing
from support_families import build, family_params
from support_llama_calls import FAMILY
from support_llama_calls import generator as generator  # a fixture
from support_step_tensors import PAD, stock
from transformers import Cache, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation import GenerateDecoderOnlyOutput

from hf_batchllm import BatchGenerator, BatchResult, GenerationInterrupted, PromptError, UnsupportedOptionError
from hf_batchllm.engine.collector import TokenCollector
from hf_batchllm.inputs.padded_batch import take_padded
from hf_batchllm.planning.scheduler import GroupScheduler

# Sliding windows, learned positions (OPT counts them from its mask), sinks, layer norms.
FAMILIES = family_params(["llama", "mistral", "gemma3", "gpt2", "opt", "gpt_oss", "biogpt"])
batch = partial(support_step_tensors.batch, width=26, least=1)
IDS, MASK = batch()


@pytest.fixture
def likely_eos() -> list[int]:
    """EOS tokens that some rows of the batch meet sooner than others."""
    new = stock(IDS, attention_mask=MASK, max_new_tokens=8)[:, IDS.shape[1] :]
    return sorted({new[0, 1].item(), new[2, 5].item(), new[3, 3].item()}, reverse=True)


# -- as generate gives it --------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_left_padded_rows_are_what_generate_gives(family: str, seed: int) -> None:
    ids, mask = batch(seed=seed, width=30)
    ours = BatchGenerator(build(family), min_shared_tokens=4, page_size=8)
    expected = stock(ids, family, attention_mask=mask, max_new_tokens=7)
    got = ours.generate(input_ids=ids, attention_mask=mask, max_new_tokens=7)
    assert got.dtype == expected.dtype == torch.int64
    assert torch.equal(got, expected)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "both"])
def test_padding_on_the_right_does_not_get_into_the_text(family: str, side: str) -> None:
    left, left_mask = batch()
    ids, mask = batch(side=side)
    assert not torch.equal(ids, left)
    ours = BatchGenerator(build(family), min_shared_tokens=4)
    with pytest.warns(UserWarning, match=r"padded on the right.*model\.generate goes on from the padding"):
        got = ours.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5)
    expected = stock(left, family, attention_mask=left_mask, max_new_tokens=5)
    assert torch.equal(got, torch.cat([ids, expected[:, left.shape[1] :]], dim=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once, and of the right alone
        ours.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5)
        BatchGenerator(build(family)).generate(left, attention_mask=left_mask, max_new_tokens=5)


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 31},
        {"max_new_tokens": 9, "pad_token_id": 77},
        {"max_new_tokens": 9, "pad_token_id": None},
        {"max_new_tokens": 9, "min_new_tokens": 4},
        {"max_new_tokens": 9, "min_length": 30},
        {"max_new_tokens": 9, "min_length": 30, "min_new_tokens": 1},
        {"max_length": 33, "min_length": 27},
        {"max_new_tokens": 9, "min_length": 12},
        {"max_new_tokens": 4, "max_length": 20},
        {"return_dict_in_generate": True, "max_new_tokens": 4},
        {"generation_config": GenerationConfig(max_new_tokens=6, pad_token_id=9)},
        {"generation_config": GenerationConfig(max_length=29, return_dict_in_generate=True)},
    ],
    ids=str,
)
def test_lengths_and_fill_are_those_of_generate(
    generator: BatchGenerator, likely_eos: list[int], options: dict[str, Any]
) -> None:
    options = {"attention_mask": MASK, "eos_token_id": likely_eos, "pad_token_id": PAD, **options}
    if "generation_config" in options:
        del options["pad_token_id"]
    expected, got = stock(IDS, **options), generator.generate(IDS, **options)
    assert type(got) is type(expected)
    if isinstance(expected, GenerateDecoderOnlyOutput):
        expected, got = expected.sequences, got.sequences
    assert torch.equal(got, expected)


def test_without_a_length_twenty_tokens_capped_by_the_positions(
    generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="20 new tokens"):
        got = generator.generate(input_ids=IDS, attention_mask=MASK)
    assert torch.equal(got, stock(IDS, attention_mask=MASK)) and got.shape[1] == 26 + 20
    monkeypatch.setattr(build(FAMILY).config, "max_position_embeddings", 30)
    got = generator.generate(input_ids=IDS, attention_mask=MASK)  # no second warning
    assert torch.equal(got, stock(IDS, attention_mask=MASK)) and got.shape[1] == 30
    monkeypatch.setattr(build(FAMILY).config, "max_position_embeddings", 20)
    with pytest.raises(ValueError, match=r"26 tokens wide.*has 20 positions"):
        generator.generate(input_ids=IDS, attention_mask=MASK)


@pytest.mark.parametrize("pad", [PAD, None])
@pytest.mark.parametrize("eos", [None, PAD, 50])
def test_a_mask_that_is_not_passed_is_inferred_as_generate_infers_it(
    generator: BatchGenerator, pad: int | None, eos: int | None
) -> None:
    options = {"pad_token_id": pad, "eos_token_id": eos, "max_new_tokens": 5}
    assert torch.equal(generator.generate(IDS, **options), stock(IDS, **options))


@pytest.mark.parametrize("beams", [1, 2])
def test_where_generate_returns_its_cache_stands_that_there_is_none(generator: BatchGenerator, beams: int) -> None:
    options = {"attention_mask": MASK, "max_new_tokens": 3, "num_beams": beams, "return_dict_in_generate": True}
    options["pad_token_id"] = PAD
    expected, got = stock(IDS, **options), generator.generate(IDS, **options)
    assert list(got.keys()) == list(expected.keys()) and len(got.to_tuple()) == len(expected.to_tuple())
    *_, none = got.to_tuple()
    assert copy.deepcopy(got).keys() == pickle.loads(pickle.dumps(got)).keys() == got.keys()
    assert "no cache" in repr(copy.copy(none)) and "whole conversation" in str(pickle.loads(pickle.dumps(none)))
    assert not hasattr(none, "get_seq_length") and not isinstance(none, Cache)
    with pytest.raises(TypeError, match="whole conversation anew"):
        none[0]
    model: Any = build(FAMILY)
    longer = {"attention_mask": torch.cat([MASK, MASK[:, -1:]], dim=1), "past_key_values": none}
    with pytest.raises(UnsupportedOptionError, match="`past_key_values` is not supported: pass whole prompts"):
        generator.generate(IDS, **options, past_key_values=none)
    for given in (longer, {"past_key_values": none, "use_cache": False}, {"past_key_values": none, "num_beams": 3}):
        with pytest.raises(AttributeError, match="whole conversation anew"):
            model.generate(IDS, max_new_tokens=3, **given)
    with pytest.raises(AttributeError, match="whole conversation anew"):
        model(IDS[:, -1:], past_key_values=none)
    assert list(stock(IDS, **options, use_cache=False).keys()) == list(
        generator.generate(IDS, **options, use_cache=False).keys()
    )


def test_learned_positions_count_tokens_and_not_padding() -> None:
    generator = BatchGenerator(build("gpt2"))
    limit = generator.architecture.max_positions or 0
    ids, mask = torch.full((2, limit), 5), torch.zeros(2, limit, dtype=torch.long)
    mask[:, -9:] = 1
    got = generator.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(got[:, limit:], generator.generate(ids[:, :9], max_new_tokens=4)[:, 9:])
    mask[1, -limit + 2 :] = 1
    with pytest.raises(PromptError, match="learned") as caught:
        generator.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4)
    assert list(caught.value.problems) == [1]


def test_samples_stand_side_by_side_and_are_those_of_the_list(generator: BatchGenerator) -> None:
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6, "top_k": 0, "temperature": 2.0}
    options |= {"seed": 4, "eos_token_id": list(range(60, 75)), "pad_token_id": PAD}
    got = generator.generate(input_ids=IDS, attention_mask=MASK, **options)
    prompts = [row[row_mask.bool()].tolist() for row, row_mask in zip(IDS, MASK, strict=True)]
    listed = generator.generate(prompts, **options)
    assert torch.equal(got[:, :26], IDS.repeat_interleave(3, dim=0))
    assert len(got) == len(listed) == 18
    for row, generation in zip(got[:, 26:].tolist(), listed, strict=True):
        assert row == generation.token_ids + [PAD] * (len(row) - len(generation.token_ids))


# -- what may be passed ----------------------------------------------------------------------------------------


def test_names_types_and_kinds_of_masks(generator: BatchGenerator) -> None:
    expected = generator.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=3)
    for given in ({"prompts": IDS}, {"inputs": IDS}, {"input_ids": IDS, "inputs": None, "prompts": None}):
        assert torch.equal(generator.generate(**given, attention_mask=MASK, max_new_tokens=3), expected)
    for some in (IDS.int(), IDS.short(), IDS.to(torch.uint8), IDS.numpy(), IDS.numpy().astype(np.uint16)):
        for other in (MASK, MASK.bool(), MASK.float(), MASK.numpy(), MASK.numpy().astype(bool), MASK.int()):
            got = generator.generate(input_ids=some, attention_mask=other, max_new_tokens=3)
            assert isinstance(got, torch.Tensor) and got.dtype == torch.int64 and torch.equal(got, expected)
    strided = torch.empty(26, 6, dtype=torch.long).t().copy_(IDS)
    assert not strided.is_contiguous()
    assert torch.equal(generator.generate(strided, attention_mask=MASK, max_new_tokens=3), expected)


@pytest.mark.gpu
def test_ids_and_mask_may_lie_on_another_device_than_the_model() -> None:
    for device, other in (("cuda", "cpu"), ("cpu", "cuda")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that attention on a GPU is slow so far
            generator = BatchGenerator(copy.deepcopy(build(FAMILY)).to(device))  # type: ignore[arg-type]
        expected = generator.generate(IDS.to(device), attention_mask=MASK.to(device), max_new_tokens=3).cpu()
        for given in ({"attention_mask": MASK}, {"attention_mask": MASK.to(other)}, {"pad_token_id": PAD}):
            got = generator.generate(IDS.to(other), max_new_tokens=3, **given)
            assert got.device.type == other and torch.equal(got.cpu(), expected)


def test_the_tensors_passed_are_left_alone(generator: BatchGenerator) -> None:
    before, config = (IDS.clone(), MASK.clone()), GenerationConfig(max_length=30, min_length=28)
    fields = repr(vars(config))
    generator.generate(IDS, config, attention_mask=MASK).zero_()
    assert torch.equal(IDS, before[0]) and torch.equal(MASK, before[1])
    assert repr(vars(config)) == fields


def test_what_a_tokenizer_gives_can_be_unpacked_into_the_call(
    generator: BatchGenerator, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs = tokenizer(["w5 w6 w7 w8", "w9 w10"], return_tensors="pt", padding=True, return_token_type_ids=True)
    assert set(inputs) == {"input_ids", "token_type_ids", "attention_mask"}
    got = generator.generate(**inputs, max_new_tokens=4)
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(got, stock(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=4))
    assert torch.equal(generator.generate(**plain, max_new_tokens=4, labels=None), got)
    with pytest.raises(TypeError, match=r"unpack it, generate\(\*\*inputs"):
        generator.generate(inputs, max_new_tokens=4)
    with pytest.raises(UnsupportedOptionError, match="`token_type_ids` has no meaning to LlamaForCausalLM"):
        generator.generate(**plain, token_type_ids=torch.ones_like(inputs.input_ids), max_new_tokens=4)
    with pytest.raises(UnsupportedOptionError, match="would change what GPT2LMHeadModel computes"):
        BatchGenerator(build("gpt2")).generate(**inputs, max_new_tokens=4)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_every_mask_without_a_hole_is_read_and_every_other_is_named(width: int) -> None:
    masks = torch.tensor([[int(bit) for bit in f"{number:0{width}b}"] for number in range(2**width)])
    ids = torch.arange(2**width * width).reshape(-1, width)
    padded = take_padded(ids, {"attention_mask": masks})
    assert padded is not None
    prompts, problems = padded.unpadded(masks.bool(), vocab_size=2**width * width)
    for row, mask in enumerate(masks.tolist()):
        text = "".join(map(str, mask))
        if re.fullmatch("0*1+0*", text):
            assert prompts[row] is not None and row not in problems
            assert prompts[row].ids.tolist() == ids[row][masks[row].bool()].tolist()  # type: ignore[union-attr]
        elif "1" in text:
            hole = text.index("0", text.index("1"))
            assert prompts[row] is None and f"masked in its middle (column {hole} " in problems[row]
        else:
            assert prompts[row] is None and "all padding" in problems[row]


# -- what is refused -------------------------------------------------------------------------------------------


def test_every_bad_row_is_named(generator: BatchGenerator) -> None:
    ids, mask = torch.full((6, 5), 7), torch.ones(6, 5)
    mask[1] = 0
    mask[2, 3] = 0
    ids[3, 2] = 200
    ids[4, :2], mask[4, :2] = -100, 0  # padding may hold anything
    ids[5, 1] = -100
    with pytest.raises(PromptError) as caught:
        generator.generate(ids, attention_mask=mask, max_new_tokens=2)
    assert caught.value.problems == {
        1: "is all padding: it has no token to begin from",
        2: "is masked in its middle (column 3 of `attention_mask`): padding belongs at the ends of a row. "
        "Take those tokens out of `input_ids`",
        3: "has token id 200 in column 2, outside the model's vocabulary of 101",
        5: "has token id -100 in column 1; token ids are not negative",
    }
    with pytest.raises(PromptError, match="Is it padding") as caught:
        generator.generate(ids, max_new_tokens=2)
    assert list(caught.value.problems) == [3, 4, 5]
    ids = torch.tensor([[PAD, 5, PAD, 6], [5, 6, 7, 8], [PAD] * 4])
    with pytest.raises(PromptError) as caught:
        generator.generate(ids, max_new_tokens=2, pad_token_id=PAD)
    assert list(caught.value.problems) == [0, 2]
    assert "pad token between other tokens (column 2)" in caught.value.problems[0]


def test_streams_and_plans_take_lists(generator: BatchGenerator) -> None:
    for given in ({"prompts": IDS}, {"input_ids": IDS, "attention_mask": MASK}):
        with pytest.raises(ValueError, match=r"stream\(\) takes a list of prompts"):
            generator.stream(**given, max_new_tokens=2)
    with pytest.raises(TypeError, match="2-D tensor; a padded tensor goes to generate"):
        generator.plan(IDS)


# -- beside the result -----------------------------------------------------------------------------------------


def test_the_last_report_stays_within_reach(generator: BatchGenerator) -> None:
    fresh = BatchGenerator(build(FAMILY), min_shared_tokens=4)
    assert fresh.last_report is None
    fresh.generate(IDS, attention_mask=MASK, max_new_tokens=3)
    report = fresh.last_report
    assert report is not None
    assert (report.sequences, report.prompt_tokens, report.new_tokens) == (6, int(MASK.sum()), 18)
    assert 0 < report.saving < 1
    with pytest.raises(ValueError, match="max_new_tokens"):
        fresh.generate(IDS, max_new_tokens=0)
    assert fresh.last_report is None
    result = fresh.generate([[5, 6]], max_new_tokens=2)
    assert fresh.last_report is result.report
    streamed = fresh.stream([[5, 6], [7]], max_new_tokens=2)
    next(streamed)
    streamed.close()
    assert fresh.last_report is not None and fresh.last_report.sequences == 2


def test_an_interrupt_hands_over_what_had_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, TokenCollector, "collect", {7}, KeyboardInterrupt)
    # Rows do not wait for each other: some are finished before others begin.
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=16, scheduler=GroupScheduler())
    with pytest.raises(GenerationInterrupted) as caught:
        generator.generate(IDS, attention_mask=MASK, max_new_tokens=3)
    result = caught.value.result
    assert isinstance(result, BatchResult) and 0 < len(result) < 6
    for generation in result:
        assert generation.prompt_token_ids == IDS[generation.index][MASK[generation.index].bool()].tolist()


def test_rows_are_not_decoded(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tokenizer), "decode", lambda *args, **kwargs: pytest.fail("nobody asked for text"))
    BatchGenerator(build(FAMILY), tokenizer).generate(IDS, attention_mask=MASK, max_new_tokens=2)
