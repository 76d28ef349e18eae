"""``accelerated(pipe)``: a text-generation pipeline gives what it gave, or runs as it did and says why."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support_accelerated import TEXTS, word_tokenizer
from support_families import REFUSED, build
from transformers import GenerationConfig, TextGenerationPipeline, pipeline, set_seed
from transformers.pipelines.pt_utils import KeyDataset

from hf_batchllm import (
    BatchConfig,
    ConfigError,
    GenerationInterrupted,
    GeneratorBusyError,
    UnsupportedModelError,
    accelerated,
)
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.patches.attention_swap import AttentionSwap

CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY = {"max_new_tokens": 4, "do_sample": False}
SAYS = "not accelerated, the pipeline runs as it does without: "


@pytest.fixture
def pipe() -> Iterator[Any]:
    pipe = pipeline("text-generation", model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    pipe.call_count = 0
    before = state(pipe)
    yield pipe
    assert state(pipe) == before


def state(pipe: Any) -> Any:
    """All of a pipeline and of its model that might have been changed."""
    own = {name: value for name, value in vars(pipe).items() if name not in ("call_count", "last_report")}
    of_model = [item for item in vars(pipe.model).items() if item[0] != "last_report"]  # which stays
    return own, of_model, repr(pipe.model.config), repr(pipe.model.generation_config)


@contextmanager
def throughout(pipe: Any, **fields: Any) -> Iterator[Any]:
    """Nothing may go another way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "there are hooks on")
        with accelerated(pipe, **fields) as same:
            assert same is pipe
            yield pipe
            assert pipe.last_report is not None


@contextmanager
def reasons() -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    for warning in caught:
        if str(warning.message).startswith(SAYS):
            assert warning.filename == __file__
            said.append(str(warning.message).removeprefix(SAYS))


# -- what is served --------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2},
        {"return_full_text": False},
        {"return_tensors": True},
        {"prefix": "w7 "},
        {"eos_token_id": list(range(40)), "return_tensors": True, "min_new_tokens": 2},
        {"bos_token_id": 5},
    ],
    ids=str,
)
def test_lists_and_single_ones_come_out_the_same(pipe: Any, options: dict[str, Any]) -> None:
    texts = [*TEXTS, ""] if "bos_token_id" in options else TEXTS
    for given in (texts, texts[-1], CHATS, CHATS[0], tuple(CHATS)):
        expected = pipe(given, **GREEDY, **options)
        with throughout(pipe):
            assert pipe(given, **GREEDY, **options) == expected
            assert pipe.last_report is pipe.get_iterator.last_report
            if given is CHATS:
                assert pipe.last_report.sequences == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: (text for text in TEXTS),
        lambda: (chat for chat in CHATS),
        lambda: (text for text in ()),
        lambda: KeyDataset([{"text": text} for text in TEXTS], "text"),
        lambda: KeyDataset([{"chat": chat} for chat in CHATS], "chat"),
    ],
)
def test_iterators_come_out_the_same(pipe: Any, make: Any) -> None:
    plain = pipe(make(), **GREEDY)
    with throughout(pipe):
        got = pipe(make(), **GREEDY)
        assert isinstance(got, list) == isinstance(plain, list)
        assert list(got) == list(plain)
        if isinstance(make(), KeyDataset):
            assert len(got) == len(plain) == 3


def test_samples_repeat_and_draw_once(pipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"max_new_tokens": 5, "num_return_sequences": 2}
    with throughout(pipe):
        set_seed(42)
        first = pipe(TEXTS * 20, **call)
        after = torch.get_rng_state()
        set_seed(42)
        assert pipe(TEXTS * 20, **call) == first
        set_seed(42)
        assert list(pipe((text for text in TEXTS * 20), **call)) == first
        set_seed(42)
        torch.randint(2**63 - 1, ())
        assert torch.equal(torch.get_rng_state(), after)
    assert [len(records) for records in first] == [2] * 60
    assert capsys.readouterr().err == ""  # no bar


def test_settings_are_those_of_a_batch_generator(pipe: Any) -> None:
    shared = " ".join(f"w{5 + index % 60}" for index in range(80))
    with throughout(pipe, config=BatchConfig(page_size=8), keep_prefixes=1):
        for cached in (0, 80):
            pipe([f"{shared} w7", f"{shared} w8"], **GREEDY)
            assert pipe.last_report.cached_tokens == cached
    with pytest.raises(ConfigError, match="did you mean `page_size`"), accelerated(pipe, page_sise=8):
        pass


