"""Drafts in the loop of a GPU: each guessed token is a row of its own, and the device draws the tokens of all rows.

And the rows that answers keep for many steps with guessed tokens.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from support_calls import answers, failing, noted
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on, run_over_references
from support_drafts import (
    GREEDY_AND_SAMPLED,
    NEW_TOKENS,
    ON_A_GPU,
    PROMPTS,
    SAMPLED,
    assert_same,
    both,
    guess_from,
    requests_of,
)
from support_drafts import always as always  # a fixture
from support_fuzz_calls import multiply_in_blocks
from support_parity import pages_of_memory
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows, RowsWork
from hf_batchllm.engine.device_loop.packed_rows import PackedRows
from hf_batchllm.engine.device_loop.steps_as_graphs import GraphLauncher
from hf_batchllm.engine.drafts import drafts_ahead
from hf_batchllm.engine.drafts.drafts_ahead import DraftsAhead
from hf_batchllm.engine.loop import Engine
from hf_batchllm.model.attention.torch_attention import TorchBackend
from hf_batchllm.model.attention.triton_attention import TritonBackend
from hf_batchllm.model.batch import ModelBatch
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.model.draft_rows import DraftRows
from hf_batchllm.model.room_batches import RoomBatches
from hf_batchllm.planning.draft_room import DraftRoom
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import GroupScheduler
from hf_batchllm.planning.step import Chunk, Step
from hf_batchllm.sampling.text_lookup import TextLookup

pytestmark = pytest.mark.usefixtures("always")
CONFIGS: list[dict[str, Any]] = [
    {}, {"share_prefixes": False}, {"cuda_graphs": False}, {"steps_per_sync": 1}, {"scheduler": "fifo"},
    {"keep_prefixes": 4}, {"steps_per_sync": 6, "min_shared_tokens": 4},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, SAMPLED, {"eos_token_id": list(range(0, 97, 13))}, {"logprobs": 2, "prompt_logprobs": 1},
    SAMPLED | {"logprobs": 1, "eos_token_id": [3, 50, 60, 61]}, {"min_new_tokens": 6, "eos_token_id": [1, 2, 3, 4, 5]},
]  # fmt: skip


@pytest.mark.some_cases
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_the_same(
    device: str, config: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted = both(device, monkeypatch, config, **options)
    assert_same(plain, drafted)
    assert drafted.report.accepted_tokens < drafted.report.drafted_tokens
    assert [len(each.logprobs or []) for each in plain] == [len(each.logprobs or []) for each in drafted]


@pytest.mark.some_cases("family")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3", "mixtral", "gpt2", "phi3"])
@GREEDY_AND_SAMPLED
def test_families(device: str, family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*both(device, monkeypatch, {}, family=family, **options))


@pytest.mark.parametrize("guessed", [15, 16, 17, 30])
def test_long_drafts(device: str, guessed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay decode rows, where a part of a prompt as long would not be."""
    plain, drafted = both(device, monkeypatch, {}, 0.0, guessed=guessed)
    assert_same(plain, drafted)
    assert drafted.report.steps < 0.7 * plain.report.steps


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_over_plain_pytorch(refused: bool, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend on a GPU without kernels, and layers that kernels refuse: there each row is by itself."""
    run_over_references(monkeypatch)
    if refused:
        monkeypatch.setattr(TritonBackend, "refusal", lambda self, _: self._refusals.setdefault(0, "no such shape"))
    else:
        monkeypatch.setattr(
            "hf_batchllm.model.model_in_use.make_backend",
            lambda config, device, storage, _: TorchBackend(storage, device),
        )
        monkeypatch.setattr("hf_batchllm.engine.devices.graphs_for", lambda *_: None)
    assert_same(*both("cpu", monkeypatch, {}, family=family))


def test_where_memory_is_short_steps_run_ahead_as_ever(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft runs until steps may be of any size again, and none of them waits for one."""
    model, config = model_on(device, "llama"), ON_A_GPU | {"steps_per_sync": 32}
    plain = answers(model, PROMPTS, config, max_new_tokens=150)
    guess_from(plain, monkeypatch, 0.2)
    failing(monkeypatch, Engine, "_launch", {1}, torch.OutOfMemoryError("no memory for this one"))
    launched = noted(monkeypatch, Engine, "_launch", lambda self, step: step)
    drafted = answers(model, PROMPTS, config, max_new_tokens=150, prompt_lookup_num_tokens=5)
    assert plain.token_ids == drafted.token_ids
    assert sum(step.times == 1 and not step.drafts and not step.chunks for step in launched) < 20


def test_in_little_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"kv_memory": pages_of_memory(model_on(device, "llama"), 24, 16)}
    assert_same(*both(device, monkeypatch, config, max_new_tokens=60))


