"""``accelerated(model)``: ``model.generate`` gives what it gave, or its original does, and says why."""

from __future__ import annotations

import itertools
import random
import re
import threading
import warnings
from typing import Any

import pytest
import torch
from support_accelerated import TEXTS, accelerated_throughout, beyond_eight, reasons, same
from support_accelerated import inputs as inputs  # fixtures
from support_accelerated import model as model
from support_accelerated import tokenizer as tokenizer
from support_letter_tokenizers import letter_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
    set_seed,
)
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
)

from hf_batchllm import GenerationInterrupted, GeneratorBusyError, accelerated
from hf_batchllm.errors import UnsupportedModelError
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.sampling.host_sampler import HostSampler

# -- the examples of transformers' documentation ---------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 6},
        {"max_new_tokens": 6, "return_dict_in_generate": True},
        {"max_length": 12},
        {"generation_config": GenerationConfig(max_new_tokens=5, eos_token_id=[7, 8, 9], pad_token_id=1)},
        {"max_new_tokens": 5, "use_cache": False, "num_beams": 1, "logits_processor": LogitsProcessorList()},
        {"max_new_tokens": 5, "do_sample": False, "streamer": None, "synced_gpus": False, "stopping_criteria": []},
        {"max_new_tokens": 8, "eos_token_id": list(range(30)), "pad_token_id": 99, "min_new_tokens": 2},
        {"max_new_tokens": 4, "cache_implementation": "dynamic", "foo": None},
    ],
    ids=str,
)
def test_batches_come_out_the_same(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    expected = model.generate(**inputs, **options)
    with accelerated_throughout(model):
        assert same(model.generate(**inputs, **options), expected)
        assert model.generate.last_report.sequences == 3


def test_positional_arguments_stand_where_they_stand_in_generate(model: Any, inputs: dict[str, Any]) -> None:
    ids, config = inputs["input_ids"], GenerationConfig(max_new_tokens=4, pad_token_id=0)
    expected = model.generate(ids, config, None, None)
    with accelerated_throughout(model):
        assert same(model.generate(ids, config, None, None), expected)
        assert same(model.generate(ids[:1], generation_config=config), model.generate(inputs=ids[:1], max_new_tokens=4))
    assert config == GenerationConfig(max_new_tokens=4, pad_token_id=0)


def test_a_chat(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "w30 w31"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert inputs["input_ids"].tolist() == [[3, 30, 31, 4]]
    expected = model.generate(**inputs, max_new_tokens=5)
    with accelerated_throughout(model):
        got = model.generate(**inputs, max_new_tokens=5)
        assert same(got, expected)
        assert tokenizer.decode(got[0, inputs["input_ids"].shape[1] :])


def test_sampling_repeats_and_draws_once(model: Any, inputs: dict[str, Any]) -> None:
    options = {"do_sample": True, "max_new_tokens": 6, "top_k": 0, "num_return_sequences": 2}
    with accelerated_throughout(model):
        set_seed(42)
        first = model.generate(**inputs, **options)
        second = model.generate(**inputs, **options)
        assert not torch.equal(first, second)
        assert first[:, :6].tolist() == inputs["input_ids"].repeat_interleave(2, dim=0).tolist()
        set_seed(42)
        assert same(model.generate(**inputs, **options), first)
        after = torch.get_rng_state()
        set_seed(42)
        torch.randint(2**63 - 1, ())
        assert torch.equal(after, torch.get_rng_state())
        model.generate(**inputs, max_new_tokens=2)
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("options", [{"return_full_text": False}, {"return_full_text": True}, {"return_tensors": True}])
def test_a_pipeline_over_texts_and_chats(
    model: Any, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any]
) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    for given in (TEXTS, chats, TEXTS[0], chats[0]):
        call = {"batch_size": 3, "max_new_tokens": 4, "do_sample": False, **options}
        expected = pipe(given, **call)
        with accelerated_throughout(model):
            assert pipe(given, **call) == expected


def test_streamers(model: Any, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=5)
    with accelerated_throughout(model):
        got = model.generate(**inputs, max_new_tokens=5, streamer=TextStreamer(tokenizer))
        assert same(got, expected)
        assert capsys.readouterr().out.split() == tokenizer.decode(expected[0]).split()
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        thread = threading.Thread(target=model.generate, kwargs={**inputs, "streamer": streamer, "max_new_tokens": 5})
        thread.start()
        assert "".join(streamer).split() == tokenizer.decode(expected[0, 6:]).split()
        thread.join()


def test_streamers_of_several_rows_are_fed_by_the_original(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    class Several(BaseStreamer):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.told.append(value.tolist())

        def end(self) -> None:
            self.told.append("end")

    ids, expected, got = torch.tensor([[5, 6, 7], [9, 5, 6]]), Several(), Several()
    model.generate(ids, max_new_tokens=3, streamer=expected)
    with reasons() as said, accelerated(model):
        model.generate(ids, max_new_tokens=3, streamer=got)
        with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
            model.generate(ids, max_new_tokens=3, streamer=TextStreamer(tokenizer))
    assert got.told == expected.told
    assert len(said) == 1 and said[0].startswith("`streamer` goes with one prompt")


@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [beyond_eight]},
        {"stopping_criteria": [MaxLengthCriteria(9)], "max_new_tokens": 30},
        {"stop_strings": ["dd", "ab"], "eos_token_id": 99, "pad_token_id": 0},
        {"stop_strings": ["dd", "ab"]},
    ],
    ids=" ".join,
)
def test_ends_of_one_row(model: Any, options: dict[str, Any]) -> None:
    options = {"tokenizer": letter_tokenizer(), "max_new_tokens": 20, **options}
    for ids in ([[5, 6, 7, 8]], [[0, 0, 5, 6]]):
        given = {"inputs": torch.tensor(ids), "attention_mask": torch.tensor(ids).ne(0).long()}
        expected = model.generate(**given, **options)
        with accelerated_throughout(model):
            assert same(model.generate(**given, **options), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": ["dd", "ab"]},
        {"stopping_criteria": [MaxLengthCriteria(9)]},
        {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(list(range(30)))]), "max_time": 1000.0},
    ],
    ids=" ".join,
)
def test_ends_of_several_rows(model: Any, options: dict[str, Any]) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [30, 31, 32, 33]])
    options = {"tokenizer": letter_tokenizer(), "eos_token_id": 99, "pad_token_id": 0, "max_new_tokens": 20, **options}
    expected = model.generate(ids, **options)
    with accelerated_throughout(model):
        assert same(model.generate(ids, **options), expected)


