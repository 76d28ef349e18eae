"""Steps ahead and graphs where something odd happens: errors, refused prompts, owners who change their model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support_decode_graphs import captured as captured  # a fixture
from support_decode_graphs import graphs as graphs  # a fixture
from support_decode_graphs import replays_noted
from support_families import FAMILIES, build
from support_kernels import plain
from support_parity import pages_of_memory

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.progress import Progress
from hf_batchllm.model.owners_state import OwnersState, not_in_graphs
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import GroupScheduler

pytestmark = plain
STOPS = list(range(0, 97, 2))


def some(count: int, seed: int = 3, longest: int = 6) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 97) for _ in range(rng.randint(3, longest))] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_in_a_step_leaves_the_grad_mode(depth: int) -> None:
    model = build("llama")

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.lm_head.register_forward_pre_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            BatchGenerator(model, steps_per_sync=depth).generate([[1, 2, 3]], max_new_tokens=3, progress=False)
        assert torch.is_grad_enabled()
    finally:
        handle.remove()
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7}])
def test_prompts_that_are_refused_leave_the_seats_of_the_others(options: dict[str, Any]) -> None:
    model = build("llama")
    prompts = [list(range(begin, 90)) for begin in (1, 2, 3)] + [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    results = [
        BatchGenerator(model, steps_per_sync=depth, kv_memory=pages_of_memory(model, 4, 8), page_size=8)
        .generate(prompts, max_new_tokens=6, on_error="record", progress=False, **options)
        .token_ids
        for depth in (1, 2)
    ]
    assert results[0] == results[1]


@pytest.mark.some_cases
@pytest.mark.parametrize("seed", [22, 23, 32, 38])
def test_nothing_is_preempted_unseen_beside_kept_prefixes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept prefix on which only waiting requests stand is no page that a running one could have."""
    preempt = GroupScheduler._preempt

    def noted(self: GroupScheduler, request: Any) -> None:
        assert not request.pending
        preempt(self, request)

    monkeypatch.setattr(GroupScheduler, "_preempt", noted)
    rng, model = random.Random(seed), build("llama")
    groups = [[rng.randrange(1, 97) for _ in range(24)] for _ in range(3)]
    prompts = [group + [rng.randrange(1, 97) for _ in range(3)] for group in groups for _ in range(4)]
    config = {"page_size": 8, "kv_memory": pages_of_memory(model, 18, 8), "min_shared_tokens": 4, "keep_prefixes": 4}
    results = []
    for depth in (1, 6):
        generator = BatchGenerator(model, steps_per_sync=depth, **config)
        generator.generate(prompts, max_new_tokens=2, progress=False)
        options = {"max_new_tokens": 40, "eos_token_id": list(range(0, 97, 20))}
        results.append(generator.generate(prompts, progress=False, **options).token_ids)
    assert results[0] == results[1]


def test_the_report_of_a_stream_that_was_left_counts_no_step_ahead_as_computed_prompt() -> None:
    generator = BatchGenerator(build("llama"), steps_per_sync=50)
    stream: Any = generator.stream(some(16), max_new_tokens=100, eos_token_id=[0, 1000])
    next(stream)
    stream.close()
    report = generator.last_report
    assert report is not None and report.computed_tokens <= report.prompt_tokens
    assert report.saving >= 0


def test_the_bar_ends_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float, int]] = []
    step = Progress.step

    def noted(self: Progress, *rest: Any) -> None:
        step(self, *rest)
        seen.append((self._bar.n, self._bar.total, self._written))

    monkeypatch.setattr(Progress, "step", noted)
    generator = BatchGenerator(build("llama"), steps_per_sync=8)
    result = generator.generate(some(16), max_new_tokens=60, eos_token_id=STOPS, progress=True)
    assert seen[-1][2] == result.report.new_tokens
    assert all(n <= total for n, total, _ in seen)


def test_hooks_that_transformers_leaves_behind_are_no_reason() -> None:
    model = FAMILIES["llama"]()
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert not_in_graphs(model) is None


