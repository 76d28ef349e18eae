"""Drafts in the loop of a GPU: each guessed token is a row of its own, and the device draws the tokens of all rows."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on, run_over_twins
from support_drafts import Clock, always_pay
from support_families import random_prompts
from support_fuzz_calls import multiply_in_blocks
from support_parity import pages_of_memory
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows, RowsWork
from hf_batchllm.engine.device_loop.graph_launcher import GraphLauncher
from hf_batchllm.engine.device_loop.graph_sizes import size_of
from hf_batchllm.engine.device_loop.packed_rows import PackedRows
from hf_batchllm.engine.drafts import drafts_ahead
from hf_batchllm.engine.drafts.drafts_ahead import DraftsAhead
from hf_batchllm.engine.drafts.step_seconds import StepSeconds
from hf_batchllm.engine.loop import Engine
from hf_batchllm.model.batch import ModelBatch
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.model.draft_rows import DraftRows
from hf_batchllm.model.room_batches import RoomBatches
from hf_batchllm.model.torch_attention import TorchBackend
from hf_batchllm.model.triton_attention import TritonBackend
from hf_batchllm.planning.draft_room import DraftRoom
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import GroupScheduler
from hf_batchllm.planning.step import Chunk, Step
from hf_batchllm.sampling.text_lookup import TextLookup

PROMPTS = random_prompts(random.Random(5), 97, "mixed", 8)[:8]
NEW_TOKENS = 40
SAMPLED = {"do_sample": True, "temperature": 1.3, "seed": 3, "num_return_sequences": 2}
ON_A_GPU = {"page_size": 16, "steps_per_sync": 3}  # as on a CPU, so that guesses begin as early


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts begin after the first burst, and all guesses pay."""
    always_pay(monkeypatch)