# -- what goes to the original ---------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore:there are hooks on")
@pytest.mark.parametrize("error", [ValueError("a hook's"), TypeError("a hook's"), RuntimeError("none left")])
@pytest.mark.parametrize("step", [1, 3])
def test_an_error_in_the_midst_of_the_work_comes_out(
    model: Any, inputs: dict[str, Any], error: Exception, step: int
) -> None:
    passes = 0

    def hook(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == step:
            raise error

    expected = model.generate(**inputs, max_new_tokens=5)
    with accelerated_throughout(model):
        handle = model.lm_head.register_forward_pre_hook(hook)
        try:
            with pytest.raises(type(error), match=str(error)):
                model.generate(**inputs, max_new_tokens=5)
        finally:
            handle.remove()
        assert passes == step  # the original has not been tried
        assert same(model.generate(**inputs, max_new_tokens=5), expected)


def test_an_interrupt_comes_out(model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "step", interrupted)
    with accelerated(model), pytest.raises(GenerationInterrupted) as caught:
        model.generate(**inputs, max_new_tokens=5)
    assert not caught.value.caller_has_generator  # that a notebook could name
    assert "generate" not in vars(model)


def test_an_interrupt_names_no_generator_that_the_user_has_not(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = ModelRunner.step, itertools.count()

    def interrupted(self: ModelRunner, *args: Any) -> Any:
        if next(steps) == 5:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(ModelRunner, "step", interrupted)
    ids = torch.tensor([[5, 6], [7, 8], [9, 10], [11, 12]])
    options = {"max_new_tokens": 6, "eos_token_id": list(range(0, 97, 3)), "pad_token_id": 0}
    with accelerated(model, max_batch_tokens=2), pytest.raises(GenerationInterrupted) as caught:
        model.generate(ids, **options)
    said, where = caught.value._render_traceback_()
    assert re.fullmatch(r"GenerationInterrupted: interrupted: [1-3] of 4 sequences had finished", said)
    assert where.startswith("Their results are in `sys.last_value.result` until the next error. They are not aligned")


def test_a_hook_that_generates_with_the_same_model_is_told_so(model: Any, inputs: dict[str, Any]) -> None:
    def hook(*_: Any) -> None:
        model.generate(torch.tensor([[5]]), max_new_tokens=1)

    with accelerated(model):
        handle = model.lm_head.register_forward_pre_hook(hook)
        try:
            with pytest.raises(GeneratorBusyError, match="from within a step"):
                model.generate(**inputs, max_new_tokens=5)
        finally:
            handle.remove()
        with accelerated_throughout(model):
            model.generate(**inputs, max_new_tokens=5)


def test_between_two_steps_the_original_serves(
    model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[5, 6]])
    expected, whole = model.generate(ids, max_new_tokens=3), model.generate(**inputs, max_new_tokens=4)
    pick, found = HostSampler.without_waiting, []

    def curious(self: HostSampler, *args: Any) -> Any:
        found.append(model.generate(ids, max_new_tokens=3))
        return pick(self, *args)

    monkeypatch.setattr(HostSampler, "without_waiting", curious)
    with reasons() as said, accelerated(model):
        assert same(model.generate(**inputs, max_new_tokens=4), whole)
    assert len(said) == 1 and said[0].startswith("a call is running already")
    assert len(found) == 4 and all(same(one, expected) for one in found)


def test_threads_take_turns(model: Any) -> None:
    rng = random.Random(3)
    calls: list[dict[str, Any]] = [
        {"inputs": torch.tensor([[rng.randrange(4, 97) for _ in range(9)] for _ in range(3)]), "max_new_tokens": 5}
        | ({"num_beams": 2} if index % 3 == 2 else {})
        for index in range(9)
    ]
    expected = [model.generate(**call) for call in calls]
    outcomes: list[bool] = []

    def job(offset: int) -> None:
        for index in range(9):
            place = (index + offset) % 9
            outcomes.append(same(model.generate(**calls[place]), expected[place]))

    with warnings.catch_warnings(), accelerated(model):
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=job, args=(offset,)) for offset in (0, 2, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == [True] * 27


def test_a_block_that_is_thrown_away_says_how_to_use_it(model: Any) -> None:
    with pytest.warns(UserWarning, match=r"does nothing by itself: write `with accelerated\(model\):`") as said:
        accelerated(model)
    assert [each.filename for each in said] == [__file__]

    @accelerated(model)
    def decorated() -> Any:
        return model.last_report

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decorated() is None
        with accelerated(model) as inside:
            assert inside is model
        with pytest.raises(UnsupportedModelError), accelerated(torch.nn.Linear(2, 2)):
            pass


# -- a real model ----------------------------------------------------------------------------------------------