# -- what it was -----------------------------------------------------------------------------------------------


def test_it_is_what_it_was_after_an_error_and_when_nested(pipe: Any) -> None:
    before, expected = state(pipe), pipe(TEXTS, **GREEDY)
    with pytest.raises(RuntimeError, match="mine"), accelerated(pipe):
        raise RuntimeError("mine")
    assert state(pipe) == before
    with accelerated(pipe), throughout(pipe):
        assert pipe(TEXTS, **GREEDY) == expected
    assert state(pipe) == before
    first, second = ExitStack(), ExitStack()
    first.enter_context(accelerated(pipe))
    second.enter_context(accelerated(pipe))
    first.close()
    assert pipe(TEXTS, **GREEDY) == expected and pipe.last_report is not None
    second.close()
    assert state(pipe) == before
    with accelerated(pipe.model), accelerated(pipe):
        assert pipe(TEXTS, **GREEDY) == expected
        assert pipe.model.generate.last_report is None
    assert state(pipe) == before


def test_the_report_stays_on_the_pipeline() -> None:
    pipe = pipeline("text-generation", model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    with accelerated(pipe) as given:
        assert given.last_report is None
    assert not hasattr(pipe, "last_report")  # nothing was asked
    with accelerated(pipe) as given:
        given(TEXTS, **GREEDY)
    assert given.last_report.sequences == pipe.last_report.sequences == len(TEXTS)
    with accelerated(pipe):
        pass
    assert pipe.last_report.sequences == len(TEXTS)
    first, second = ExitStack(), ExitStack()
    first.enter_context(accelerated(pipe))
    second.enter_context(accelerated(pipe))
    first.close()
    pipe(TEXTS[:1], **GREEDY)
    second.close()
    assert pipe.last_report.sequences == 1

    class Other(TextGenerationPipeline):
        def _forward(self, *args: Any, **options: Any) -> Any:
            return super()._forward(*args, **options)

    own = Other(model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with accelerated(own):
            own(TEXTS, **GREEDY)
    assert own.last_report.sequences == 1 and own.model.last_report is own.last_report  # batch by batch


def test_its_own_attribute_of_that_name_comes_back() -> None:
    pipe = pipeline("text-generation", model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    pipe.last_report = "mine"
    with throughout(pipe):
        pipe(TEXTS, **GREEDY)
    assert pipe.last_report == "mine"


def test_copies_made_meanwhile_are_plain(pipe: Any) -> None:
    expected = pipe(TEXTS, **GREEDY)
    with throughout(pipe):
        pipe(TEXTS, **GREEDY)
        copies = [copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))]
    for each in copies:
        assert each.get_iterator.__self__ is each
        assert each(TEXTS, **GREEDY) == expected


def test_results_are_read_in_the_block(pipe: Any) -> None:
    expected = pipe(TEXTS, **GREEDY)
    with accelerated(pipe):
        begun, untouched = pipe(iter_of(TEXTS), **GREEDY), pipe(iter_of(TEXTS), **GREEDY)
        assert next(begun) == expected[0]
    with pytest.raises(GeneratorBusyError, match="read them in its block"):
        next(begun)
    with reasons() as said:
        assert list(untouched) == expected
    assert said == ["accelerated() had ended when the first result was asked for"]
    with throughout(pipe):
        for _ in pipe(iter_of(TEXTS), **GREEDY):
            break
        assert pipe(TEXTS, **GREEDY) == expected


def iter_of(items: list[Any]) -> Iterator[Any]:
    yield from items


# -- what runs as it did ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trust_remote_code": True}, "`trust_remote_code` has no meaning here"),
        ({"return_dict_in_generate": True, "output_scores": True}, "`output_scores` is not supported for a list"),
        ({"logits_processor": [lambda ids, scores: scores]}, "`logits_processor` has a function"),
        (
            {"prefix_allowed_tokens_fn": lambda row, ids: [5 + row]},
            "`prefix_allowed_tokens_fn` is a function that a pipeline",
        ),
    ],
)
def test_what_cannot_be_served_goes_its_usual_way_and_says_why(pipe: Any, options: dict[str, Any], says: str) -> None:
    for make in (lambda: TEXTS, lambda: iter_of(TEXTS)):
        set_seed(1)
        expected = list(pipe(make(), **GREEDY, **options))
        after = torch.get_rng_state()  # transformers' DataLoader moves it, too
        with reasons() as said, accelerated(pipe):
            for _ in range(2):
                set_seed(1)
                assert list(pipe(make(), **GREEDY, **options)) == expected
                assert torch.equal(torch.get_rng_state(), after)
            assert pipe.last_report is None
            assert pipe(TEXTS, **GREEDY) == pipe(TEXTS, **GREEDY)
            assert pipe.last_report is not None
        assert len(said) == 1 and said[0].startswith(says)


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe(3),
        lambda pipe: pipe(["w5", 3]),
        lambda pipe: pipe(""),
        lambda pipe: pipe(TEXTS, max_new_tokenz=3),
        lambda pipe: pipe(TEXTS, seed=3),
        lambda pipe: pipe(TEXTS, max_new_tokens=0),
        lambda pipe: pipe(TEXTS, generation_config=[GenerationConfig(max_new_tokens=2)] * 3),
        lambda pipe: pipe(TEXTS, num_return_sequences=2, do_sample=False),
        lambda pipe: pipe(TEXTS, handle_long_generation="x"),
        lambda pipe: list(pipe(iter_of(["w5", 3]))),
        lambda pipe: pipe([]),
    ],
)
def test_errors_are_its_own(pipe: Any, call: Any) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011
        call(pipe)
    with warnings.catch_warnings(), accelerated(pipe):
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as got:  # noqa: PT011
            call(pipe)
    assert type(got.value) is type(expected.value)
    assert str(got.value) == str(expected.value)