def guess_from(answers: BatchResult, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    """Guesses are what an answer goes on with, but for some tokens."""
    dice = random.Random(7)
    known = {(tuple(PROMPTS[each.index]), each.sample): each.token_ids for each in answers}

    def guess(self: TextLookup, sample: int, generated: Sequence[int], most: int) -> list[int]:
        if dice.random() < 0.2:
            return []
        rest = known[tuple(self._prompt), sample][len(generated) :]
        some = [*rest, *[dice.randrange(97) for _ in range(3)]][: dice.randint(1, most)]
        return [dice.randrange(97) if dice.random() < wrong else token for token in some]

    monkeypatch.setattr(TextLookup, "guess", guess)


def told(result: BatchResult) -> list[Any]:
    return [(each.token_ids, each.finish_reason, each.logprobs, each.prompt_logprobs) for each in result]


def both(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    wrong: float = 0.2,
    family: str = "llama",
    guessed: int = 5,
    **options: Any,
) -> tuple[BatchResult, BatchResult]:
    """Without drafts, and with drafts of which some are wrong."""
    options = {"max_new_tokens": NEW_TOKENS, "progress": False, **options}
    model = model_on(device, family)
    with BatchGenerator(model, **ON_A_GPU | config) as generator:
        plain = generator.generate(PROMPTS, **options)
    with monkeypatch.context() as patch, BatchGenerator(model, **ON_A_GPU | config) as generator:
        guess_from(plain, patch, wrong)
        drafted = generator.generate(PROMPTS, prompt_lookup_num_tokens=guessed, **options)
    return plain, drafted


def assert_same(plain: BatchResult, drafted: BatchResult) -> None:
    assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
    assert drafted.report is not None and drafted.report.accepted_tokens > 0


CONFIGS: list[dict[str, Any]] = [
    {}, {"share_prefixes": False}, {"cuda_graphs": False}, {"steps_per_sync": 1}, {"scheduler": "fifo"},
    {"keep_prefixes": 4}, {"steps_per_sync": 6, "min_shared_tokens": 4},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, SAMPLED, {"eos_token_id": list(range(0, 97, 13))}, {"logprobs": 2, "prompt_logprobs": 1},
    SAMPLED | {"logprobs": 1, "eos_token_id": [3, 50, 60, 61]}, {"min_new_tokens": 6, "eos_token_id": [1, 2, 3, 4, 5]},
]  # fmt: skip


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_the_same(
    device: str, config: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted = both(device, monkeypatch, config, **options)
    near = [[each.token_ids for each in result] for result in (plain, drafted)]
    assert near[0] == near[1]
    assert [each.finish_reason for each in plain] == [each.finish_reason for each in drafted]
    assert [len(each.logprobs or []) for each in plain] == [len(each.logprobs or []) for each in drafted]
    ours, theirs = drafted.report, plain.report
    assert ours is not None and theirs is not None
    assert 0 < ours.accepted_tokens < ours.drafted_tokens
    assert ours.new_tokens == theirs.new_tokens
    assert ours.computed_tokens == theirs.computed_tokens
    assert f"{ours.accepted_tokens:,} of them right" in str(ours)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3", "mixtral", "gpt2", "phi3"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_families(device: str, family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*both(device, monkeypatch, {}, family=family, **options))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("guessed", [15, 16, 17, 30])
def test_long_drafts(device: str, guessed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay decode rows, where a part of a prompt as long would not be."""
    plain, drafted = both(device, monkeypatch, {}, 0.0, guessed=guessed)
    assert_same(plain, drafted)
    assert drafted.report is not None and drafted.report.steps < 0.7 * (plain.report.steps if plain.report else 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_over_plain_pytorch(refused: bool, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend on a GPU without kernels, and layers that kernels refuse: there each row is by itself."""
    run_over_twins(monkeypatch)
    if refused:
        monkeypatch.setattr(TritonBackend, "refusal", lambda self, _: self._refusals.setdefault(0, "no such shape"))
    else:
        monkeypatch.setattr(
            "hf_batchllm.model.model_in_use.make_backend",
            lambda config, device, storage, _: TorchBackend(storage, device),
        )
        monkeypatch.setattr("hf_batchllm.engine.wiring.graphs_for", lambda *_: None)
    assert_same(*both("cpu", monkeypatch, {}, family=family))


@pytest.mark.usefixtures("always")
def test_where_memory_is_short_steps_run_ahead_as_ever(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft runs until steps may be of any size again, and none of them waits for one."""
    model = model_on(device, "llama")
    options: dict[str, Any] = {"max_new_tokens": 300, "progress": False}
    launched: list[Step] = []
    own = Engine._launch

    def launch(self: Engine, step: Step) -> Any:
        launched.append(step)
        if len(launched) == 1:
            raise torch.OutOfMemoryError("no memory for this one")
        return own(self, step)

    with BatchGenerator(model, **ON_A_GPU | {"steps_per_sync": 32}) as generator:
        plain = generator.generate(PROMPTS, **options)
        guess_from(plain, monkeypatch, 0.2)
        monkeypatch.setattr(Engine, "_launch", launch)
        drafted = generator.generate(PROMPTS, prompt_lookup_num_tokens=5, **options)
    assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
    assert sum(step.times == 1 and not step.drafts and not step.chunks for step in launched) < 20


@pytest.mark.usefixtures("always")
def test_in_little_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"kv_memory": pages_of_memory(model_on(device, "llama"), 24, 16)}
    assert_same(*both(device, monkeypatch, config, max_new_tokens=60))


@pytest.mark.usefixtures("always")
def test_some_look_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those nothing is guessed: the device would put guesses down as tokens of theirs."""
    from transformers import GenerationConfig

    configs = [
        GenerationConfig(max_new_tokens=NEW_TOKENS, repetition_penalty=1.3 if place % 2 else 1.0) for place in range(8)
    ]
    model = model_on(device, "llama")
    with BatchGenerator(model, **ON_A_GPU) as generator:
        plain = generator.generate(PROMPTS, configs, progress=False)
    for config in configs:
        config.prompt_lookup_num_tokens = 5
    with BatchGenerator(model, **ON_A_GPU) as generator:
        guess_from(plain, monkeypatch, 0.2)
        with pytest.warns(UserWarning, match="no tokens are guessed for 4 prompts: the GPU looks back"):
            drafted = generator.generate(PROMPTS, configs, progress=False)
    assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
    assert drafted.report is not None and drafted.report.accepted_tokens > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"repetition_penalty": 1.2}, "looks back at"),
        ({"output_scores": True, "return_dict_in_generate": True}, "scores"),
    ],
    ids=["penalty", "scores"],
)
def test_where_there_are_none_a_warning_says_so(device: str, options: dict[str, Any], why: str) -> None:
    asked = {"max_new_tokens": 3, "prompt_lookup_num_tokens": 4, "progress": False, **options}
    prompts: Any = [[1, 2, 1, 2]]
    if "output_scores" in options:
        prompts = torch.tensor(prompts, device=device)
    with (
        BatchGenerator(model_on(device, "llama"), **ON_A_GPU) as generator,
        pytest.warns(UserWarning, match=f"no effect here.*{why}"),
    ):
        generator.generate(prompts, **asked)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("tokens", [400, 60])
