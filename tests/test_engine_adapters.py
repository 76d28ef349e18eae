"""Prompts for several adapters in one call: each is what it is with its adapter alone, and the model is as it was."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from support_adapters import (
    MODELS,
    NEW_TOKENS,
    PAGES,
    assert_adapters_matter,
    assert_each,
    build,
    generate,
    having,
    lora,
    prompts,
    thrice,
    wrapped,
)
from support_calls import answers, as_generate
from support_families import build as build_plain
from support_families import reference_generate
from support_parity import watched as watched  # a fixture
from support_untouched import fingerprint, forbid_work
from support_untouched import never_runs as never_runs  # a fixture

from hf_batchllm import BatchConfig, BatchGenerator
from hf_batchllm.errors import OptionValueError, UnsupportedModelError

GIVEN = prompts()
DOCUMENT = [7 + 5 * place % 80 for place in range(40)]
QUESTIONS = [[*DOCUMENT, last] for last in (3, 4)]


def a_and_b(**more: Any) -> Any:
    """A model that a test may change."""
    return wrapped(lora(**more), lora(["gate_proj", "o_proj"]))


def stream_of(model: Any, adapter: Any, given: Any = GIVEN, new_tokens: int = NEW_TOKENS) -> Any:
    """Whose results do not come all at once."""
    return BatchGenerator(model, max_batch_tokens=40, **PAGES).stream(given, adapter=adapter, max_new_tokens=new_tokens)


@pytest.mark.some_cases
@pytest.mark.parametrize("kind", MODELS)
def test_two_adapters_and_the_base_model_in_one_call(kind: str, watched: list[Any]) -> None:
    before = fingerprint(build(kind))
    given, names = thrice(GIVEN)
    assert_each(kind, given, names, generate(kind, given, names))
    assert fingerprint(build(kind)) == before
    if kind in ("lora", "saved", "transformers"):
        assert_adapters_matter(kind, GIVEN)


@pytest.mark.parametrize("name", ["a", "b", None])
def test_one_for_all(name: str | None) -> None:
    assert_each("lora", GIVEN, [name] * len(GIVEN), generate("lora", GIVEN, name))


@pytest.mark.some_cases
@pytest.mark.parametrize("seed", range(6))
def test_any_assignment(seed: int, watched: list[Any]) -> None:
    rng = random.Random(seed)
    given = prompts(10, kind=rng.choice(["mixed", "equal", "nested", "prefix_of_another"]))
    names = [rng.choice(["a", "b", None]) for _ in given]
    config = BatchConfig(
        page_size=rng.choice([4, 16]),
        min_shared_tokens=rng.choice([1, 30]),
        max_batch_tokens=rng.choice([24, 4000]),
        share_prefixes=rng.random() < 0.8,
        scheduler=rng.choice(["groups", "fifo"]),
        keep_prefixes=rng.choice([0, 3]),
    )
    generator = BatchGenerator(build("lora"), config=config)
    for _ in range(2):
        result = generator.generate(given, adapter=names, max_new_tokens=NEW_TOKENS)
        assert_each("lora", given, names, result)
        rng.shuffle(names)
    generator.close()


def test_sampled_as_in_calls_of_their_own() -> None:
    given, names = thrice(GIVEN)
    options = {"do_sample": True, "temperature": 1.3, "num_return_sequences": 2, "seed": 5}
    result = generate("lora", given, names, **options)
    alone = {name: generate("lora", given, name, **options) for name in ("a", "b", None)}
    assert [row.token_ids for row in result] == [alone[names[row.index]][at].token_ids for at, row in enumerate(result)]
    model = a_and_b()
    for name in ("a", "b", None):
        with having(model, name):
            by_owner = answers(model, given, PAGES, max_new_tokens=NEW_TOKENS, **options)
        assert by_owner.token_ids == alone[name].token_ids


def test_equal_prompts_of_different_adapters_share_nothing() -> None:
    prompt = list(range(5, 85))
    shared = generate("lora", [prompt] * 4, ["a", "b", "a", "b"], max_new_tokens=2)
    assert shared.report.computed_tokens == 2 * 81
    assert len(shared.report.plan.groups) == 2
    assert generate("lora", [prompt] * 4, "a", max_new_tokens=2).report.computed_tokens == 83


# -- the model is its user's ----------------------------------------------------------------------------------


def test_between_the_results_of_a_stream_the_model_is_its_users() -> None:
    model = wrapped(lora(modules_to_save=["lm_head"]), lora(["o_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(len(name) % 2 == 0)
    model.train()
    given, names = thrice(GIVEN)
    before = fingerprint(model)
    for count, _ in enumerate(stream_of(model, names, given, 3)):
        assert fingerprint(model) == before, count
    stream = stream_of(model, names, given, 3)
    next(stream)
    stream.close()
    assert fingerprint(model) == before


def test_what_the_user_does_meanwhile_changes_nothing() -> None:
    model, rows = a_and_b(), {}
    given, names = thrice(GIVEN)
    for row in stream_of(model, names, given):
        rows[row.index] = row
        if len(rows) % 3 == 0:
            model.set_adapter("ab"[len(rows) % 2])
        elif len(rows) % 3 == 1:
            model.base_model.disable_adapter_layers()
        else:
            model.base_model.enable_adapter_layers()
    assert_each("lora", given, names, [rows[index] for index in range(len(given))])  # type: ignore[arg-type]


@pytest.mark.parametrize("activate", [True, False])
def test_an_adapter_that_comes_meanwhile_changes_nothing(activate: bool) -> None:
    model, rows = a_and_b(), {}
    given, names = thrice(GIVEN)
    for row in stream_of(model, names, given):
        rows[row.index] = row
        if len(rows) == 1:
            model.add_adapter("c", lora(["k_proj", "q_proj"]))  # where there was no layer of PEFT's, too
            if activate:
                model.set_adapter("c")
            before = fingerprint(model)
        assert fingerprint(model) == before
    assert_each("lora", given, names, [rows[index] for index in range(len(given))])  # type: ignore[arg-type]


def _exchange(model: Any) -> None:
    model.delete_adapter("b")
    model.add_adapter("b", lora(["o_proj"]))


GONE, UNLOADED = "the adapter 'b' is not there any more", "they were unloaded while a call needs them"
MERGED = "adapters were merged into the weights while a call"
CHANGES: dict[str, tuple[str | None, Any, str]] = {
    "deleted": ("b", lambda model: model.delete_adapter("b"), GONE),
    "exchanged": ("b", _exchange, GONE),
    "unloaded": ("b", lambda model: model.unload(), UNLOADED),
    "base unloaded": (None, lambda model: model.unload(), UNLOADED),
    "merged": ("a", lambda model: model.merge_adapter(["b"]), MERGED),
    "base merged": (None, lambda model: model.merge_adapter(["b"]), MERGED),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_that_become_something_else_while_they_are_needed(change: str) -> None:
    model, (name, make, why) = wrapped(lora(), lora(["o_proj"])), CHANGES[change]
    generator = BatchGenerator(model, max_batch_tokens=40, **PAGES)
    stream = generator.stream(GIVEN, adapter=name, max_new_tokens=3)
    next(stream)
    make(model)
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match=why):
        list(stream)
    assert fingerprint(model) == before
    if change == "deleted":
        assert len(generator.generate(GIVEN, adapter="a", max_new_tokens=2)) == 6


def test_prompts_that_cannot_be_run_have_an_adapter_too() -> None:
    given: list[list[int]] = [GIVEN[0], [], GIVEN[1], [7, -1]]
    generator = BatchGenerator(build("lora"), **PAGES)
    result = generator.generate(given, adapter=["a", "a", "b", None], on_error="record", max_new_tokens=NEW_TOKENS)
    assert [row.finish_reason for row in result] == ["length", "error", "length", "error"]
    alone = generate("lora", [GIVEN[0], GIVEN[1]], ["a", "b"])
    assert [result[0].token_ids, result[2].token_ids] == alone.token_ids
    assert len(generator.generate([[], [-1]], adapter="a", on_error="record", max_new_tokens=2)) == 2


def test_a_wrong_name_in_a_list_is_recorded_for_its_row() -> None:
    generator = BatchGenerator(build("lora"), **PAGES)
    names = ["a", "aa", None, "b"]
    given = GIVEN[:4]
    result = generator.generate(given, adapter=names, on_error="record", max_new_tokens=NEW_TOKENS)
    why = "has the `adapter` 'aa'; the model has 'a', 'b'; did you mean 'a'?"
    assert [row.error for row in result] == [None, why, None, None]
    alone = generate("lora", [given[0], given[2], given[3]], ["a", None, "b"])
    assert [result[place].token_ids for place in (0, 2, 3)] == alone.token_ids
    scores = generator.score(given, [[5, 6]] * 4, adapter=names, on_error="record")
    assert [score.error for score in scores] == [None, why, None, None]
    assert scores[3].logprob == pytest.approx(generator.score(given[3:], [[5, 6]], adapter="b")[0].logprob, abs=1e-4)
    everywhere = generator.generate(given, adapter=["x"] * 4, on_error="record", max_new_tokens=2)
    assert all("'x'" in (row.error or "") for row in everywhere)
    with pytest.raises(OptionValueError, match="`adapter` is 'x'; the model has"):
        generator.generate(given, adapter="x", on_error="record", max_new_tokens=2)


def test_after_an_error_in_a_step() -> None:
    before = fingerprint(build("lora"))
    generator = BatchGenerator(build("lora"), **PAGES)

    with (
        build("lora").get_base_model().model.layers[1].register_forward_hook(lambda *_: 1 / 0),
        pytest.raises(ZeroDivisionError),
    ):
        generator.generate(GIVEN, adapter="b", max_new_tokens=2)
    assert fingerprint(build("lora")) == before
    assert_each("lora", GIVEN, ["b"] * 6, generator.generate(GIVEN, adapter="b", max_new_tokens=NEW_TOKENS))


def test_an_adapter_that_is_named_runs_where_all_are_switched_off() -> None:
    model = a_and_b()
    generator = BatchGenerator(model, **PAGES)
    with model.disable_adapter():
        result = generator.generate(GIVEN, adapter="b", max_new_tokens=NEW_TOKENS)
        as_it_is = generator.generate(GIVEN, max_new_tokens=NEW_TOKENS)
    assert_each("lora", GIVEN, ["b"] * 6, result)
    assert_each("lora", GIVEN, [None] * 6, as_it_is)


# -- prefixes that are kept ------------------------------------------------------------------------------------


def test_a_kept_prefix_is_its_adapters_alone() -> None:
    model = a_and_b()
    generator = BatchGenerator(model, keep_prefixes=4, **PAGES)

    def cached(**options: Any) -> int:
        result = generator.generate(QUESTIONS, max_new_tokens=NEW_TOKENS, **options)
        name = options.get("adapter", active)
        assert_each("lora", QUESTIONS, [name] * 2, result)
        return result.report.cached_tokens

    active: Any = "a"
    assert cached() == 0
    assert cached(adapter="a") == 40  # the same, said otherwise
    assert cached(adapter="b") == 0
    assert cached(adapter=None) == 0
    assert [cached(), cached(adapter="b"), cached(adapter=None)] == [40, 40, 40]
    active = "b"
    model.set_adapter("b")
    assert cached() == 40
    active = None
    with model.disable_adapter():
        assert cached() == 40
    with torch.no_grad():
        next(each for name, each in model.named_parameters() if ".a." in name).mul_(1.1)
    assert cached(adapter="b") == 0  # whose weights it was is not looked into


def test_nothing_is_kept_of_a_stream_in_which_the_user_switched() -> None:
    model = a_and_b()
    generator = BatchGenerator(model, keep_prefixes=4, **PAGES)
    for _ in generator.stream(QUESTIONS, max_new_tokens=1):
        model.set_adapter("b")
    result = generator.generate(QUESTIONS, max_new_tokens=NEW_TOKENS)
    assert result.report.cached_tokens == 0
    assert_each("lora", QUESTIONS, ["b"] * 2, result)


# -- checks ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        ("c", r"`adapter` is 'c'; the model has 'a', 'b'"),
        (["a", "b", "c", None, None, "a"], r"`adapter` is 'c' at place 2; the model has 'a', 'b'"),
        (["a"] * 5, r"is a list of 5 and there are 6 prompts: it must have one for each"),
        ([["a", "b"]] * 6, r"has \['a', 'b'\] at place 0: an adapter is given by its name, or None"),
        (3, r"`adapter` is an int: an adapter is given by its name"),
        ({"a": 1}, r"`adapter` is a dict: .* or a list with one for each prompt"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(adapter: Any, why: str) -> None:
    before = fingerprint(build("lora"))
    for call in (BatchGenerator(build("lora")).generate, BatchGenerator(build("lora")).stream):
        with pytest.raises(OptionValueError, match=why):
            call(GIVEN, adapter=adapter, max_new_tokens=2)
    assert fingerprint(build("lora")) == before


def changed_by(name: str) -> Any:
    model = wrapped(lora(), lora(["o_proj"]))  # whose list of adapters PEFT leaves as it is
    generator = BatchGenerator(model, **PAGES)
    getattr(model, name)()
    return generator


LOST = r"`adapter` is 'b', and the model's layers have lost their adapters"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: BatchGenerator(build_plain("llama")), "is 'b', and the model has no adapters: load them first"),
        (lambda: changed_by("merge_adapter"), r"while 'a' is merged into the weights: unmerge_adapter\(\) first"),
        (lambda: changed_by("unload"), LOST),
        (lambda: changed_by("merge_and_unload"), LOST),
    ],
    ids=["plain", "merged", "unloaded", "merged and unloaded"],
)
def test_where_no_adapter_can_be_chosen(make: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = make()
    with monkeypatch.context() as patch:
        forbid_work(patch)
        with pytest.raises(OptionValueError, match=why):
            generator.generate(GIVEN, adapter="b", max_new_tokens=1)
    if why == LOST:
        assert len(generator.generate(GIVEN, adapter=None, max_new_tokens=1)) == len(GIVEN)


@pytest.mark.parametrize("none", [None, [None] * 6], ids=["one", "list"])
def test_none_asks_nothing_of_a_model_without_adapters(none: Any) -> None:
    as_generate("llama", GIVEN, 4, adapter=none)


def test_biases_that_were_trained_stay_and_that_is_said() -> None:
    model = wrapped(lora(bias="lora_only"), lora(["k_proj"]), family="qwen2")
    generator = BatchGenerator(model, **PAGES)
    with pytest.warns(UserWarning, match="'a' has trained biases of the model itself, which stay"):
        result = generator.generate(GIVEN, adapter=None, max_new_tokens=3)
    with warnings.catch_warnings(), having(model, None):
        warnings.simplefilter("ignore")
        assert result.token_ids == [reference_generate(model, prompt, max_new_tokens=3) for prompt in GIVEN]
    with pytest.warns(UserWarning, match="'a' has trained biases of the model itself, which stay"):
        BatchGenerator(model, **PAGES).score(GIVEN, choices=[[5]], adapter=None)


def test_an_activated_lora_is_refused_by_name() -> None:
    model = wrapped(lora(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]), lora(["k_proj"]))
    generator = BatchGenerator(model)
    for chosen in ({"adapter": "a"}, {}):
        with pytest.raises(UnsupportedModelError, match="the adapter 'a' starts at its invocation tokens"):
            generator.generate(GIVEN, max_new_tokens=2, **chosen)
    assert len(generator.generate(GIVEN, adapter="b", max_new_tokens=2)) == 6