def test_some_look_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those nothing is guessed: the device would put guesses down as tokens of theirs."""
    configs = [
        GenerationConfig(max_new_tokens=NEW_TOKENS, repetition_penalty=1.3 if place % 2 else 1.0) for place in range(8)
    ]
    model = model_on(device, "llama")
    plain = answers(model, PROMPTS, ON_A_GPU, generation_config=configs)
    for config in configs:
        config.prompt_lookup_num_tokens = 5
    guess_from(plain, monkeypatch, 0.2)
    with pytest.warns(UserWarning, match="no tokens are guessed for 4 prompts: the GPU looks back"):
        drafted = answers(model, PROMPTS, ON_A_GPU, generation_config=configs)
    assert plain.token_ids == drafted.token_ids
    assert drafted.report.accepted_tokens > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"repetition_penalty": 1.2}, "looks back at"),
        ({"output_scores": True, "return_dict_in_generate": True}, "scores"),
    ],
    ids=["penalty", "scores"],
)
def test_where_there_are_none_a_warning_says_so(device: str, options: dict[str, Any], why: str) -> None:
    prompts: Any = [[1, 2, 1, 2]]
    if "output_scores" in options:
        prompts = torch.tensor(prompts, device=device)
    with pytest.warns(UserWarning, match=f"no effect here.*{why}"):
        answers(model_on(device, "llama"), prompts, ON_A_GPU, max_new_tokens=3, prompt_lookup_num_tokens=4, **options)


@pytest.mark.parametrize("tokens", [200, 60])
def test_graphs_are_captured_before_the_first_step_with_drafts(
    device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While bursts run; where few tokens are to come, of one size."""
    monkeypatch.setattr(drafts_ahead, "_BURSTS_FOR_GRAPHS", 100)
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda _: True)
    drafted = noted(monkeypatch, DecodeGraphs, "run", lambda self, batch, _: batch.draft_rows is not None)
    # Of each graph, its rows, and whether steps with drafts had run before.
    made = noted(monkeypatch, DecodeGraphs, "_make", lambda self, kind: kind.drafts and (kind.rows, any(drafted)))
    assert_same(*both(device, monkeypatch, {"steps_per_sync": 8}, max_new_tokens=tokens))
    assert [each for each in made if each] == [(64, False)]


# -- rooms -----------------------------------------------------------------------------------------------------

ENDS = SAMPLED | {"eos_token_id": list(range(0, 97, 31))}