def test_graphs_are_captured_before_the_first_step_with_drafts(
    device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While bursts run; where few tokens are to come, of one size."""
    monkeypatch.setattr(drafts_ahead, "_BURSTS_FOR_GRAPHS", 100)
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda _: True)
    made: list[tuple[int, bool]] = []  # of each graph, its rows, and whether steps with drafts had run before
    seen, own, own_run = [False], DecodeGraphs._make, DecodeGraphs.run

    def make(self: DecodeGraphs, kind: Any) -> Any:
        if kind.drafts:
            made.append((kind.rows, seen[0]))
        return own(self, kind)

    def run(self: DecodeGraphs, batch: Any, steps_to_come: int) -> Any:
        seen[0] |= batch.draft_rows is not None
        return own_run(self, batch, steps_to_come)

    monkeypatch.setattr(DecodeGraphs, "_make", make)
    monkeypatch.setattr(DecodeGraphs, "run", run)
    assert_same(*both(device, monkeypatch, {"steps_per_sync": 8}, max_new_tokens=tokens))
    assert made == [(64, False)]


def test_which_graphs_are_worth_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for few rows only if many steps are left with so few."""
    requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 100) for place in range(40)]
    drafts = DraftsAhead(lambda _: 8, lambda _: 3, requests, lambda _, end: end, None, 10**6)
    monkeypatch.setattr(drafts, "_of_all", (0.5, 1.0))
    for size, seconds in ((16, 0.005), (64, 0.006), (128, 0.007), (256, 0.010)):
        drafts._device.note(size, seconds)
    assert drafts._sizes_to_come(requests, 40 * 5) == [256]  # all end at the same time
    for place, request in enumerate(requests):
        request.max_new_tokens = 100 + 20 * place
    assert drafts._sizes_to_come(requests, 40 * 5) == [128, 256]
    for place, request in enumerate(requests):
        request.max_new_tokens = 100 + 200 * place
    assert drafts._sizes_to_come(requests, 40 * 5) == [16, 64, 128, 256]
    assert drafts._sizes_to_come(requests[:20], 60) == [16, 64]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("config", [{}, {"cuda_graphs": False}], ids=str)
