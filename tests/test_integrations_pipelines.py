"""``accelerated(pipe)``: a text-generation pipeline gives what it gave, from one run, or it says why not."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support_accelerated import (
    CHATS,
    FAMILY,
    GREEDY,
    TEXTS,
    Rows,
    accelerated_throughout,
    alike,
    asks,
    beyond_eight,
    fails_alike,
    falls_back,
    made,
    plain_form,
    reasons,
    word_tokenizer,
)
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from support_real_model import load_once, needs_real_model
from torch.utils.data import IterableDataset
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    TextGenerationPipeline,
    TextStreamer,
    pipeline,
    set_seed,
)
from transformers.pipelines.pt_utils import KeyDataset

from hf_batchllm import GenerationInterrupted, GeneratorBusyError, UnsupportedModelError, accelerated

PREFILLED = [*CHATS[0], {"role": "assistant", "content": "w33 w34"}]
ENDS = {"eos_token_id": list(range(40))}


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[str]:
        return iter(TEXTS)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Any]:
    yield made()
    vars(build(FAMILY)).pop("last_report", None)  # of methods of its own, which run batch by batch


def generated(items: list[Any]) -> Iterator[Any]:
    yield from items


def of_datasets() -> Any:
    return KeyDataset(pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS}), "text")


# -- the same, in every structure ------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2, "num_workers": 0},
        {"return_full_text": False},
        {"return_tensors": True},
        {"return_text": True},
        {"prefix": "w7 w8 "},
        {"add_special_tokens": False, "skip_special_tokens": False},
        {"clean_up_tokenization_spaces": False, "return_full_text": False},
        {"continue_final_message": True},
        {"tokenizer_encode_kwargs": {"truncation": True, "max_length": 4}},
        {"truncation": True},
        {**ENDS, "return_tensors": True},
        {**ENDS, "skip_special_tokens": False},
        {**ENDS, "min_new_tokens": 3},
        {"return_dict_in_generate": True},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {**ENDS, "num_beams": 3, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_every_option_gives_what_it_gave(pipe: Any, options: dict[str, Any]) -> None:
    given = (TEXTS, TEXTS[0], CHATS[0], [TEXTS[0]], tuple(CHATS), tuple(CHATS[0]), [PREFILLED], PREFILLED, CHATS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        alike(pipe, *[asks(each, **GREEDY, **options) for each in given])
    assert pipe.last_report.sequences == 3 * options.get("num_return_sequences", 1)


@pytest.mark.parametrize(
    "options",
    [
        {"generation_config": GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)},
        {"max_length": 12, "max_new_tokens": None, "do_sample": False, "prefix": "w7 w8 "},
        {"max_length": 20, "do_sample": False, "handle_long_generation": "hole", "max_new_tokens": 6},
        {"do_sample": False, "max_new_tokens": 3, "prefix": "w9 "},
        {"do_sample": False},
    ],
    ids=str,
)
def test_where_options_come_from(options: dict[str, Any]) -> None:
    texts = TEXTS if len(options) > 1 or "generation_config" in options else TEXTS[:1]  # with 256 new tokens each
    for at_first, later in ((options, {}), ({}, options)):
        alike(made(**at_first), asks(texts, **later))


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "make",
    [
        lambda: generated(TEXTS),
        lambda: generated(CHATS),
        lambda: generated(CHATS[0]),  # of messages: one chat
        lambda: generated([]),
        lambda: Rows(TEXTS),
        lambda: Unsized(),
        lambda: KeyDataset([{"text": text} for text in TEXTS], "text"),
        lambda: KeyDataset([{"chat": chat} for chat in CHATS], "chat"),
        of_datasets,
    ],
)
def test_iterators_come_out_the_same(pipe: Any, make: Any) -> None:
    plain = pipe(make(), **GREEDY)
    with accelerated_throughout(pipe):
        got = pipe(make(), **GREEDY)
        assert isinstance(got, list) == isinstance(plain, list)
        assert list(got) == list(plain)
        if isinstance(make(), Rows | KeyDataset) and not isinstance(plain, list):
            assert len(got) == len(plain) == 3
            next(iter(got))
            assert list(got) == list(got) == list(plain)  # begun anew
        elif not isinstance(plain, list):
            assert list(got) == []
            with pytest.raises(TypeError, match="has no len"):
                len(got)


def test_the_whole_list_reaches_the_engine_at_once(pipe: Any) -> None:
    shared = " ".join(f"w{10 + index % 60}" for index in range(80))
    texts = [f"{shared} w{index}" for index in range(5, 25)]
    with accelerated_throughout(pipe):
        for given in (texts, generated(texts)):
            list(pipe(given, batch_size=1, **GREEDY))
            assert pipe.last_report.sequences == 20 and pipe.last_report.saving > 0.9


def test_answers_are_decoded_by_the_pipeline_alone(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(self: Any, ids: Any, *given: Any, **options: Any) -> Any:
        lengths.append(len(ids))
        return decode(self, ids, *given, **options)

    decode, lengths = type(pipe.tokenizer).decode, []
    monkeypatch.setattr(type(pipe.tokenizer), "decode", noted)
    with accelerated_throughout(pipe):
        pipe(TEXTS, max_new_tokens=7, do_sample=False)
    assert sum(length >= 7 for length in lengths) == len(TEXTS)  # with the prompt or without


def test_stop_sequences() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = "</s>"
    pipe = made(model=build("llama"), tokenizer=tokenizer)
    several = "stop_strings" in pipe._sanitize_parameters(stop_sequence="a")[1]  # transformers 5.17 takes one
    for stop in ("a", ["a", "cc"] if several else "cc"):
        call = {"max_new_tokens": 12, "do_sample": False, "stop_sequence": stop, "return_full_text": False}
        (got,) = alike(pipe, asks(["abcdef", "fedcba", "aabbcc", "ff"], **call))
        assert len({len(answer[0]["generated_text"]) for answer in got}) > 1


def test_samples_are_filled_up(pipe: Any) -> None:
    call = {"max_new_tokens": 6, "num_return_sequences": 3, "eos_token_id": list(range(60)), "pad_token_id": 99}
    expected = pipe(TEXTS, **call)
    with accelerated_throughout(pipe):
        set_seed(3)
        got = pipe(TEXTS, **call)
        set_seed(3)
        assert list(pipe(generated(TEXTS), **call)) == got
        rows = [[record["generated_token_ids"] for record in some] for some in pipe(TEXTS, return_tensors=True, **call)]
    assert [[set(record) for record in some] for some in got] == [[set(record) for record in s] for s in expected]
    assert all(len({len(row) for row in some}) == 1 for some in rows)
    assert any(row[-1] == 99 for some in rows for row in some)


def test_an_empty_prompt_begins_from_bos(pipe: Any) -> None:
    for more in ({}, {"return_tensors": True}):
        alike(pipe, *[asks(given, bos_token_id=5, **GREEDY, **more) for given in ("", [""], ["", TEXTS[0]])])


def test_without_a_pad_token_and_without_masks() -> None:
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.pad_token, tokenizer.model_input_names = None, ["input_ids"]
    alike(made(tokenizer=tokenizer), asks([TEXTS[0]], **GREEDY))


def test_a_streamer_is_told_of_a_single_prompt(pipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(TEXTS[0], streamer=TextStreamer(pipe.tokenizer), **GREEDY)
    expected = capsys.readouterr().out
    with accelerated_throughout(pipe):
        pipe(TEXTS[0], streamer=TextStreamer(pipe.tokenizer), **GREEDY)
    assert capsys.readouterr().out == expected


def test_postprocess_and_preprocess_may_be_ones_own() -> None:
    class Counted(TextGenerationPipeline):
        fails = False

        def preprocess(self, prompt_text: Any, **options: Any) -> Any:
            if not isinstance(prompt_text, str):
                raise ValueError("no text input")
            return super().preprocess(f"w9 {prompt_text}", **options)

        def postprocess(self, *args: Any, **options: Any) -> Any:
            if self.fails:
                raise KeyError("mine")
            return len(super().postprocess(*args, **options))

    pipe = Counted(model=build(FAMILY), tokenizer=word_tokenizer(), device="cpu")
    with accelerated_throughout(pipe):
        assert pipe(TEXTS, **GREEDY) == [1, 1, 1]
        assert pipe.last_report.prompt_tokens == 12 + 3
        with pytest.raises(ValueError, match="text input"):
            pipe([3], **GREEDY)
        assert pipe.last_report is None  # not that of the call before
        pipe.fails = True
        with pytest.raises(KeyError, match="mine") as caught:
            pipe(TEXTS, **GREEDY)
    assert len(caught.value.result.texts) == 3 and all(caught.value.result.texts)  # what was computed is not lost


@needs_real_model
def test_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_once()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    start = "Answer in one word.\nQ: What is the capital of Italy?\nA: Rome\nQ: What is the capital of "
    texts = [f"{start}{land}?\nA:" for land in ("France", "Germany")]
    chats = [[{"role": "user", "content": f"The capital of {land} is"}] for land in ("France", "Germany")]
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    call = {"batch_size": 2, "max_new_tokens": 2, "do_sample": False}
    expected, _ = alike(pipe, asks(texts, **call), asks(chats, **call))
    assert "Paris" in expected[0][0]["generated_text"] and "Berlin" in expected[1][0]["generated_text"]


# -- results that are read later -------------------------------------------------------------------------------


def test_results_are_read_in_the_block(pipe: Any) -> None:
    expected = pipe(TEXTS, **GREEDY)
    with accelerated(pipe):
        begun, untouched = pipe(generated(TEXTS), **GREEDY), pipe(generated(TEXTS), **GREEDY)
        assert next(begun) == expected[0]
    with pytest.raises(GeneratorBusyError, match="read them in its block"):
        next(begun)
    with reasons() as said:
        assert list(untouched) == expected
    assert said == ["accelerated() had ended when the first result was asked for"]


def test_results_that_are_left_leave_everything_usable(pipe: Any) -> None:
    expected = pipe(TEXTS, **GREEDY)
    with accelerated_throughout(pipe):
        for _ in pipe(generated(TEXTS), **GREEDY):
            break
        assert pipe(TEXTS, **GREEDY) == expected
        results = pipe(generated(TEXTS), **GREEDY)
        assert next(results) == expected[0]
        results.close()
        assert list(results) == []
        assert pipe(TEXTS, **GREEDY) == expected
    with reasons() as said, accelerated(pipe):
        results = pipe(generated(TEXTS), **GREEDY)
        assert next(results) == expected[0]
        assert pipe(TEXTS, **GREEDY) == expected  # meanwhile
        assert list(results) == expected[1:]
    assert len(said) == 1 and said[0].startswith("a call is running already")


def test_the_block_ends_while_another_thread_reads(pipe: Any) -> None:
    results, errors, begun = None, [], threading.Event()

    def job() -> None:
        try:
            for _ in results:
                begun.set()
        except GeneratorBusyError as error:
            errors.append(str(error))

    with accelerated(pipe):
        results = pipe(generated(TEXTS * 300), **{**GREEDY, "max_new_tokens": 20})
        thread = threading.Thread(target=job)
        thread.start()
        begun.wait(60)
    thread.join()
    assert len(errors) == 1 and "read them in its block" in errors[0]


@pytest.mark.filterwarnings("ignore:there are hooks on")
def test_after_an_interrupt_in_a_step_another_thread_has_its_turn(pipe: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    expected = pipe(TEXTS, **GREEDY)
    with accelerated(pipe):
        handle = pipe.model.register_forward_pre_hook(interrupted)
        with pytest.raises(GenerationInterrupted):
            pipe(TEXTS, **GREEDY)
        handle.remove()
        thread = threading.Thread(target=pipe, args=(TEXTS,), kwargs=GREEDY, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert pipe(TEXTS, **GREEDY) == expected


# -- what runs as it did ---------------------------------------------------------------------------------------

PADDED = {"tokenizer_encode_kwargs": {"padding": "max_length", "max_length": 9}}
CRITERIA = {"stopping_criteria": [MaxLengthCriteria(11)]}
PROCESSORS = {"logits_processor": [MinLengthLogitsProcessor(11, list(range(90)))], "eos_token_id": list(range(90))}
LETTERS = {"stop_strings": ["a"], "tokenizer": letter_tokenizer(), "pad_token_id": None, "num_return_sequences": 2}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trust_remote_code": True}, "`trust_remote_code` has no meaning here"),
        ({"return_dict_in_generate": True, "output_scores": True}, "`output_scores` is not supported for a list"),
        ({"logits_processor": [lambda ids, scores: scores]}, "`logits_processor` has a function"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [5 + row]}, "`prefix_allowed_tokens_fn` is a function that a"),
        ({**PADDED, "stopping_criteria": [beyond_eight]}, "`stopping_criteria` would count the padding"),
        ({**PADDED, **CRITERIA}, "`stopping_criteria` would count the padding"),
        ({**PADDED, **PROCESSORS}, "`logits_processor` would count the padding"),
        ({**PADDED, "generation_config": GenerationConfig(max_length=12)}, "`max_length` would count the padding"),
        (
            {**LETTERS, "do_sample": True},
            "`stop_strings` ends rows one by one, and there is neither a pad token",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_cannot_be_served_goes_its_usual_way_and_says_why(options: dict[str, Any], says: str) -> None:
    tokenizer = copy.deepcopy(word_tokenizer())
    pipe = made(tokenizer=tokenizer)
    call = {**({"do_sample": False} if "generation_config" in options else GREEDY), **options}
    if "stop_strings" in options:  # nothing to pad with at all
        tokenizer.pad_token = tokenizer.eos_token = None
        pipe = made(tokenizer=tokenizer)
        pipe.model = copy.copy(pipe.model)
        pipe.model.generation_config = GenerationConfig()

    def seeded(pipe: Any, make: Any) -> Any:
        set_seed(1)
        return [plain_form(pipe(make(TEXTS), **call)), torch.get_rng_state()]  # transformers' DataLoader moves it, too

    for make in (list, generated):
        falls_back(pipe, says, partial(seeded, make=make), then=asks(TEXTS, **GREEDY))


@pytest.mark.parametrize(
    "call",
    [
        asks(3),
        asks(["w5", 3]),
        asks(""),
        asks(TEXTS, max_new_tokenz=3),
        asks(TEXTS, seed=3),
        asks(TEXTS, progress=False),
        asks(TEXTS, max_new_tokens=0),
        asks(TEXTS, generation_config=[GenerationConfig(max_new_tokens=2)] * 3),
        asks(TEXTS, num_return_sequences=2, do_sample=False),
        asks(TEXTS, handle_long_generation="x"),
        lambda pipe: list(pipe(generated(["w5", 3]))),
        asks([]),
    ],
)
def test_errors_are_its_own(pipe: Any, call: Any) -> None:
    fails_alike(pipe, call)


def test_padding_on_the_left_is_not_computed(pipe: Any) -> None:
    for more in ({"return_full_text": False}, {"return_tensors": True}):
        alike(pipe, asks(TEXTS, **GREEDY, **PADDED, **more))
        assert pipe.last_report.prompt_tokens == 6 + 5 + 1


def test_padding_on_the_right_is_what_it_is_without() -> None:
    tokenizer = copy.deepcopy(word_tokenizer())
    pipe = made(tokenizer=tokenizer)
    alone = pipe(TEXTS, **GREEDY)
    tokenizer.padding_side = "right"  # which the pipeline had set to "left"
    for call in ({**GREEDY, **PADDED}, {**GREEDY, "batch_size": 3}):
        why, texts = "`attention_mask` marks padding on the right", Rows(TEXTS)
        expected = falls_back(pipe, why, asks(TEXTS, **call), asks(texts, **call), then=asks(TEXTS, **GREEDY))
        assert expected[0] == expected[1] != plain_form(alone)
    alike(pipe, asks(TEXTS, **GREEDY))


def test_what_was_put_in_meanwhile(pipe: Any) -> None:
    def forward(model_inputs: Any, **options: Any) -> Any:
        return TextGenerationPipeline._forward(pipe, model_inputs, **{**options, "max_new_tokens": 2})

    model = pipe.model
    with reasons() as said, accelerated(pipe):
        pipe.model = build("llama")
        pipe(TEXTS, **GREEDY)
        pipe.model = model
        pipe._forward = forward
        assert pipe(TEXTS, **GREEDY) == pipe(TEXTS, max_new_tokens=2, do_sample=False)
        del pipe._forward
        assert pipe(TEXTS, **GREEDY) != pipe(TEXTS, max_new_tokens=2, do_sample=False)
    given = ("another model", "a `_forward`")
    assert said == [f"the pipeline was given {each} since accelerated(pipe) began" for each in given]


def test_a_forward_of_its_own_is_accelerated_batch_by_batch() -> None:
    class Own(TextGenerationPipeline):
        def _forward(self, model_inputs: Any, **options: Any) -> Any:
            return super()._forward(model_inputs, **options)

    pipe = Own(model=build(FAMILY), tokenizer=word_tokenizer(), device="cpu")
    before, expected = sorted(vars(pipe)), pipe(TEXTS, batch_size=3, **GREEDY)
    with warnings.catch_warnings(record=True) as caught, accelerated(pipe):
        assert pipe(TEXTS, batch_size=3, **GREEDY) == expected
        assert pipe.last_report.sequences == 3
    assert "Own has a `_forward` of its own" in str(caught[0].message)
    assert [each.filename for each in caught] == [__file__]
    assert pipe.last_report is vars(pipe.model).pop("last_report")
    assert sorted(vars(pipe)) == sorted([*before, "last_report"])


def test_pipelines_of_other_kinds_are_refused_by_name() -> None:
    class Other(TextGenerationPipeline):
        pass

    with pytest.raises(UnsupportedModelError, match=r"not one for feature-extraction: .*accelerated\(pipe.model\)"):
        accelerated(made("feature-extraction")).__enter__()
    with accelerated_throughout(Other(model=build(FAMILY), tokenizer=word_tokenizer(), device="cpu")) as pipe:
        pipe(TEXTS, **GREEDY)