@pytest.mark.some_cases("family")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("config", [{}, {"cuda_graphs": False}], ids=str)
def test_lists_are_made_once_for_many_steps(
    device: str, family: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is guessed in each of them, and whichever answers have ended since."""
    made = noted(monkeypatch, RowsWork, "load", lambda self, step: self._drafts)
    steps = noted(monkeypatch, DecodeRows, "load", lambda self, batch, work: batch.draft_rows is not None)
    options = ENDS | {"max_new_tokens": 120, "logprobs": 1}
    plain, drafted = both(device, monkeypatch, config, 0.5, family=family, guessed=3, **options)
    assert_same(plain, drafted)
    ended = len({len(each.token_ids) for each in plain})
    assert ended > 6 and sum(steps) > 30 and sum(made) < 0.3 * sum(steps)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_to_the_last_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_over_references(monkeypatch)
    multiply_in_blocks(monkeypatch)
    monkeypatch.setattr("hf_batchllm.engine.look.refuse_by_trial", lambda *_: None)
    options = ENDS | {"max_new_tokens": 40, "num_return_sequences": 1, "logprobs": 1}
    plain, drafted = both("cpu", monkeypatch, {"invariant": True}, 0.5, family=family, guessed=3, **options)
    assert_same(plain, drafted)
    assert [each.logprobs for each in plain] == [each.logprobs for each in drafted]


class InTurns(GroupScheduler):
    """Some of the rows in each step, or all of them in another order."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.steps = how, 0

    def next(self) -> Step | None:
        step = super().next()
        if step is None or step.chunks or len(step.rows) < 3:
            return step
        self.steps += 1
        if self.how == "reversed" and self.steps % 2:
            step.rows.reverse()
        elif self.how == "halves" and self.steps % 3 != 1:
            half = len(step.rows) // 2
            stay = step.rows[:half] if self.steps % 3 else step.rows[half:]
            for request in stay:
                request.computed -= 1
            step.rows[:] = [request for request in step.rows if request not in stay]
        return step


@pytest.mark.parametrize("how", ["halves", "reversed"])
def test_lists_made_anew_in_a_room(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model that its user changes between two results, under a scheduler that leaves out some rows."""
    run_over_references(monkeypatch)
    model = copy.deepcopy(model_on("cpu", "llama"))
    options = [GenerationConfig(max_new_tokens=limit, do_sample=False) for limit in (12, 20, 28, 36, 44, 60, 80, 80)]
    plain = answers(model, PROMPTS, ON_A_GPU, generation_config=options)
    guess_from(plain, monkeypatch, 0.2)
    for each in options:
        each.prompt_lookup_num_tokens = 1  # so that all of them always have room
    made = noted(monkeypatch, RowsWork, "load", lambda self, step: self._drafts)
    drafted = {}
    with BatchGenerator(model, scheduler=InTurns(how), **ON_A_GPU) as generator:
        for result in generator.stream(PROMPTS, options):
            drafted[result.index] = result.token_ids
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # the same numbers
        report = generator.last_report
    assert [each.token_ids for each in plain] == [drafted[each.index] for each in plain]
    assert report.accepted_tokens > 0 and sum(made) > 4


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_batches_in_a_room(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what is built of the same step without what is known of the room."""
    run_over_references(monkeypatch)
    compared, own = [0], RoomBatches.batch

    def batch(self: RoomBatches, step: Step) -> ModelBatch:
        quick, whole = own(self, step), BatchBuilder(16, most_times=3)._build(step)
        for name, tensor in vars(whole.tokens).items():
            assert torch.equal(tensor, getattr(quick.tokens, name)), name
        assert torch.equal(whole.attention.slots, quick.attention.slots)
        for name in ("positions", "span_begin", "span_end", "span_position", "rows"):
            assert np.array_equal(getattr(whole.attention, name), getattr(quick.attention, name)), name
        assert whole.burst is not None and quick.burst is not None
        for name in ("times", "left", "start"):
            assert np.array_equal(getattr(whole.burst, name), getattr(quick.burst, name)), name
        assert (whole.burst.pages[:, 0] == quick.burst.pages[:, 0]).all()  # the only one that is written to
        compared[0] += 1
        return quick

    monkeypatch.setattr(RoomBatches, "batch", batch)
    assert_same(*both("cpu", monkeypatch, {}, 0.5, family=family, guessed=3, **ENDS, max_new_tokens=50))
    assert compared[0] > 20


@pytest.mark.some_cases("pages")
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.parametrize("pages", [12, 1000])
def test_prompts_that_come_between(scheduler: str, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most steps have no guess: they run in the same room, until a prompt is to be run."""
    run_over_references(monkeypatch)
    dice, own, chunks = random.Random(3), DraftsAhead.added, [0, 0]

    def added(self: DraftsAhead, step: Step) -> Step:
        chunks[0] += bool(step.chunks) and self.must_know
        drafted = own(self, step)
        chunks[1] += drafted is not step and not drafted.drafts
        return drafted

    monkeypatch.setattr(DraftsAhead, "added", added)
    model = model_on("cpu", "llama")
    config: dict[str, Any] = {"scheduler": scheduler, "kv_memory": pages_of_memory(model, pages, 16)}
    options = {"max_new_tokens": 60, "eos_token_id": list(range(0, 97, 20)), "do_sample": True, "seed": 3}
    plain = answers(model, PROMPTS, ON_A_GPU | config, **options)
    with monkeypatch.context() as patch:
        guess_from(plain, patch, 0.2)
        some = TextLookup.guess
        patch.setattr(TextLookup, "guess", lambda *given: some(*given) if dice.random() < 0.2 else [])
        drafted = answers(model, PROMPTS, ON_A_GPU | config, prompt_lookup_num_tokens=4, **options)
    assert_same(plain, drafted)
    assert chunks[1] > 0 and (chunks[0] > 0) == (pages == 12)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_packed_rows(rows: int) -> None:
    packed = PackedRows(rows, {"seat": 1, "token": 1}, {"length": 1, "pages": 2}, torch.device("cpu"))
    fields = {name: packed.field(name) for name in ("seat", "token", "length", "pages")}
    assert [each.dtype for each in fields.values()] == [torch.long, torch.long, torch.int32, torch.int32]
    assert [tuple(each.shape) for each in fields.values()] == [(rows,), (rows,), (rows,), (rows, 2)]
    assert all(
        each.is_contiguous() and each.data_ptr() % 64 == fields["seat"].data_ptr() % 64 for each in fields.values()
    )
    numbers, given = packed.on_host()
    for place, name in enumerate(fields):
        given[name][:] = np.arange(given[name].size).reshape(given[name].shape) + 100 * place
    packed.send(numbers)
    assert all(np.array_equal(each.numpy(), given[name]) for name, each in fields.items())


def begun() -> list[Request]:
    requests = requests_of(4, 20)
    for place, request in enumerate(requests):
        request.generated = [10 + place]
    return requests


def test_rows_have_room() -> None:
    requests = begun()
    room = DraftRoom.of(requests, np.array([3, 1, 2, 4]), np.array([9, 9, 9, 5]), 16)
    assert room.total == 10 and room.begin.tolist() == [0, 3, 4, 6]
    assert [room.most(request) for request in requests] == [2, 0, 1, 1]
    assert room.holds(requests[:3]) and not room.holds([*requests[:3], Request(4, np.array([1]), 2)])
    going = [requests[0], requests[2], requests[3]]
    rows = DraftRows.of(Step(going, drafts=[Chunk(requests[0], 3, 5, (7,)), Chunk(requests[3], 3, 5, (9,))], room=room))
    assert rows.total == 10 and np.arange(10)[rows.places].tolist() == [0, 1, 4, 6, 7]
    idle, last = rows.idle()
    assert idle.tolist() == [2, 5, 8, 9] and rows.ids[last].tolist() == [7, 12, 9, 9]
    assert room.holds(going[:2]) and not room.holds(going)  # 4 rows of the last one, of 4 positions, do not end at 5
    requests[0].generated += [1, 2, 3]
    assert room.holds(requests[:1]) and room.most(requests[0]) == 2
    requests[0].generated += [4]
    assert not room.holds(requests[:1])
    requests[0].max_new_tokens = 7  # these are all that it may have
    room = DraftRoom.of(requests, np.array([3, 1, 2, 4]), np.array([9, 9, 9, 5]), 16)
    assert room.holds(requests[:1]) and room.most(requests[0]) == 1


def test_which_tokens_count() -> None:
    requests = begun()
    drafts = [Chunk(requests[0], 3, 6, (7, 8)), Chunk(requests[3], 3, 5, (9,))]
    rows = DraftRows.of(Step(requests, drafts=drafts))
    assert rows.ids.tolist() == [10, 7, 8, 11, 12, 13, 9]
    assert rows.of_each_row(np.arange(4)).tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert rows.nth.tolist() == [0, 1, 2, 0, 0, 0, 1]
    drawn = np.array([7, 8, 20, 21, 22, 23, 24])
    assert rows.that_count(drawn).tolist() == [[7, 8, 20], [21, -1, -1], [22, -1, -1], [23, -1, -1]]
    drawn = np.array([7, 5, 20, 21, -1, 9, 24])
    assert rows.that_count(drawn).tolist() == [[7, 5, -1], [21, -1, -1], [-1, -1, -1], [9, 24, -1]]
    assert rows.that_count(np.array([6, 8, 20, 21, 22, 9, -1])).tolist()[0] == [6, -1, -1]
