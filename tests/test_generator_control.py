"""While steps run the model is the library's; whenever code of the user's runs, it is as its user left it."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_adapters import having, lora, wrapped
from support_families import build, reference_generate
from support_parity import assert_parity
from support_untouched import FAMILY, NEW_TOKENS, fingerprint, prompts

from hf_batchllm import BatchGenerator
from hf_batchllm.patches.attention_swap import AttentionSwap
from hf_batchllm.patches.swap import Swap, _after_a_fork
from hf_batchllm.planning.scheduler import GroupScheduler

GIVEN = prompts(count=5)
PROMPT = [5, 6, 7, 8]
SMALL = {"max_batch_tokens": 24, "page_size": 8, "min_shared_tokens": 4}
Look = Callable[[], None]


class Streamer:
    def __init__(self, look: Look) -> None:
        self._look = look

    def put(self, value: torch.Tensor) -> None:
        self._look()

    def end(self) -> None:
        self._look()


def scheduler(look: Look) -> GroupScheduler:
    """One of the user's, which looks at the model whenever it is asked."""

    class Looking(GroupScheduler):
        def start(self, *given: Any) -> None:
            look()
            super().start(*given)

        def next(self) -> Any:
            look()
            return super().next()

        def finish(self, request: Any) -> None:
            look()
            super().finish(request)

    return Looking()


def passed_on(look: Look) -> Callable[..., Any]:
    def called(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        look()
        return scores

    return called


def never(look: Look) -> Callable[..., Any]:
    def called(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        look()
        return torch.zeros(len(ids), dtype=torch.bool)

    return called


def everything(look: Look) -> Callable[..., Any]:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        look()
        return list(range(build(FAMILY).config.vocab_size))

    return allowed


def made_by(make: Callable[[Look], Any]) -> Callable[[Look], Callable[..., Any]]:
    def factory(look: Look) -> Callable[..., Any]:
        def made(*_: Any) -> list[Any]:
            look()
            return [make(look)]

        return made

    return factory


CALLS: dict[str, Callable[[Look], tuple[dict[str, Any], dict[str, Any]]]] = {
    "processor": lambda look: ({}, {"logits_processor": [passed_on(look)]}),
    "factory": lambda look: ({}, {"logits_processor": made_by(passed_on)(look)}),
    "allowed tokens": lambda look: ({}, {"prefix_allowed_tokens_fn": everything(look)}),
    "criterion": lambda look: ({}, {"stopping_criteria": [never(look)]}),
    "criteria factory": lambda look: ({}, {"stopping_criteria": made_by(never)(look)}),
    "scheduler": lambda look: ({"scheduler": scheduler(look)}, {}),
    "beams": lambda look: ({}, {"logits_processor": [passed_on(look)], "num_beams": 2, "do_sample": False}),
    "beams' criterion": lambda look: ({}, {"stopping_criteria": [never(look)], "num_beams": 2, "do_sample": False}),
}


@pytest.mark.parametrize("kind", CALLS)
def test_the_users_code_sees_the_users_model(kind: str) -> None:
    model: Any = build(FAMILY)
    before, seen = fingerprint(model), []
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)

    def look() -> None:
        with torch.set_grad_enabled(before[-1][0]):
            seen.append(fingerprint(model) == before)
            if len(seen) % 7 == 1:  # and may run it
                assert torch.equal(model.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False), plain)

    config, options = CALLS[kind](look)
    generator = BatchGenerator(model, **SMALL, **config)
    result = generator.generate(GIVEN, max_new_tokens=NEW_TOKENS, **options)
    assert len(seen) >= 3 and all(seen)
    assert fingerprint(model) == before
    if "num_beams" not in options:
        assert_parity(FAMILY, GIVEN, result, NEW_TOKENS)


