"""Every way in through ``accelerated``: calls give what they gave, and the user's objects are left as they were."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support_accelerated import (
    GREEDY,
    INPUTS,
    TEXTS,
    accelerated_throughout,
    by_generate,
    made,
    reasons,
    same,
    word_tokenizer,
)
from support_accelerated import model as model  # a fixture
from support_families import FAMILIES, REFUSED, build
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, set_seed

from hf_batchllm import (
    BatchConfig,
    ConfigError,
    GenerationInterrupted,
    GeneratorBusyError,
    UnsupportedModelError,
    accelerated,
)
from hf_batchllm.model.runner import ModelRunner

IDS = [ids[mask.bool()].tolist() for ids, mask in zip(INPUTS["input_ids"], INPUTS["attention_mask"], strict=True)]


class Door(NamedTuple):
    takes: Callable[[Any], Any]  # the model -> what `accelerated` takes
    call: Callable[..., Any]  # (that, options of generate) -> a result that can be compared
    methods: tuple[str, ...]  # that are replaced


def by_generate_batch(model: Any, **options: Any) -> Any:
    config = GenerationConfig(eos_token_id=99, **{**GREEDY, **options})
    return [output.generated_tokens for output in model.generate_batch(IDS, config).values()]


def by_list(pipe: Any, **options: Any) -> Any:
    return pipe(TEXTS, **{**GREEDY, **options})


def by_iterator(pipe: Any, **options: Any) -> Any:
    return list(pipe((text for text in TEXTS), **{**GREEDY, **options}))


def pipe_of(model: Any) -> Any:
    pipe = made(model=model)
    pipe.call_count = 0
    return pipe


DOORS = {
    "generate": Door(lambda model: model, by_generate, ("generate",)),
    "generate_batch": Door(lambda model: model, by_generate_batch, ("generate_batch", "init_continuous_batching")),
    "pipeline, list": Door(pipe_of, by_list, ("get_iterator", "run_single")),
    "pipeline, iterator": Door(pipe_of, by_iterator, ("get_iterator", "run_single")),
}
each_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


@pytest.fixture
def owner(door: Door, model: Any) -> Iterator[Any]:
    owner = door.takes(model)
    before = state(owner)
    yield owner
    vars(owner).pop("last_report", None)
    assert state(owner) == before


def state(owner: Any) -> Any:
    """All of a pipeline, or a model, that might have been changed."""
    model = owner if isinstance(owner, nn.Module) else owner.model
    own = [{k: v for k, v in vars(each).items() if k not in ("call_count", "last_report")} for each in (owner, model)]
    return own, repr(model.config), repr(model.generation_config), {module.training for module in model.modules()}


def expected_of(door: Door, owner: Any) -> Any:
    if door.call is not by_generate_batch:
        return door.call(owner)
    rows = [owner.generate(torch.tensor([ids]), eos_token_id=99, pad_token_id=0, **GREEDY) for ids in IDS]
    return [row[0, len(ids) :].tolist() for row, ids in zip(rows, IDS, strict=True)]


# -- what is left behind ---------------------------------------------------------------------------------------


@each_door
def test_the_block_leaves_nothing_however_it_ends(door: Door, owner: Any) -> None:
    expected, own, before = expected_of(door, owner), [getattr(owner, name) for name in door.methods], state(owner)
    with accelerated_throughout(owner):
        assert door.call(owner) == expected
        for name, method in zip(door.methods, own, strict=True):
            assert inspect.signature(getattr(owner, name)) == inspect.signature(method)
            assert getattr(owner, name).__doc__ == method.__doc__ and "accelerated" in repr(getattr(owner, name))
        kept = [getattr(owner, name) for name in door.methods]
    assert state(owner) == before and [getattr(owner, name) for name in door.methods] == own
    with pytest.raises(ZeroDivisionError), accelerated(owner):
        _ = 1 // 0
    assert state(owner) == before
    for name, method in zip(door.methods, kept, strict=True):  # references that somebody took along
        vars(owner)[name] = method
    assert expected_of(door, owner) == expected
    for name in door.methods:
        del vars(owner)[name]


@each_door
def test_blocks_within_blocks(door: Door, owner: Any) -> None:
    expected, before = expected_of(door, owner), state(owner)
    with accelerated(owner):
        outer = getattr(owner, door.methods[0])
        with accelerated_throughout(owner, page_size=8):
            assert getattr(owner, door.methods[0]) is not outer
            assert door.call(owner) == expected
        assert getattr(owner, door.methods[0]) is outer
        with accelerated_throughout(owner):
            assert door.call(owner) == expected
    assert state(owner) == before
    del owner.last_report
    for is_called, own in ((False, None), (True, None), (True, "mine")):
        if own is not None:
            owner.last_report = own
        with ExitStack() as first, ExitStack() as second:
            first.enter_context(accelerated(owner))
            second.enter_context(accelerated(owner))
            first.close()  # in the order in which they began
            if is_called:
                assert door.call(owner) == expected and owner.last_report.sequences == 3
        assert state(owner) == before
        left = getattr(owner, "last_report", None)
        assert left == own if own or not is_called else left is not None


@each_door
def test_the_report_stays_and_what_the_user_had_there_comes_back(door: Door, owner: Any) -> None:
    with accelerated(owner):
        assert owner.last_report is None
    assert not hasattr(owner, "last_report")  # nothing was asked
    with accelerated(owner):
        door.call(owner)
        assert owner.last_report.sequences == 3 and getattr(owner, door.methods[0]).last_report is owner.last_report
    assert owner.last_report.sequences == 3
    owner.last_report = "mine"
    with accelerated(owner):
        door.call(owner)
        assert owner.last_report != "mine"
    assert owner.last_report == "mine"


@each_door
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_copies_made_within_the_block_are_on_their_own(door: Door, owner: Any, duplicate: Any) -> None:
    expected = expected_of(door, owner)
    with accelerated(owner):
        door.call(owner)
        inner = duplicate(owner)
        with accelerated(owner):
            copies = inner, duplicate(owner)
    for another in copies:
        assert all(getattr(another, name).__self__ is another for name in door.methods)
        assert expected_of(door, another) == expected
        with accelerated_throughout(another):
            assert door.call(another) == expected
        assert expected_of(door, copy.deepcopy(another)) == expected


@each_door
def test_what_the_user_puts_there_meanwhile_stays(door: Door, owner: Any) -> None:
    name = door.methods[0]
    with accelerated(owner):
        setattr(owner, name, print)
    assert getattr(owner, name) is print
    delattr(owner, name)


def test_a_generate_of_the_user_is_put_back(model: Any) -> None:
    def logged(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return GenerationMixin.generate(model, *args, **kwargs)

    calls: list[Any] = []
    model.generate = logged
    try:
        with accelerated(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by_generate(model)
            assert not calls
            by_generate(model, trust_remote_code=True)
            assert len(calls) == 1  # the original is what the user had
            assert copy.deepcopy(model).generate is logged
        assert model.generate is logged
    finally:
        del model.generate


def test_as_a_decorator(model: Any) -> None:
    @accelerated(model, page_size=8)
    def evaluate() -> Any:
        by_generate(model)
        return model.last_report.sequences

    assert [evaluate(), evaluate()] == [3, 3]
    assert "generate" not in vars(model)


def test_a_decorated_function_in_two_threads(model: Any) -> None:
    """Each call has a block of its own, which the other's end leaves alone."""
    short_has_ended = threading.Event()

    @accelerated(model)
    def evaluate(is_long: bool) -> Any:
        if is_long:
            assert short_has_ended.wait(60)
        by_generate(model)
        return model.last_report.sequences

    with ThreadPoolExecutor() as pool:
        long = pool.submit(evaluate, True)
        assert pool.submit(evaluate, False).result() == 3
        short_has_ended.set()
        assert long.result() == 3
    assert "generate" not in vars(model)