def test_padding_on_the_right_is_what_it_is_without() -> None:
    tokenizer = copy.deepcopy(word_tokenizer())
    pipe = pipeline("text-generation", model=build("gemma3"), tokenizer=tokenizer, device="cpu")
    alone = pipe(TEXTS, **GREEDY)
    tokenizer.padding_side = "right"  # which the pipeline had set to "left"
    padded = {**GREEDY, "tokenizer_encode_kwargs": {"padding": "max_length", "max_length": 9}}
    for call in (padded, {**GREEDY, "batch_size": 3}):
        expected = pipe(TEXTS, **call)
        with reasons() as said, accelerated(pipe):
            assert pipe(TEXTS, **call) == expected
            assert list(pipe(iter_of(TEXTS), **call)) == expected
            assert pipe.last_report is None
            assert pipe(TEXTS, **GREEDY) == alone
            assert pipe.last_report is not None
        assert len(said) == 1 and said[0].startswith("`attention_mask` marks padding on the right")
        assert expected != alone


def test_a_model_that_is_not_supported() -> None:
    pipe = pipeline("text-generation", model=REFUSED["falcon"](), tokenizer=word_tokenizer(), device="cpu")
    before, expected = state(pipe), pipe(TEXTS, **GREEDY)
    with reasons() as said, accelerated(pipe):
        assert pipe(TEXTS, **GREEDY) == expected
        assert pipe(TEXTS[0], **GREEDY) == expected[0]
        assert list(pipe(iter_of(TEXTS), **GREEDY)) == expected
    assert len(said) == 1 and "Falcon" in said[0]
    assert state(pipe) == before


def test_a_model_that_was_put_in_meanwhile(pipe: Any) -> None:
    model = pipe.model
    with reasons() as said, accelerated(pipe):
        pipe.model = build("llama")
        pipe(TEXTS, **GREEDY)
        pipe.model = model
    assert said == ["the pipeline was given another model since accelerated(pipe) began"]


def test_a_method_that_was_put_in_meanwhile(pipe: Any) -> None:
    def forward(model_inputs: Any, **options: Any) -> Any:
        return TextGenerationPipeline._forward(pipe, model_inputs, **{**options, "max_new_tokens": 2})

    with reasons() as said, accelerated(pipe):
        pipe._forward = forward
        assert pipe(TEXTS, **GREEDY) == pipe(TEXTS, max_new_tokens=2, do_sample=False)
        del pipe._forward
        assert pipe(TEXTS, **GREEDY) != pipe(TEXTS, max_new_tokens=2, do_sample=False)
    assert said == ["the pipeline was given a `_forward` since accelerated(pipe) began"]


@pytest.mark.parametrize("error", [ValueError("a hook's"), TypeError("a hook's")])
def test_an_error_in_the_midst_of_the_work_comes_out(pipe: Any, error: Exception) -> None:
    passes = itertools.count()

    def hook(*_: Any) -> None:
        if next(passes) == 1:
            raise error

    expected = pipe(TEXTS, **GREEDY)
    for given in (lambda: TEXTS, lambda: iter_of(TEXTS)):
        with throughout(pipe):
            passes = itertools.count()
            handle = pipe.model.lm_head.register_forward_pre_hook(hook)
            try:
                with pytest.raises(type(error), match="a hook's"):
                    list(pipe(given(), **GREEDY))
            finally:
                handle.remove()
            assert next(passes) == 2
            assert pipe(TEXTS, **GREEDY) == expected