def add_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def replace_weights(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def restride_weights(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight  # the same memory, as if it were transposed
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


@pytest.mark.some_cases
@pytest.mark.parametrize("change", [add_hook, replace_weights, restride_weights])
def test_graphs_of_a_model_that_has_changed_are_not_replayed(
    change: Any, graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = FAMILIES["llama"](), some(16)
    whole = BatchGenerator(model, cuda_graphs=False).generate(prompts, max_new_tokens=10, progress=False)
    stop = whole[0].token_ids[9]
    stream = BatchGenerator(model, steps_per_sync=2).stream(prompts, max_new_tokens=30, eos_token_id=stop)
    next(stream)
    while not graphs[-1].steps:  # so far none has been replayed
        next(stream)
    old = set(map(id, graphs[-1]._graphs.values()))
    change(model)
    replayed = replays_noted(monkeypatch)
    list(stream)
    assert not old & set(replayed)


def test_a_call_that_hands_out_nothing_on_the_way_compares_the_model_with_nothing(
    graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnersState, "change", lambda *_, **__: pytest.fail("this takes milliseconds"))
    generator, prompts = BatchGenerator(build("llama"), steps_per_sync=2), some(16)
    stop = generator.generate(prompts, max_new_tokens=10, progress=False)[0].token_ids[9]
    generator.generate(prompts, max_new_tokens=30, eos_token_id=stop, progress=False)
    assert graphs[-1].steps


def test_a_stream_that_leaves_inference_mode(graphs: list[DecodeGraphs]) -> None:
    model, prompts = build("llama"), some(16)
    whole = BatchGenerator(model).generate(prompts, max_new_tokens=10, progress=False)
    stop = whole[0].token_ids[9]
    stream = BatchGenerator(model, steps_per_sync=2).stream(prompts, max_new_tokens=30, eos_token_id=stop)
    with torch.inference_mode():
        next(stream)
    assert len(list(stream)) == len(prompts) - 1


def test_graphs_that_do_not_close_leave_the_generator_free(
    graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(DecodeGraphs, "close", fail)
    generator = BatchGenerator(build("llama"), steps_per_sync=2)
    with pytest.raises(RuntimeError, match="CUDA error"):
        generator.generate(some(3), max_new_tokens=12, progress=False)
    assert generator._turns.running is None
    generator.close()


def test_a_forward_that_was_put_in_place_of_a_modules_own_keeps_graphs_away(graphs: list[DecodeGraphs]) -> None:
    model, calls = FAMILIES["llama"](), []
    own = model.model.layers[0].mlp.forward

    def forward(*given: Any) -> Any:
        calls.append(1)
        return own(*given)

    model.model.layers[0].mlp.forward = forward
    generator = BatchGenerator(model, steps_per_sync=2)
    calls.clear()  # of code of one's own, which is tried on a few tokens
    with pytest.warns(UserWarning, match="`model.layers.0.mlp` has a `forward` of its own"):
        result = generator.generate(some(4), max_new_tokens=12, progress=False)
    assert graphs[0].steps == 0 and len(calls) == result.report.steps


def test_a_request_that_has_stopped_waits_for_nothing() -> None:
    request = Request(0, np.arange(4), 9)
    request.computed = 4
    request.expect()
    request.computed = 5
    request.expect()
    request.append(7, is_stop=True)
    assert request.done and request.pending == 0 and request.length == 5


def test_a_scheduler_that_cannot_say_what_it_must_know_does_not_run_ahead() -> None:
    class Forgetful:
        runs_ahead = True

        def __init__(self) -> None:
            inner = GroupScheduler()
            self.start, self.next, self.finish = inner.start, inner.next, inner.finish

    prompts = some(4)
    generator = BatchGenerator(build("llama"), steps_per_sync=4, scheduler=Forgetful())
    expected = BatchGenerator(build("llama")).generate(prompts, max_new_tokens=5, progress=False).token_ids
    assert generator.generate(prompts, max_new_tokens=5, progress=False).token_ids == expected


def test_what_an_owner_may_do_between_two_results_is_seen() -> None:
    model, device = FAMILIES["llama"](), torch.device("cpu")

    class Adapted(torch.nn.Module):
        """As PEFT's layers are."""

        active = "one"

        @property
        def disable_adapters(self) -> bool:
            return False

        @property
        def active_adapters(self) -> str:
            return self.active

    model.model.layers[0].extra = Adapted()
    states = [OwnersState(model, device)]
    assert states[0].change(model) is None

    def then(change: Any) -> None:
        change()
        assert all(state.change(model) is not None for state in states)
        states.append(OwnersState(model, device))

    then(model.train)
    then(lambda: setattr(model.model.layers[0].extra, "active", "two"))
    then(lambda: model.lm_head.register_forward_hook(lambda *_: None))
    then(lambda: setattr(model.model.norm, "forward", model.model.norm.forward))
    then(lambda: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()))
    then(lambda: model.model.register_buffer("more", torch.zeros(1)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        then(lambda: None)
