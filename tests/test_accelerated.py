"""``accelerated(model)``: ``model.generate`` gives what it gave, or its original does, and says why."""

from __future__ import annotations

import importlib.util
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, REFUSED
from letters import letter_tokenizer
from stand_in import TEXTS, accelerated_throughout, reasons, same
from stand_in import inputs as inputs  # fixtures
from stand_in import model as model
from stand_in import tokenizer as tokenizer
from torch import nn
from transformers import (
    DynamicCache,
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
    ConfidenceCriteria,
    EosTokenCriteria,
    PrefixConstrainedLogitsProcessor,
    utils,
)

from hf_batchllm import (
    GenerationInterrupted,
    GeneratorBusyError,
    accelerated,
)
from hf_batchllm.runner import ModelRunner
from hf_batchllm.sampling import Sampler

# -- the examples of transformers' documentation ---------------------------------------------------------------


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


def _eight(ids: torch.Tensor, scores: Any) -> bool:
    return ids.shape[1] > 8


@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [_eight]},
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


def _take_two(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.cat([input_ids, input_ids[:, :2]], dim=1)


FALLBACKS: dict[str, dict[str, Any]] = {
    "`num_beams`": {"num_beams": 2},
    "`stopping_criteria` has a function, which": {"stopping_criteria": [_eight], "pad_token_id": 0},
    "`stopping_criteria` has a ConfidenceCriteria": {  # it looks at the first row, and ends all
        "stopping_criteria": [ConfidenceCriteria(0.3)],
        "eos_token_id": 99,
        "pad_token_id": 0,
        "output_scores": True,
        "return_dict_in_generate": True,
    },
    "`stopping_criteria` has a StoppingCriteriaList": {
        "stopping_criteria": [StoppingCriteriaList([_eight])],
        "eos_token_id": 99,
        "pad_token_id": 0,
    },
    "`logits_processor` has a PrefixConstrainedLogitsProcessor": {
        "logits_processor": [PrefixConstrainedLogitsProcessor(lambda row, ids: [20 + row, 40 + row], 1)]
    },
    "`prefix_allowed_tokens_fn` is called by `generate` with rows as they are padded": {
        "inputs": torch.tensor([[0, 0, 5, 6], [9, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        "prefix_allowed_tokens_fn": lambda row, ids: [20 + len(ids) + row],
    },
    "`logits_processor` is called by `generate` with rows as they are padded": {
        "inputs": torch.tensor([[0, 0, 5, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1]]),
        "logits_processor": [lambda ids, scores: scores.roll(ids.shape[1], dims=-1)],
    },
    "`stop_strings` ends rows one by one": {
        "stop_strings": ["ab", "c"],
        "tokenizer": letter_tokenizer(),
        "pad_token_id": 0,
    },
    "`logits_processor`": {"logits_processor": [lambda ids, scores: -scores]},
    "`past_key_values`": {"past_key_values": lambda: DynamicCache()},
    "`custom_generate`": {"custom_generate": lambda: _take_two},
    "`trust_remote_code`": {"trust_remote_code": True},
    "`inputs_embeds`": {"inputs_embeds": torch.ones(2, 3, 48) / 9, "inputs": None, "attention_mask": None},
    "`position_ids`": {"position_ids": torch.arange(4)[None]},
    "`logits_to_keep` is an input of Gemma3ForCausalLM": {"logits_to_keep": 1},
    "row 0: is masked in its middle": {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])},
    "there are no `input_ids`": {"inputs": None, "bos_token_id": 3},
    "`max_new_tokens` must be a whole number": {"max_new_tokens": 2.5},
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_is_not_supported_goes_to_the_original_and_says_why_once(model: Any, reason: str) -> None:
    def arguments() -> dict[str, Any]:
        given = {"inputs": torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]]), "max_new_tokens": 4, **FALLBACKS[reason]}
        lookup = given.pop("past_key_values", None), given.pop("custom_generate", None)
        made = dict(zip(("past_key_values", "custom_generate"), lookup, strict=True))
        return given | {name: make() for name, make in made.items() if make is not None}

    expected = model.generate(**arguments())
    with reasons() as said:
        with accelerated(model):
            for _ in range(2):
                assert same(model.generate(**arguments()), expected)
            assert model.generate.last_report is None
        with accelerated(model):
            model.generate(**arguments())
    assert len(said) == 2 and said[0] == said[1] and said[0].startswith(reason)  # once in each block