def test_a_streamer_and_who_reads_a_stream_see_it_too() -> None:
    model: Any = build(FAMILY)
    before, seen = fingerprint(model), []

    def look() -> None:
        seen.append(fingerprint(model) == before)

    generator = BatchGenerator(model, **SMALL)
    generator.generate([PROMPT], max_new_tokens=NEW_TOKENS, streamer=Streamer(look))
    for _ in generator.stream(GIVEN, max_new_tokens=NEW_TOKENS):
        look()
    assert len(seen) > NEW_TOKENS + len(GIVEN) and all(seen)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attention that models were told to use, each time."""
    names: list[str] = []
    apply = AttentionSwap.apply

    def noted(self: AttentionSwap, name: str) -> None:
        names.append(name)
        apply(self, name)

    monkeypatch.setattr(AttentionSwap, "apply", noted)
    return names


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "top_p": 0.9}, {"num_beams": 2, "do_sample": False}, {"repetition_penalty": 1.5}],
    ids=["greedy", "sampled", "beams", "penalised"],
)
def test_where_none_of_it_is_called_the_model_is_swapped_once(options: dict[str, Any], swaps: list[str]) -> None:
    generator = BatchGenerator(build(FAMILY), **SMALL)
    swaps.clear()  # what was inspected
    result = generator.generate(GIVEN, max_new_tokens=NEW_TOKENS, **options)
    assert result.report.steps > 5 and len(swaps) == 1
    generator.score([[5, 6]], [[7, 8]])
    assert len(swaps) == 2


def test_processors_have_the_adapter_of_their_prompt() -> None:
    model = wrapped(lora(), lora(["gate_proj", "o_proj"]))
    names, found = ["a", None, "b", "a"], []
    wanted = {}
    for name in set(names):
        with having(model, name):
            wanted[name] = reference_generate(model, PROMPT, max_new_tokens=3)
    before = fingerprint(model)

    def looking(*given: Any) -> list[Any]:
        index = given[0]

        def called(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            found.append(reference_generate(model, PROMPT, max_new_tokens=3) == wanted[names[index]])
            return scores

        return [called]

    generator = BatchGenerator(model, **SMALL)
    generator.generate(GIVEN[:4], max_new_tokens=3, adapter=names, logits_processor=looking)
    assert len(found) >= 4 and all(found)
    assert fingerprint(model) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_process_that_is_forked_within_a_step_has_the_users_model() -> None:
    model: Any = copy.deepcopy(build(FAMILY))
    names, handler = [], signal.getsignal(signal.SIGINT)

    def forks(*_: Any) -> None:
        if names:
            return
        names.append(model.config._attn_implementation)
        read, write = os.pipe()
        if not (child := os.fork()):
            handlers = "" if signal.getsignal(signal.SIGINT) == handler else ", with a handler of the library's"
            os.write(write, (model.config._attn_implementation + handlers).encode())
            os._exit(0)
        os.waitpid(child, 0)
        names.append(os.read(read, 99).decode())

    handle = model.get_output_embeddings().register_forward_hook(forks)
    with pytest.warns(UserWarning, match="hooks"):
        BatchGenerator(model, **SMALL).generate(GIVEN, max_new_tokens=2)
    handle.remove()
    assert names == ["hf_batchllm", model.config._attn_implementation] and names[1] != names[0]


@pytest.mark.parametrize("of", ["a hook", "a processor", "a criterion"])
def test_after_an_error_in_the_users_code_the_model_is_theirs(of: str) -> None:
    model: Any = build(FAMILY)
    before, calls = fingerprint(model), iter(range(99))

    def fails() -> None:
        if next(calls) == 4:
            raise ZeroDivisionError

    options: dict[str, Any] = {"logits_processor": [passed_on(fails)]}
    handle = None
    if of == "a criterion":
        options = {"stopping_criteria": [never(fails)]}
    elif of == "a hook":
        options, handle = {}, model.model.layers[1].register_forward_hook(lambda *_: fails())
    generator = BatchGenerator(model, **SMALL)
    with pytest.raises(ZeroDivisionError):
        generator.generate(GIVEN, max_new_tokens=NEW_TOKENS, **options)
    if handle is not None:
        handle.remove()
    assert fingerprint(model) == before
    assert_parity(FAMILY, GIVEN, generator.generate(GIVEN, max_new_tokens=NEW_TOKENS), NEW_TOKENS)


def streams_in_turns(*streams: Iterator[Any]) -> list[list[Any]]:
    found: list[list[Any]] = [[] for _ in streams]
    waiting = list(zip(streams, found, strict=True))
    while waiting:
        for stream, rows in waiting[:]:
            row = next(stream, None)
            if row is None:
                waiting.remove((stream, rows))
            else:
                rows.append(row)
    return found


def test_a_process_undoes_swaps_of_one_place_in_their_order() -> None:
    """The one that stands upon the other first, whichever that is."""
    for _ in range(20):
        place, lower, upper = {"key": "the user's"}, Swap(), Swap()
        lower.put([(place, "key", "lower")])
        upper.put([(place, "key", "upper")])
        _after_a_fork()
        assert place == {"key": "the user's"}


def test_two_streams_of_one_model_take_turns() -> None:
    before = fingerprint(build(FAMILY))
    whole = {row.index: row.token_ids for row in BatchGenerator(build(FAMILY)).generate(GIVEN, max_new_tokens=4)}
    streams = [BatchGenerator(build(FAMILY), **SMALL).stream(GIVEN, max_new_tokens=4) for _ in range(2)]
    for rows in streams_in_turns(*streams):
        assert {row.index: row.token_ids for row in rows} == whole
    assert fingerprint(build(FAMILY)) == before