def test_lists_are_made_once_for_many_steps(
    device: str, family: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is guessed in each of them, and whichever answers have ended since."""
    made, steps, own, own_load = [0], [0], RowsWork.load, DecodeRows.load

    def load_lists(self: RowsWork, step: Any) -> None:
        made[0] += self._drafts
        own(self, step)

    def load(self: DecodeRows, batch: Any, work: Any) -> None:
        steps[0] += batch.draft_rows is not None
        own_load(self, batch, work)

    monkeypatch.setattr(RowsWork, "load", load_lists)
    monkeypatch.setattr(DecodeRows, "load", load)
    options = SAMPLED | {"eos_token_id": list(range(0, 97, 31)), "max_new_tokens": 120}
    plain, drafted = both(device, monkeypatch, config, 0.5, family=family, guessed=3, logprobs=1, **options)
    assert_same(plain, drafted)
    ended = len({len(each.token_ids) for each in plain})
    assert ended > 6 and steps[0] > 30 and made[0] < 0.3 * steps[0]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_to_the_last_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_over_twins(monkeypatch)
    multiply_in_blocks(monkeypatch)
    monkeypatch.setattr("hf_batchllm.engine.call.refuse_by_trial", lambda *_: None)
    options = SAMPLED | {"eos_token_id": list(range(0, 97, 31)), "max_new_tokens": 120, "logprobs": 1}
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
        elif self.how == "halves" and self.steps % 3:
            half = len(step.rows) // 2
            stay = step.rows[:half] if self.steps % 3 == 1 else step.rows[half:]
            for request in stay:
                request.computed -= 1
            step.rows[:] = [request for request in step.rows if request not in stay]
        return step


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("how", ["halves", "reversed"])
def test_lists_made_anew_in_a_room(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model that its owner changes between two results, under a scheduler that leaves out some rows."""
    run_over_twins(monkeypatch)
    model = copy.deepcopy(model_on("cpu", "llama"))
    options = [GenerationConfig(max_new_tokens=limit, do_sample=False) for limit in (12, 20, 28, 36, 44, 60, 80, 80)]
    with BatchGenerator(model, **ON_A_GPU) as generator:
        plain = generator.generate(PROMPTS, options, progress=False)
    guess_from(plain, monkeypatch, 0.2)
    for each in options:
        each.prompt_lookup_num_tokens = 3
    made, own = [0], RowsWork.load

    def load(self: RowsWork, step: Any) -> None:
        made[0] += self._drafts
        own(self, step)

    monkeypatch.setattr(RowsWork, "load", load)
    drafted = {}
    with BatchGenerator(model, scheduler=InTurns(how), **ON_A_GPU) as generator:
        for result in generator.stream(PROMPTS, options):
            drafted[result.index] = result.token_ids
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # the same numbers
        report = generator.last_report
    assert [each.token_ids for each in plain] == [drafted[each.index] for each in plain]
    assert report is not None and report.accepted_tokens > 0 and made[0] > 4


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_batches_in_a_room(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what is built of the same step without what is known of the room."""
    run_over_twins(monkeypatch)
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
    options = SAMPLED | {"eos_token_id": list(range(0, 97, 31)), "max_new_tokens": 90}
    assert_same(*both("cpu", monkeypatch, {}, 0.5, family=family, guessed=3, **options))
    assert compared[0] > 20


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


def test_rows_have_room() -> None:
    requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 20) for place in range(4)]
    for place, request in enumerate(requests):
        request.generated = [10 + place]
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
    requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 20) for place in range(4)]
    for place, request in enumerate(requests):
        request.generated = [10 + place]
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


# -- when they pay ---------------------------------------------------------------------------------------------------


def seconds_of(
    right: float, rows: int, host: float, each: float, monkeypatch: pytest.MonkeyPatch, guesses: float = 1.0
) -> float:
    """How many times as long it takes, where guesses are right with this chance, a step takes 1 second and each of its
    tokens so many beside, and the host so many between two steps that it waits for."""
    with monkeypatch.context() as patch:
        return _seconds_of(right, rows, host, each, Clock(patch), guesses)


def _seconds_of(right: float, rows: int, host: float, each: float, clock: Clock, guesses: float) -> float:
    dice, times, total = random.Random(3), 16, 600
    requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 10**6) for place in range(rows)]
    drafts = DraftsAhead(lambda _: 8, lambda _: 3, requests, lambda _, end: end, None, 10**6)
    guess: Callable[[Any], list[int]] = lambda _: [1] * 8 if dice.random() < guesses else []  # noqa: E731
    drafts._guess = guess  # type: ignore[method-assign]
    for request in requests:
        request.generated, request.computed = [1], 4

    def token() -> int:
        return 1 if dice.random() < right else 2

    while sum(len(request.generated) for request in requests) < total * rows:
        step, began = Step(requests), clock.now
        waited = drafts.must_know
        step.times = drafts.most_times(step, times)
        step = drafts.added(step)
        clock.now += host if waited else 0.0
        launched = clock.now
        drafts.launched(step)
        size = size_of(step.tokens) if step.room is None else step.room.size
        clock.now += step.times * (1 + each * size)
        gained = 0
        if step.in_rows:
            for request in requests:
                request.generated.append(token())
            gained += rows
            for chunk in step.drafts:
                accepted = 0
                assert isinstance(chunk.unit, Request)
                while accepted < len(chunk.draft) and chunk.unit.generated[-1] == 1:
                    chunk.unit.generated.append(token())
                    accepted += 1
                gained += accepted
                drafts.seen(chunk.unit, len(chunk.draft), accepted)
        else:
            drafts.before(step)
            for request in requests:
                request.generated += [token() for _ in range(step.times)]
        drafts.ran(step, began, launched, gained or rows, True)
    made = sum(len(request.generated) for request in requests) / rows
    return clock.now / (made * (1 + each * size_of(rows)))


@pytest.mark.parametrize("rows", [1, 8, 40, 100])
@pytest.mark.parametrize("host", [0.1, 0.5])
def test_drafts_cost_little_where_guesses_are_wrong(rows: int, host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    each = 1 / 320
    assert seconds_of(0.0, rows, host, each, monkeypatch) < 1.02
    assert seconds_of(0.2, rows, host, each, monkeypatch) < 1.06
    assert seconds_of(0.4, rows, host, each, monkeypatch) < 1.06
    assert seconds_of(0.95, rows, host, each, monkeypatch, guesses=0.1) < 1.1
    assert seconds_of(0.95, rows, host, each, monkeypatch) < (0.4 if rows < 20 else 0.8)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_drafts_that_pay_go_on(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a room ends."""
    ends, own = [0], DraftsAhead._end

    def end(self: DraftsAhead) -> None:
        ends[0] += 1
        own(self)

    monkeypatch.setattr(DraftsAhead, "_end", end)
    assert seconds_of(0.95, rows, 0.1, 1 / 320, monkeypatch) < 0.8
    assert ends[0] == 0
    assert seconds_of(0.7, rows, 0.1, 1 / 320, monkeypatch, guesses=0.6) < (0.7 if rows == 1 else 0.9)
    assert ends[0] < 5


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.parametrize("pages", [12, 1000])
def test_prompts_that_come_between(scheduler: str, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most steps have no guess: they run in the same room, until a prompt is to be run."""
    run_over_twins(monkeypatch)
    dice, own, chunks = random.Random(3), DraftsAhead.most_times, [0, 0]

    def most_times(self: DraftsAhead, step: Step, most: int) -> int:
        chunks[0] += bool(step.chunks) and self.must_know
        times = own(self, step, most)
        chunks[1] += self._planned is not None and not self._planned.drafts
        return times

    monkeypatch.setattr(DraftsAhead, "most_times", most_times)
    model = model_on("cpu", "llama")
    config: dict[str, Any] = {"scheduler": scheduler, "kv_memory": pages_of_memory(model, pages, 16)}
    options = {"max_new_tokens": 60, "eos_token_id": list(range(0, 97, 20)), "do_sample": True, "seed": 3}
    with BatchGenerator(model, **ON_A_GPU | config) as generator:
        plain = generator.generate(PROMPTS, progress=False, **options)
    with monkeypatch.context() as patch, BatchGenerator(model, **ON_A_GPU | config) as generator:
        guess_from(plain, patch, 0.2)
        some = TextLookup.guess
        patch.setattr(TextLookup, "guess", lambda *given: some(*given) if dice.random() < 0.2 else [])
        drafted = generator.generate(PROMPTS, progress=False, prompt_lookup_num_tokens=4, **options)
    assert_same(plain, drafted)
    assert chunks[1] > 0 and (chunks[0] > 0) == (pages == 12)


def test_a_pause_of_the_callers_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream hands a result out between two steps."""
    with monkeypatch.context() as patch:
        clock, own, drafted = Clock(patch), DraftsAhead.most_times, []

        def most_times(self: DraftsAhead, step: Step, most: int) -> int:
            times = own(self, step, most)
            if self._planned is not None:
                drafted.append(step)
                clock.now += 50 if len(drafted) == 10 else 0
            return times

        patch.setattr(DraftsAhead, "most_times", most_times)
        assert _seconds_of(0.95, 8, 0.1, 1 / 320, clock, 1.0) < 0.5
    assert len(drafted) > 50


def test_how_long_steps_take() -> None:
    seconds = StepSeconds()
    assert seconds.of(8) is None
    seconds.note(64, 1.0)
    assert seconds.of(64) == 1.0
    twice, half = seconds.of(64 + 320), seconds.of(1)
    assert twice == pytest.approx(2.0) and half is not None and 0.7 < half < 1
    seconds.note(256, 2.0)
    assert seconds.of(160) == pytest.approx(1.5) and seconds.of(448) == pytest.approx(3.2)
    for _ in range(20):
        seconds.note(256, 1.5)
    assert seconds.of(256) == pytest.approx(1.5, abs=0.01)
    seconds.note(16, 0.2)  # then the others were far too slow
    largest = seconds.of(256)
    assert largest is not None and largest <= 0.2 * 4.01 and seconds.of(16) == 0.2


def test_how_long_steps_take_that_read_much() -> None:
    """What many answers read is no time of their rows: as many rows of few answers are faster."""
    seconds = StepSeconds(share=1e-5)

    def taken(rows: int, read: int) -> float:
        return 5.0 * (1 + rows / 320) + 5.0 * 1e-5 * read

    for rows in (256, 240, 208, 160):
        seconds.note(rows, taken(rows, 500 * rows), 500 * rows)
    for rows, read in ((256, 100 * 500), (160, 100 * 500), (512, 100 * 500)):
        assert seconds.of(rows, read) == pytest.approx(taken(rows, read), rel=0.15)


def test_a_full_batch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of(0.9, 300, 0.1, 1 / 320, monkeypatch) == pytest.approx(1.0, abs=0.01)  # the last burst is cut off