def test_sharded_models_run_in_step_as_transformers_has_them(
    model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.generate(**inputs, max_new_tokens=3)
    monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda module: True)
    monkeypatch.setattr(utils, "_get_torch_distributed_world_size", lambda: 2)
    monkeypatch.setattr(type(model), "_has_unfinished_sequences", lambda self, finished, *_, **__: not finished)
    with reasons() as said, accelerated(model):
        assert same(model.generate(**inputs, max_new_tokens=3), expected)
    assert len(said) == 1 and said[0].startswith("`synced_gpus`")


def test_continuous_batching_is_left_to_transformers(model: Any, inputs: dict[str, Any]) -> None:
    model.generate = lambda **kwargs: "batched"
    try:
        with reasons() as said, accelerated(model):
            assert model.generate(**inputs, cache_implementation="paged") == "batched"
    finally:
        del model.generate
    assert said == ['`cache_implementation` is "paged": transformers\' own continuous batching']


def test_each_reason_is_told_apart(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]])
    hole = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    with reasons() as said, accelerated(model):
        for beams in (2, 3):
            model.generate(ids, num_beams=beams, max_new_tokens=2)
        for mask in (hole, hole.flip(0), hole.roll(1, dims=1)):
            model.generate(ids, attention_mask=mask, max_new_tokens=2)
        model.generate(ids, attention_mask=hole & hole.flip(0), max_new_tokens=2)
    assert len(said) == 3
    assert said[0].startswith("`num_beams`") and said[1].startswith("row 0: is masked")
    assert said[2].endswith("(and so for 1 more)")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 0},
        {"num_return_sequences": 2},
        {"max_length": 4, "max_new_tokens": None},
        {"do_sample": True, "temperature": 0.0},
        {"seed": 3},
        {"prompts": [[5]]},
        {"input_ids": torch.tensor([[5, 6]])},
        {"inputs": torch.tensor([5, 6])},
        {"inputs": [[5, 6]]},
        {"inputs": torch.tensor([[5.0, 6.0]])},
        {"inputs": None},
        {"stopping_criteria": lambda *_: []},
        {"generation_config": {"max_new_tokens": 4}},
    ],
    ids=" ".join,
)
def test_errors_of_generate_are_its_own(model: Any, arguments: dict[str, Any]) -> None:
    arguments = {"inputs": torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]]), "max_new_tokens": 4, **arguments}
    with pytest.raises(Exception) as expected:  # noqa: PT011
        model.generate(**arguments)
    with reasons() as said, accelerated(model), pytest.raises(type(expected.value)) as got:
        model.generate(**arguments)
    assert str(got.value) == str(expected.value)
    assert bool(said) == ("generation_config" in arguments)  # its error would not tell anybody what is wrong


def test_wrong_calls_and_typos(model: Any) -> None:
    ids = torch.tensor([[5, 6]])
    with accelerated(model):
        with pytest.raises(TypeError, match="positional"):
            model.generate(*[None] * 20)
        with pytest.raises(TypeError, match="multiple values"):
            model.generate(ids, inputs=ids)
        with (
            pytest.warns(UserWarning, match="did you mean `max_new_tokens`"),
            pytest.raises(ValueError, match="not used by the model"),
        ):
            model.generate(ids, max_new_token=3)


