"""What a call hands out: a streamer is told what ``generate`` tells it, in the same order; and lists of token ids."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_calls import answers
from support_device_loop import device as device  # a fixture
from support_families import build
from support_kernels import plain
from support_letter_tokenizers import letter_tokenizer
from transformers import TextIteratorStreamer, TextStreamer

from hf_batchllm import BatchGenerator, accelerated
from hf_batchllm.engine.id_lists import IdLists
from hf_batchllm.errors import OptionValueError

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]
FAMILY = "llama"
PROMPT = [5, 6, 7, 8, 9]
TOKENIZER = letter_tokenizer()


class Recorder:
    def __init__(self, breaks_at: int | None = None) -> None:
        self.told: list[Any] = []
        self.breaks_at = breaks_at

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        if len(self.told) == self.breaks_at:
            raise ZeroDivisionError("no more paper")
        self.told.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.told.append("end")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [85, 93, 13], "pad_token_id": 0},
    {"stop_strings": ["abc", "eb", "ffa"], "tokenizer": TOKENIZER},
    {"stopping_criteria": [lambda ids, scores: ids.shape[1] > 12]},
    {"max_new_tokens": 1},
]


@pytest.mark.some_cases
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "length"))
def test_a_streamer_is_told_what_generate_tells_it(options: dict[str, Any]) -> None:
    padded = {"input_ids": torch.tensor([[0, 0, *PROMPT]]), "attention_mask": torch.tensor([[0, 0] + [1] * 5])}
    options = {"max_new_tokens": 20, **options}
    for inputs in ({"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 5).long()}, padded):
        expected, got = Recorder(), Recorder()
        tokens = build(FAMILY).generate(**inputs, streamer=expected, **options)
        with BatchGenerator(build(FAMILY)) as generator:
            assert torch.equal(generator.generate(**inputs, streamer=got, **options), tokens)
            assert got.told == expected.told and got.told[-1] == "end"
            if inputs is not padded:
                for run in (generator.generate, generator.stream):
                    listed = Recorder()
                    (generation,) = run([PROMPT], streamer=listed, **options)
                    assert listed.told == expected.told
                    assert generation.token_ids == tokens[0, 5:].tolist()


@pytest.mark.parametrize("steps", [1, 8])
def test_tokens_of_bursts_come_in_order(steps: int, device: str) -> None:
    recorder, model = Recorder(), build(FAMILY)
    if device != "cpu":
        model = torch.nn.Module.to(copy.deepcopy(model), device)
    given = {"max_new_tokens": 30, "streamer": recorder, "stopping_criteria": [_fifteen]}
    result = answers(model, [PROMPT], {"steps_per_sync": steps}, **given)
    assert len(result[0].token_ids) == 15
    each = [(torch.long, [token]) for token in result[0].token_ids]
    assert recorder.told == [(torch.long, [PROMPT]), *each, "end"]


def _fifteen(ids: torch.Tensor, scores: Any, **rest: Any) -> bool:
    return ids.shape[1] == len(PROMPT) + 15


def test_text_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchGenerator(build(FAMILY), TOKENIZER) as generator:
        result = generator.generate([PROMPT], max_new_tokens=12, streamer=TextStreamer(TOKENIZER, skip_prompt=True))
        assert capsys.readouterr().out.strip() == result[0].text
        streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
        call = {"max_new_tokens": 12, "streamer": streamer}
        thread = threading.Thread(target=generator.generate, args=([PROMPT],), kwargs=call)
        thread.start()
        assert "".join(streamer) == result[0].text
        thread.join()


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_streamer_that_breaks(at: int) -> None:
    recorder = Recorder(breaks_at=at)
    with BatchGenerator(build(FAMILY)) as generator:
        with pytest.raises(ZeroDivisionError, match="no more paper"):
            generator.generate([PROMPT], max_new_tokens=12, streamer=recorder)
        assert len(recorder.told) == at
        assert len(generator.generate([PROMPT], max_new_tokens=12)[0].token_ids) == 12


def test_who_waits_for_a_streamer_is_told_of_an_end_when_the_time_is_over_and_when_a_prompt_cannot_be_run() -> None:
    recorder = Recorder()
    answers(FAMILY, [PROMPT], max_new_tokens=12, max_time=-1, streamer=recorder)
    assert recorder.told == [(torch.long, [PROMPT]), "end"]


class NoAttention(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_model_that_its_first_step_shows_to_be_unsupported_tells_the_prompt_once() -> None:
    model = copy.deepcopy(build(FAMILY))
    model.model.layers[2].self_attn = NoAttention()
    expected, got = Recorder(), Recorder()
    ids = torch.tensor([PROMPT])
    model.generate(ids, max_new_tokens=4, streamer=expected)
    with accelerated(model), pytest.warns(UserWarning, match="not accelerated, .* attends 2 times"):
        model.generate(ids, max_new_tokens=4, streamer=got)
    assert got.told == expected.told


def test_one_sequence_at_a_time() -> None:
    sampled = {"do_sample": True, "num_return_sequences": 2}
    with BatchGenerator(build(FAMILY)) as generator:
        for prompts, options in (([PROMPT, PROMPT], {}), ([PROMPT], sampled)):
            with pytest.raises(OptionValueError, match="`streamer` goes with one prompt, and here are 2 sequences"):
                generator.generate(prompts, streamer=Recorder(), max_new_tokens=2, **options)
        with pytest.raises(OptionValueError, match=r"goes with one prompt.*gen.stream\(\) gives each"):
            generator.generate(input_ids=torch.tensor([PROMPT, PROMPT]), streamer=Recorder(), max_new_tokens=2)
        with pytest.raises(OptionValueError, match=r"`streamer` must have put\(\) and end\(\), and is a list"):
            generator.generate([PROMPT], streamer=[], max_new_tokens=2)


# -- lists of token ids: right, and each the user's own, whatever neighbours have in common -------------------


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20))
def test_each_list_has_its_ids_and_is_the_users_own(prompts: list[list[int]]) -> None:
    lists = IdLists()
    for prompt in prompts:
        made = lists.of(np.array(prompt, dtype=np.int32))
        assert made == prompt and all(type(token) is int for token in made)
        made.clear()  # the next ones do not notice


def test_a_common_beginning_is_made_once() -> None:
    lists = IdLists()
    first, second = (lists.of(np.array([1000, 2000, 3000, last], dtype=np.int32)) for last in (4000, 5000))
    assert [one is other for one, other in zip(first, second, strict=True)] == [True, True, True, False]