def test_a_block_that_is_thrown_away_says_how_to_use_it(model: Any) -> None:
    for given, name in ((model, "model"), (pipe_of(model), "pipe")):
        with pytest.warns(UserWarning, match=rf"does nothing by itself: write `with accelerated\({name}\):`") as said:
            accelerated(given)
        assert [each.filename for each in said] == [__file__]

    @accelerated(model)
    def never_called() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del never_called
        with pytest.raises(UnsupportedModelError), accelerated(torch.nn.Linear(2, 2)):
            pass


def test_a_model_saved_within_the_block(tmp_path: Path) -> None:
    model: Any = FAMILIES["llama"]()  # transformers notes in its config what it has saved
    with accelerated_throughout(model):
        expected = by_generate(model)
        model.save_pretrained(tmp_path)
    assert by_generate(AutoModelForCausalLM.from_pretrained(tmp_path)) == expected


# -- settings --------------------------------------------------------------------------------------------------


@each_door
def test_settings_are_those_of_a_batch_generator(door: Door, owner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with accelerated_throughout(owner, config=BatchConfig(page_size=4, min_shared_tokens=4), keep_prefixes=1):
        for cached in (False, True):
            door.call(owner)
            assert (owner.last_report.cached_tokens > 0) == cached
    assert capsys.readouterr().err == ""  # no bar
    with pytest.raises(ConfigError, match="did you mean `page_size`"), accelerated(owner, page_sise=8):
        pass


@each_door
def test_samples_repeat_and_draw_once(door: Door, owner: Any) -> None:
    drawn = {"do_sample": True, "num_return_sequences": 2, "top_k": 0}
    with accelerated_throughout(owner):
        set_seed(42)
        first, after, second = door.call(owner, **drawn), torch.get_rng_state(), door.call(owner, **drawn)
        set_seed(42)
        assert door.call(owner, **drawn) == first != second
        set_seed(42)
        torch.randint(2**63 - 1, ())
        assert torch.equal(after, torch.get_rng_state())
        door.call(owner)  # draws nothing
        assert torch.equal(after, torch.get_rng_state())


# -- hooks, errors, interrupts, threads ------------------------------------------------------------------------


@each_door
@pytest.mark.filterwarnings("ignore:there are hooks on", "ignore:generate_batch")
@pytest.mark.parametrize("error", [ValueError("a hook's"), TypeError("a hook's"), RuntimeError("a hook's")], ids=repr)
@pytest.mark.parametrize("step", [1, 3])
def test_an_error_in_the_midst_of_the_work_comes_out(door: Door, owner: Any, error: Exception, step: int) -> None:
    def hook(*_: Any) -> None:
        if next(passes) == step:
            raise error

    expected, passes = expected_of(door, owner), itertools.count(1)
    model = getattr(owner, "model", owner) if isinstance(owner, nn.Module) else owner.model.model
    with accelerated_throughout(owner):
        handle = model.layers[0].register_forward_pre_hook(hook)
        try:
            if door.call is by_generate_batch:  # as in transformers, in what it leaves open
                outputs = owner.generate_batch(IDS, GenerationConfig(eos_token_id=99, **GREEDY))
                assert [output.error for output in outputs.values()] == ["a hook's"] * 3
            else:
                with pytest.raises(type(error), match="a hook's"):
                    door.call(owner)
        finally:
            handle.remove()
        assert next(passes) == step + 1  # the original has not been tried
        assert door.call(owner) == expected


@each_door
def test_an_interrupt_comes_out(door: Door, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: ModelRunner, *args: Any) -> Any:
        if next(steps) == 5:
            raise KeyboardInterrupt
        return step(self, *args)

    step, steps = ModelRunner.step, itertools.count()
    with accelerated(owner, max_batch_tokens=4):
        monkeypatch.setattr(ModelRunner, "step", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            door.call(owner, max_new_tokens=6)
        monkeypatch.undo()
        if door.call is not by_iterator:
            said = caught.value
            assert isinstance(said, GenerationInterrupted) and not said.caller_has_generator
            assert "BatchGenerator" not in "".join(said._render_traceback_())
        assert door.call(owner) == expected_of(door, owner)


@each_door
@pytest.mark.filterwarnings("ignore:there are hooks on", "ignore:generate_batch")
def test_a_hook_that_makes_a_call_is_told_so(door: Door, owner: Any) -> None:
    def hook(*_: Any) -> None:
        door.call(owner)

    head = (owner if isinstance(owner, nn.Module) else owner.model).lm_head
    with accelerated(owner):
        handle = head.register_forward_pre_hook(hook)
        try:
            if door.call is by_generate_batch:
                output = owner.generate_batch(IDS, GenerationConfig(eos_token_id=99, **GREEDY))["req_0"]
                assert "from within a step" in output.error
            else:
                with pytest.raises(GeneratorBusyError, match="from within a step"):
                    door.call(owner)
        finally:
            handle.remove()
        with accelerated_throughout(owner):
            door.call(owner)


def test_between_two_steps_the_original_serves(model: Any) -> None:
    def curious(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found.append(model.generate(prompt, max_new_tokens=3))
        return scores

    prompt, found = torch.tensor([[5, 6]]), []
    expected, whole = model.generate(prompt, max_new_tokens=3), model.generate(prompt, max_new_tokens=4)
    with reasons() as said, accelerated(model):
        assert same(model.generate(prompt, max_new_tokens=4, logits_processor=[curious]), whole)
    assert len(said) == 1 and said[0].startswith("a call is running already")
    assert len(found) == 4 and all(same(one, expected) for one in found)


@each_door
def test_threads_take_turns(door: Door, owner: Any) -> None:
    lengths = (2, 4, 6)
    expected: dict[int, Any] = dict.fromkeys(lengths)
    outcomes: list[bool] = []

    def job(offset: int) -> None:
        for index in range(6):
            length = lengths[(index + offset) % 3]
            outcomes.append(door.call(owner, max_new_tokens=length) == expected[length])

    # While the results of an iterator are being read, the original serves other calls.
    with warnings.catch_warnings(), accelerated(owner):
        warnings.simplefilter("ignore" if door.call is by_iterator else "error")
        for length in lengths:
            expected[length] = door.call(owner, max_new_tokens=length)
        threads = [threading.Thread(target=job, args=(offset,)) for offset in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == [True] * 18


# -- models that are not served --------------------------------------------------------------------------------


@pytest.mark.parametrize("door", [door for name, door in DOORS.items() if name != "generate_batch"])
@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_a_model_that_is_not_supported_works_as_ever(door: Door, family: str) -> None:
    if REFUSED[family].missing():
        pytest.skip(REFUSED[family].missing() or "")
    owner = door.takes(REFUSED[family]())
    expected, before = door.call(owner), state(owner)
    with reasons() as said, accelerated(owner):
        assert [door.call(owner), door.call(owner)] == [expected] * 2
        assert owner.last_report is None
    assert len(said) == 1 and family in said[0].lower()
    assert state(owner) == before


@pytest.mark.parametrize("given", ["some/model", word_tokenizer(), None, torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_model_is_refused_by_name(given: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="takes a model that has a `generate`"), accelerated(given):
        pass


def test_a_model_that_both_doors_share() -> None:
    pipe = made()
    expected, of_model = by_list(pipe), by_generate(pipe.model)
    with accelerated(pipe.model), accelerated_throughout(pipe):
        assert by_list(pipe) == expected and by_generate(pipe.model) == of_model
    vars(build("gemma3")).pop("last_report")
