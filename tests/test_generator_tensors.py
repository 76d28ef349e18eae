"""Tensors in, tensors out: what ``model.generate`` takes and gives, down to shapes, padding and lengths."""

from __future__ import annotations

import copy
import pickle
import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build, family_params
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Cache, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation import GenerateDecoderOnlyOutput

from hf_batchllm import BatchGenerator, BatchResult, GenerationInterrupted, PromptError, UnsupportedOptionError
from hf_batchllm.engine.loop import Engine
from hf_batchllm.inputs.padded_batch import take_padded
from hf_batchllm.planning.scheduler import GroupScheduler

FAMILY = "llama"
PAD = 0
# Sliding windows, learned positions (OPT counts them from its mask), sinks, layer norms.
FAMILIES = family_params(["llama", "mistral", "gemma3", "gpt2", "opt", "gpt_oss", "biogpt"])


def batch(seed: int = 1, rows: int = 6, width: int = 26, side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, width]: rows share a beginning of some length; one of them fills the width."""
    rng = random.Random(seed)
    start = [rng.randrange(4, 97) for _ in range(width)]
    ids, mask = torch.full((rows, width), PAD), torch.zeros(rows, width, dtype=torch.long)
    for row in range(rows):
        length = width if row == 2 else rng.randint(1, width)
        shared = rng.randint(0, length)
        tokens = start[:shared] + [rng.randrange(4, 97) for _ in range(length - shared)]
        left = {"left": width - length, "right": 0, "both": (width - length) // 2}[side]
        ids[row, left : left + length] = torch.tensor(tokens)
        mask[row, left : left + length] = 1
    return ids, mask


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build(FAMILY), min_shared_tokens=4, page_size=8)


def stock(ids: torch.Tensor, family: str = FAMILY, **options: Any) -> Any:
    model: Any = build(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about lengths; ours are held against what comes out
        return model.generate(ids, **options)


@pytest.fixture
def likely_eos() -> list[int]:
    """EOS tokens that some rows of the batch meet sooner than others."""
    ids, mask = batch()
    new = stock(ids, attention_mask=mask, max_new_tokens=8)[:, ids.shape[1] :]
    return sorted({new[0, 1].item(), new[2, 5].item(), new[3, 3].item()}, reverse=True)


# -- as generate gives it --------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_left_padded_rows_are_what_generate_gives(family: str, seed: int) -> None:
    ids, mask = batch(seed, width=30)
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
    ids, mask = batch()
    options = {"attention_mask": mask, "eos_token_id": likely_eos, "pad_token_id": PAD, **options}
    if "generation_config" in options:
        del options["pad_token_id"]
    expected, got = stock(ids, **options), generator.generate(ids, **options)
    assert type(got) is type(expected)
    if isinstance(expected, GenerateDecoderOnlyOutput):
        expected, got = expected.sequences, got.sequences
    assert torch.equal(got, expected)


def test_without_a_length_twenty_tokens_capped_by_the_positions(
    generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = batch()
    with pytest.warns(UserWarning, match="20 new tokens"):
        got = generator.generate(input_ids=ids, attention_mask=mask)
    assert torch.equal(got, stock(ids, attention_mask=mask)) and got.shape[1] == 26 + 20
    monkeypatch.setattr(build(FAMILY).config, "max_position_embeddings", 30)
    got = generator.generate(input_ids=ids, attention_mask=mask)  # no second warning
    assert torch.equal(got, stock(ids, attention_mask=mask)) and got.shape[1] == 30
    monkeypatch.setattr(build(FAMILY).config, "max_position_embeddings", 20)
    with pytest.raises(ValueError, match=r"26 tokens wide.*has 20 positions"):
        generator.generate(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("pad", [PAD, None])
@pytest.mark.parametrize("eos", [None, PAD, 50])
def test_a_mask_that_is_not_passed_is_inferred_as_generate_infers_it(
    generator: BatchGenerator, pad: int | None, eos: int | None
) -> None:
    ids, _ = batch()
    options = {"pad_token_id": pad, "eos_token_id": eos, "max_new_tokens": 5}
    assert torch.equal(generator.generate(ids, **options), stock(ids, **options))


@pytest.mark.parametrize("beams", [1, 2])
def test_where_generate_returns_its_cache_stands_that_there_is_none(generator: BatchGenerator, beams: int) -> None:
    ids, mask = batch()
    options = {"attention_mask": mask, "max_new_tokens": 3, "num_beams": beams, "return_dict_in_generate": True}
    options["pad_token_id"] = PAD
    expected, got = stock(ids, **options), generator.generate(ids, **options)
    assert list(got.keys()) == list(expected.keys()) and len(got.to_tuple()) == len(expected.to_tuple())
    *_, none = got.to_tuple()
    assert copy.deepcopy(got).keys() == pickle.loads(pickle.dumps(got)).keys() == got.keys()
    assert "no cache" in repr(copy.copy(none)) and "whole conversation" in str(pickle.loads(pickle.dumps(none)))
    assert not hasattr(none, "get_seq_length") and not isinstance(none, Cache)
    with pytest.raises(TypeError, match="whole conversation anew"):
        none[0]
    model: Any = build(FAMILY)
    longer = {"attention_mask": torch.cat([mask, mask[:, -1:]], dim=1), "past_key_values": none}
    with pytest.raises(UnsupportedOptionError, match="`past_key_values` is not supported: pass whole prompts"):
        generator.generate(ids, **options, past_key_values=none)
    for given in (longer, {"past_key_values": none, "use_cache": False}, {"past_key_values": none, "num_beams": 3}):
        with pytest.raises(AttributeError, match="whole conversation anew"):
            model.generate(ids, max_new_tokens=3, **given)
    with pytest.raises(AttributeError, match="whole conversation anew"):
        model(ids[:, -1:], past_key_values=none)
    assert list(stock(ids, **options, use_cache=False).keys()) == list(
        generator.generate(ids, **options, use_cache=False).keys()
    )


def test_learned_positions_count_tokens_and_not_padding() -> None:
    model = build("gpt2")
    generator = BatchGenerator(model)
    limit = generator.architecture.max_positions
    assert limit is not None
    ids, mask = torch.full((2, limit), 5), torch.zeros(2, limit, dtype=torch.long)
    mask[:, -9:] = 1
    got = generator.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(got[:, limit:], generator.generate(ids[:, :9], max_new_tokens=4)[:, 9:])
    mask[1, -limit + 2 :] = 1
    with pytest.raises(PromptError, match="learned") as caught:
        generator.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4)
    assert list(caught.value.problems) == [1]


def test_samples_stand_side_by_side_and_are_those_of_the_list(generator: BatchGenerator) -> None:
    ids, mask = batch()
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6, "top_k": 0, "temperature": 2.0}
    options |= {"seed": 4, "eos_token_id": list(range(60, 75)), "pad_token_id": PAD}
    got = generator.generate(input_ids=ids, attention_mask=mask, **options)
    prompts = [row[row_mask.bool()].tolist() for row, row_mask in zip(ids, mask, strict=True)]
    listed = generator.generate(prompts, **options)
    assert torch.equal(got[:, :26], ids.repeat_interleave(3, dim=0))
    assert len(got) == len(listed) == 18
    for row, generation in zip(got[:, 26:].tolist(), listed, strict=True):
        assert row == generation.token_ids + [PAD] * (len(row) - len(generation.token_ids))


# -- what may be passed ----------------------------------------------------------------------------------------


def test_names_types_and_kinds_of_masks(generator: BatchGenerator) -> None:
    ids, mask = batch()
    expected = generator.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3)
    for given in ({"prompts": ids}, {"inputs": ids}, {"input_ids": ids, "inputs": None, "prompts": None}):
        assert torch.equal(generator.generate(**given, attention_mask=mask, max_new_tokens=3), expected)
    for some in (ids.int(), ids.short(), ids.to(torch.uint8), ids.numpy(), ids.numpy().astype(np.uint16)):
        for other in (mask, mask.bool(), mask.float(), mask.numpy(), mask.numpy().astype(bool), mask.int()):
            got = generator.generate(input_ids=some, attention_mask=other, max_new_tokens=3)
            assert isinstance(got, torch.Tensor) and got.dtype == torch.int64 and torch.equal(got, expected)
    strided = torch.empty(26, 6, dtype=torch.long).t().copy_(ids)
    assert not strided.is_contiguous()
    assert torch.equal(generator.generate(strided, attention_mask=mask, max_new_tokens=3), expected)


@pytest.mark.gpu
def test_ids_and_mask_may_lie_on_another_device_than_the_model() -> None:
    ids, mask = batch()
    for device, other in (("cuda", "cpu"), ("cpu", "cuda")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that attention on a GPU is slow so far
            generator = BatchGenerator(copy.deepcopy(build(FAMILY)).to(device))  # type: ignore[arg-type]
        expected = generator.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=3).cpu()
        for given in ({"attention_mask": mask}, {"attention_mask": mask.to(other)}, {"pad_token_id": PAD}):
            got = generator.generate(ids.to(other), max_new_tokens=3, **given)
            assert got.device.type == other and torch.equal(got.cpu(), expected)


def test_the_tensors_passed_are_left_alone(generator: BatchGenerator) -> None:
    ids, mask = batch()
    before = ids.clone(), mask.clone()
    config = GenerationConfig(max_length=30, min_length=28)
    fields = repr(vars(config))
    got = generator.generate(ids, config, attention_mask=mask)
    got.zero_()
    assert torch.equal(ids, before[0]) and torch.equal(mask, before[1])
    assert repr(vars(config)) == fields


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w2", pad_token="w0", padding_side="left")


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

IDS, MASK = batch()


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"prompts": IDS, "input_ids": IDS}, ValueError, "`prompts` and `input_ids` were passed together"),
        ({"prompts": [[5, 6]], "input_ids": IDS}, ValueError, "`prompts` and `input_ids` were passed together"),
        ({"inputs": IDS, "input_ids": IDS}, ValueError, "`input_ids` and `inputs` were passed together"),
        ({"attention_mask": MASK}, ValueError, "`attention_mask` was passed without `input_ids`"),
        ({"prompts": [[5, 6], [7]], "attention_mask": MASK}, ValueError, "the prompts are a list: leave out"),
        ({"prompts": "w5", "attention_mask": MASK}, ValueError, "the prompts are a list: leave out"),
        ({"input_ids": IDS[0]}, ValueError, r"not shape \[26\]: for a batch of one row pass input_ids\[None\]"),
        ({"prompts": IDS[None]}, ValueError, r"`prompts` must have two dimensions.*not shape \[1, 6, 26\]"),
        ({"input_ids": IDS[:0]}, ValueError, r"`input_ids` is empty: its shape is \[0, 26\]"),
        ({"input_ids": IDS[:, :0]}, ValueError, r"`input_ids` is empty: its shape is \[6, 0\]"),
        ({"input_ids": IDS.tolist()}, TypeError, r"not list: pass lists and strings as prompts"),
        ({"input_ids": "some text"}, TypeError, r"not str: pass lists and strings as prompts"),
        ({"input_ids": {1, 2}}, TypeError, r"must be a 2-D tensor of token ids, not set"),
        ({"input_ids": IDS.float()}, TypeError, r"`input_ids` holds torch.float32; token ids are integers"),
        ({"input_ids": IDS.bool()}, TypeError, r"`input_ids` holds torch.bool; token ids are integers"),
        ({"input_ids": IDS.double().numpy()}, TypeError, r"`input_ids` holds float64; token ids are integers"),
        ({"prompts": np.array([["a", "b"]])}, TypeError, r"`prompts` holds <U1; token ids are integers"),
        ({"input_ids": IDS.to("meta")}, ValueError, "`input_ids` is on the meta device"),
        ({"input_ids": IDS, "attention_mask": MASK.to("meta")}, ValueError, "`attention_mask` is on the meta device"),
        ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, ValueError, r"shape \[6, 25\] and `input_ids` \[6, 26\]"),
        ({"input_ids": IDS, "attention_mask": MASK[0]}, ValueError, r"has shape \[26\] and"),
        ({"input_ids": IDS, "attention_mask": MASK[:1]}, ValueError, r"has shape \[1, 26\] and"),
        ({"input_ids": IDS, "attention_mask": MASK[:, None, None]}, ValueError, r"shape \[6, 1, 1, 26\] and"),
        ({"input_ids": IDS, "attention_mask": MASK.tolist()}, TypeError, "`attention_mask` must be a 2-D tensor"),
        ({"input_ids": IDS, "attention_mask": MASK * 2}, ValueError, "holds 2: 1 marks a token and 0 padding"),
        ({"input_ids": IDS, "attention_mask": MASK.float() - 1}, ValueError, "holds -1.0: 1 marks a token"),
        ({"input_ids": IDS, "attention_mask": MASK, "max_length": 26}, ValueError, "26 tokens wide, padding included"),
        ({"input_ids": IDS, "max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"input_ids": IDS, "num_return_sequences": 2}, ValueError, "num_return_sequences"),
        ({"input_ids": IDS, "on_error": "record"}, ValueError, "a tensor has no place for an error"),
        ({"input_ids": IDS, "output_attentions": True}, UnsupportedOptionError, "`output_attentions`"),
        ({"input_ids": IDS, "output_hidden_states": True}, UnsupportedOptionError, "`output_hidden_states`"),
        ({"inputs_embeds": torch.zeros(1, 2, 48)}, UnsupportedOptionError, "`inputs_embeds` is not supported"),
        ({"input_ids": IDS, "position_ids": IDS}, UnsupportedOptionError, "`position_ids`"),
        ({"input_ids": IDS, "past_key_values": object()}, UnsupportedOptionError, "`past_key_values`"),
        ({"input_ids": IDS, "atention_mask": MASK}, UnsupportedOptionError, "did you mean `attention_mask`"),
        ({"prompts": [[5, 6]], "token_type_ids": [[0, 0]]}, UnsupportedOptionError, "`token_type_ids`"),
        ({"prompts": [[5]], "return_dict_in_generate": True}, UnsupportedOptionError, r"goes with tensors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_said_in_the_callers_words(
    generator: BatchGenerator, given: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        generator.generate(**({"max_new_tokens": 4} if "max_length" not in given else {}) | given)


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
    ids, mask = batch()
    fresh.generate(ids, attention_mask=mask, max_new_tokens=3)
    report = fresh.last_report
    assert report is not None
    assert (report.sequences, report.prompt_tokens, report.new_tokens) == (6, int(mask.sum()), 18)
    assert 0 < report.saving < 1
    with pytest.raises(ValueError, match="max_new_tokens"):
        fresh.generate(ids, max_new_tokens=0)
    assert fresh.last_report is None
    result = fresh.generate([[5, 6]], max_new_tokens=2)
    assert fresh.last_report is result.report
    streamed = fresh.stream([[5, 6], [7]], max_new_tokens=2)
    next(streamed)
    streamed.close()
    assert fresh.last_report is not None and fresh.last_report.sequences == 2


def test_an_interrupt_hands_over_what_had_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = Engine.collect

    def interrupted(self: Engine, *args: Any) -> Any:
        if self.steps > 6:
            raise KeyboardInterrupt
        return collect(self, *args)

    monkeypatch.setattr(Engine, "collect", interrupted)
    ids, mask = batch()
    # Rows do not wait for each other: some are finished before others begin.
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=16, scheduler=GroupScheduler())
    with pytest.raises(GenerationInterrupted) as caught:
        generator.generate(ids, attention_mask=mask, max_new_tokens=3)
    result = caught.value.result
    assert isinstance(result, BatchResult) and 0 < len(result) < 6
    for generation in result:
        assert generation.prompt_token_ids == ids[generation.index][mask[generation.index].bool()].tolist()


def test_rows_are_not_decoded(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tokenizer), "decode", lambda *args, **kwargs: pytest.fail("nobody asked for text"))
    BatchGenerator(build(FAMILY), tokenizer).generate(IDS, attention_mask=MASK, max_new_tokens=2)