def test_an_interrupt_comes_out(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with accelerated(pipe):
        monkeypatch.setattr(ModelRunner, "step", interrupted)
        with pytest.raises(GenerationInterrupted):
            pipe(TEXTS, **GREEDY)
        with pytest.raises(KeyboardInterrupt):
            list(pipe(iter_of(TEXTS), **GREEDY))
        monkeypatch.undo()
        assert len(pipe(TEXTS, **GREEDY)) == 3


def test_an_interrupt_just_before_a_step_has_its_turn(pipe: Any) -> None:
    lines, first = inspect.getsourcelines(AttentionSwap.applied)
    (place,) = (first + at for at, line in enumerate(lines) if "acquire()" in line)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is AttentionSwap.applied.__wrapped__.__code__ and frame.f_lineno == place:
            raise KeyboardInterrupt
        return trace

    expected, tracing = pipe(TEXTS, **GREEDY), sys.gettrace()
    with throughout(pipe):
        sys.settrace(trace)
        try:
            with pytest.raises(GenerationInterrupted):
                pipe(TEXTS, **GREEDY)
        finally:
            sys.settrace(tracing)
        thread = threading.Thread(target=pipe, args=(TEXTS,), kwargs=GREEDY, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert pipe(TEXTS, **GREEDY) == expected


def test_while_an_iterator_is_open_lists_go_their_usual_way(pipe: Any) -> None:
    expected = pipe(TEXTS, **GREEDY)
    with reasons() as said, accelerated(pipe):
        results = pipe(iter_of(TEXTS), **GREEDY)
        assert next(results) == expected[0]
        assert pipe(TEXTS, **GREEDY) == expected
        assert list(results) == expected[1:]
    assert len(said) == 1 and said[0].startswith("a call is running already")


def test_a_hook_that_calls_the_pipeline_is_told_so(pipe: Any) -> None:
    def hook(*_: Any) -> None:
        pipe("w5")

    with accelerated(pipe):
        handle = pipe.model.lm_head.register_forward_pre_hook(hook)
        try:
            with pytest.raises(GeneratorBusyError, match="from within a step"):
                pipe(TEXTS, **GREEDY)
        finally:
            handle.remove()


def test_threads_take_turns(pipe: Any) -> None:
    expected = pipe(TEXTS, **GREEDY)
    outcomes: list[bool] = []

    def job() -> None:
        for _ in range(4):
            outcomes.append(pipe(TEXTS, **GREEDY) == expected)

    with throughout(pipe):
        threads = [threading.Thread(target=job) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == [True] * 12


def test_the_block_ends_while_another_thread_reads(pipe: Any) -> None:
    results, errors, begun = None, [], threading.Event()

    def job() -> None:
        try:
            for _ in results:
                begun.set()
        except GeneratorBusyError as error:
            errors.append(str(error))

    with accelerated(pipe):
        results = pipe(iter_of(TEXTS * 300), **{**GREEDY, "max_new_tokens": 20})
        thread = threading.Thread(target=job)
        thread.start()
        begun.wait(60)
    thread.join()
    assert len(errors) == 1 and "read them in its block" in errors[0]


def test_a_forward_of_its_own_is_accelerated_batch_by_batch() -> None:
    class Own(TextGenerationPipeline):
        def _forward(self, model_inputs: Any, **options: Any) -> Any:
            return super()._forward(model_inputs, **options)

    pipe = Own(model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    before, expected = state(pipe), pipe(TEXTS, batch_size=3, **GREEDY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        with accelerated(pipe):
            assert pipe(TEXTS, batch_size=3, **GREEDY) == expected
            assert pipe.model.generate.last_report.sequences == 3
    (warning,) = (each for each in caught if "Own has a `_forward` of its own" in str(each.message))
    assert warning.filename == __file__
    assert state(pipe) == before


def test_pipelines_of_other_kinds_are_refused_by_name() -> None:
    class Other(TextGenerationPipeline):
        pass

    other = pipeline("feature-extraction", model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    with pytest.raises(UnsupportedModelError, match=r"not one for feature-extraction: .*accelerated\(pipe.model\)"):
        accelerated(other).__enter__()
    with throughout(Other(model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")) as pipe:
        pipe(TEXTS, **GREEDY)