def test_what_is_refused_late_has_not_moved_the_random_state(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]])
    set_seed(1)
    expected = model.generate(ids, do_sample=True, max_new_tokens=40)
    set_seed(1)
    # Twenty tokens of memory: found out when the cache is there, after the seed was drawn.
    with accelerated(model, kv_memory=1 << 14, page_size=4), pytest.warns(UserWarning, match="raise `kv_memory`"):
        assert same(model.generate(ids, do_sample=True, max_new_tokens=40), expected)


@pytest.mark.parametrize("family", ["bloom", "jamba"])
def test_a_model_that_is_not_supported_works_as_ever(family: str) -> None:
    if REFUSED[family].missing():
        pytest.skip(REFUSED[family].missing() or "")
    model = REFUSED[family]()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = model.generate(ids, max_new_tokens=4)
    with reasons() as said, accelerated(model):
        for _ in range(2):
            assert same(model.generate(ids, max_new_tokens=4), expected)
        assert model.generate.last_report is None
    assert len(said) == 1 and type(model).__name__ in said[0]


def test_a_generate_of_the_models_own_is_not_replaced_by_another() -> None:
    family = FAMILIES["llama"]()

    class Own(type(family)):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> str:
            return "own"

    family.__class__ = Own
    with accelerated(family), pytest.warns(UserWarning, match="Own has a `generate` of its own"):
        assert family.generate(torch.tensor([[5]]), max_new_tokens=1) == "own"


class Identity(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_replaced_layer_is_noticed_in_the_first_step_and_then_remembered() -> None:
    model = FAMILIES["llama"]()
    model.model.layers[1].self_attn = Identity()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = model.generate(ids, max_new_tokens=4, use_cache=False)
    passes: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    with reasons() as said, accelerated(model):
        for _ in range(3):
            assert same(model.generate(ids, max_new_tokens=4, use_cache=False), expected)
    assert len(passes) == 3 * 4 + 1
    assert len(said) == 1 and "been replaced" in said[0]


# -- what does not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("a hook's"), TypeError("a hook's"), torch.OutOfMemoryError("none left")])
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
    with accelerated(model), pytest.raises(GenerationInterrupted):
        model.generate(**inputs, max_new_tokens=5)
    assert "generate" not in vars(model)


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
    pick, found = Sampler.__call__, []

    def curious(self: Sampler, *args: Any) -> Any:
        found.append(model.generate(ids, max_new_tokens=3))
        return pick(self, *args)

    monkeypatch.setattr(Sampler, "__call__", curious)
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

    def work(offset: int) -> None:
        for index in range(9):
            place = (index + offset) % 9
            outcomes.append(same(model.generate(**calls[place]), expected[place]))

    with warnings.catch_warnings(), accelerated(model):
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 2, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == [True] * 27


# -- a real model ----------------------------------------------------------------------------------------------


def _small_model() -> Any:
    path = Path(__file__).parents[1] / "examples" / "small_model.py"
    spec = importlib.util.spec_from_file_location("small_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_model = _small_model()


@pytest.mark.skipif(not small_model.is_available(), reason=small_model.why_not_available())
@pytest.mark.xdist_group("real_model")
@pytest.mark.timeout(900)  # the first run unpacks the model
def test_a_pipeline_with_a_real_model() -> None:
    model, tokenizer = small_model.load()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    start = "Answer in one word.\nQ: What is the capital of Italy?\nA: Rome\nQ: What is the capital of "
    texts = [f"{start}{land}?\nA:" for land in ("France", "Germany", "the United Kingdom")] + ["Once upon a time"]
    call = {"batch_size": 4, "max_new_tokens": 3, "do_sample": False, "return_full_text": False}
    expected = pipe(texts, **call)
    assert [answer[0]["generated_text"].split()[0] for answer in expected[:3]] == ["Paris", "Berlin", "London"]
    with accelerated_throughout(model):
        assert pipe(texts, **call) == expected
        assert model.generate.last_report.saving > 0.5
