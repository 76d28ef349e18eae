"""The table of what each part of the engine brings: each variant turns its thing off, and changes no token."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support_attention_twins import twins as twins  # a fixture
from support_bench import settings_of_others as settings_of_others  # a fixture
from support_families import build
from support_parity import pages_of_memory
from support_parity import watched as watched  # a fixture
from transformers import GenerationConfig

from hf_batchllm.bench import __main__ as bench
from hf_batchllm.bench import ablation, json_output, printed_tables
from hf_batchllm.bench.ablation import NAMES, Ablated, Ablation, Variant, ablate, variants_of, without_cascade
from hf_batchllm.bench.arguments import read_arguments
from hf_batchllm.bench.contenders import Ours
from hf_batchllm.bench.floor import Floor, Needs
from hf_batchllm.bench.machine_rates import Rates
from hf_batchllm.bench.measuring import Measurement
from hf_batchllm.bench.plot import plot
from hf_batchllm.bench.recording_scheduler import RecordingScheduler
from hf_batchllm.bench.workload import Workload
from hf_batchllm.model.torch_attention import CascadePlan
from hf_batchllm.model.triton_attention import TritonBackend
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Step

WORK = Workload(requests=14, shared=30, own=6, new=5, degree=4)
SMALL = "--config tiny --requests 6 --degree 3 --shared 40 --own 5 --new 3 --ablation".split()


@pytest.fixture(scope="module")
def model() -> Any:
    model = copy.deepcopy(build("llama"))
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


@dataclass
class Run:
    ours: Ours
    tokens: list[list[int]]
    rows: list[list[Request]] = field(default_factory=list)  # of each step
    chunks: list[list[Any]] = field(default_factory=list)  # the units of each step
    beside_prefixes: int = 0  # units that stand on what their own step computes


def run(model: Any, name: str, prompts: list[list[int]], max_running: int = 3, new: int = 5, **fields: Any) -> Run:
    variant = variants_of(NAMES, max_running)[0 if name == ablation.ALL_ON else NAMES.index(name) + 1]
    assert variant.name == name
    found = Run(variant.contender(model, {"min_shared_tokens": 1, **fields}), [])
    inner = found.ours.scheduler.inner
    next_step = inner.next

    def noted() -> Step | None:
        step = next_step()
        if step is not None:
            found.rows.append(list(step.rows))
            units = [chunk.unit for chunk in step.chunks]
            found.chunks.append(units)
            found.beside_prefixes += sum(below in units for unit in units for below, _ in unit.ancestors())
        return step

    inner.next = noted  # type: ignore[method-assign]
    with variant.around():
        found.tokens = found.ours.run(prompts, new)
    return found


@pytest.fixture(scope="module")
def all_on(model: Any) -> Run:
    return run(model, ablation.ALL_ON, WORK.prompts(101), max_batch_tokens=50)


@pytest.fixture
def proved(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(RecordingScheduler, "cache", property(lambda self: self.inner.cache), raising=False)
    return watched


@pytest.mark.some_cases
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("short_of_memory", [False, True])
def test_no_token_changes(name: str, short_of_memory: bool, model: Any, all_on: Run, proved: list[Any]) -> None:
    memory = {"kv_memory": pages_of_memory(model, 13, 8), "page_size": 8} if short_of_memory else {}
    found = run(model, name, WORK.prompts(101), max_batch_tokens=50, **memory)
    assert found.tokens == all_on.tokens
    assert found.ours.scheduler.most_running < 14 or not short_of_memory
    assert all(cache.free_pages == cache.num_pages for cache in proved) and proved


def test_without_sharing_all_tokens_are_computed(model: Any, all_on: Run) -> None:
    report = run(model, "sharing", WORK.prompts(101)).ours.report
    assert report.computed_tokens == report.prompt_tokens == 14 * 36
    assert all_on.ours.report.computed_tokens == 4 * 30 + 14 * 6


def test_prefixes_first(model: Any, all_on: Run) -> None:
    assert all_on.beside_prefixes > 0
    assert run(model, "same-step", WORK.prompts(101), max_batch_tokens=50).beside_prefixes == 0


@pytest.mark.some_cases
@pytest.mark.parametrize("budget", [1, 7, 36, 500])
@pytest.mark.parametrize("kind", ["one group", "nested", "the same"])
def test_prefixes_first_gets_on_whatever_the_list(kind: str, budget: int, model: Any) -> None:
    prompts = Workload(9, 30, 6, 3, degree=9).prompts(101)
    if kind == "nested":
        prompts = [prompt[:30] + [7] * (nth % 3) * 4 + prompt[30:] for nth, prompt in enumerate(prompts)]
    elif kind == "the same":
        prompts = [prompts[0]] * 9
    fields = {"max_batch_tokens": budget, "page_size": 8, "kv_memory": pages_of_memory(model, 12, 8)}
    found = run(model, "same-step", prompts, new=3, **fields)
    assert found.beside_prefixes == 0
    assert found.tokens == run(model, ablation.ALL_ON, prompts, new=3).tokens


def test_in_the_order_of_the_list(model: Any, all_on: Run) -> None:
    def entered(found: Run) -> list[int]:
        units = dict.fromkeys(unit for units in found.chunks for unit in units if isinstance(unit, Request))
        return [request.index for request in units]

    found = run(model, "order", WORK.prompts(101), max_batch_tokens=50)
    assert entered(found) == list(range(14)) != entered(all_on)
    for rows in found.rows:  # so that sharers are neighbours
        assert [row.rank for row in rows] == sorted(row.rank for row in rows)
    assert found.ours.report.computed_tokens == all_on.ours.report.computed_tokens


def test_a_prefix_that_nobody_reads_goes_for_the_next_of_the_list(model: Any, all_on: Run) -> None:
    """There is room for two of the four prefixes and for some who read them."""
    fields = {"kv_memory": pages_of_memory(model, 15, 8), "page_size": 8, "max_batch_tokens": 50}
    found = run(model, "order", WORK.prompts(101), **fields)
    assert found.ours.report.recomputed_tokens > 0 and found.tokens == all_on.tokens


def test_so_many_at_most(model: Any, all_on: Run) -> None:
    found = run(model, "admission", WORK.prompts(101), max_running=3)
    assert found.ours.scheduler.most_running == max(map(len, found.rows)) == 3
    assert all_on.ours.scheduler.most_running == 14


@pytest.mark.parametrize(
    ("name", "fields"),
    [("graphs", {"cuda_graphs": False}), ("run-ahead", {"steps_per_sync": 1}), ("patches", {"fuse": False})],
)
def test_what_a_field_turns_off(name: str, fields: dict[str, Any], model: Any) -> None:
    ours = next(variant for variant in variants_of([name]) if variant.name == name).contender(model, {"page_size": 16})
    assert {**ours.fields, "scheduler": None} == {"page_size": 16, **fields, "scheduler": None}


def test_without_a_cascade_rows_read_alone_in_torch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[CascadePlan] = []
    init = CascadePlan.__init__
    monkeypatch.setattr(CascadePlan, "__init__", lambda self, *given: (plans.append(self), init(self, *given))[1])

    def ranges_of_rows() -> list[int]:
        """How many ranges of rows read something together, in each step of rows alone."""
        steps = [plan for plan in plans if plan.batch.rows == len(plan.batch.spans)]
        assert steps
        return [len(plan._shared) for plan in steps]

    run(model, ablation.ALL_ON, WORK.prompts(101))
    assert min(ranges_of_rows()) == 4
    plans.clear()
    found = run(model, "cascade", WORK.prompts(101))
    assert max(ranges_of_rows()) == 0
    assert any(plan._shared for plan in plans)  # prompts are read as ever
    assert found.ours.report.computed_tokens == 4 * 30 + 14 * 6


def test_without_a_cascade_no_item_has_several_rows(model: Any, all_on: Run, twins: dict[str, Any]) -> None:
    def shared_items(name: str) -> int:
        twins["lists"].clear()
        found = run(model, name, WORK.prompts(101), page_size=16)
        assert found.tokens == all_on.tokens
        rows_alone = twins["lists"][-3:]  # the last steps have no prompts
        return sum(int((items[:, 1] > 1).sum()) for work in rows_alone for items in work.items.values())

    assert shared_items(ablation.ALL_ON) > 0
    assert shared_items("cascade") == 0
    assert shared_items(ablation.ALL_ON) > 0


def test_all_is_put_back_whatever_happens() -> None:
    def methods() -> tuple[Any, Any]:
        return TritonBackend.work_of, CascadePlan._divide

    def breaks_off() -> None:
        with without_cascade():
            assert all(now is not then for now, then in zip(methods(), before, strict=True))
            raise InterruptedError

    before = methods()
    with pytest.raises(InterruptedError):
        breaks_off()
    assert methods() == before


def test_the_table_and_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_batchllm.bench.measuring.measure_rates", lambda *given: Rates(1e11, 1e11))
    path = tmp_path / "figures.json"
    assert bench.main([*SMALL, "--runs", "2", "--max-running", "2", "--floor", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    for words in (
        "Medians of 2 rounds",
        "sharing: in the first round only",
        "The same tokens for all 6 prompts in each row.",
    ):
        assert words in said
    assert "kernel by kernel" in said and "without a GPU there are no CUDA graphs" in said
    assert max(map(len, said.splitlines())) <= 120
    rounds = [line for line in said.splitlines() if line.startswith("round ")]
    measured = ["all on", "sharing", "cascade", "same-step", "order", "admission"]
    names = [[part.rsplit(" ", 2)[0] for part in line.split(": ")[1].split(", ")] for line in rounds]
    assert names == [measured, [name for name in measured if name != "sharing"]]
    found = json.loads(path.read_text())
    rows = {row["off"]: row for row in found["ablation"]}
    assert list(rows) == [None, *NAMES] and found["floor"] is not None
    assert "nothing_to_turn_off" in rows["graphs"] and len(rows["cascade"]["runs"]) == 2
    assert rows["sharing"]["computed_tokens"] == 6 * 45 and rows["cascade"]["computed_tokens"] == 2 * 40 + 6 * 5
    assert rows["admission"]["most_running"] == 2 and rows[None]["most_running"] == 6
    for row in rows.values():
        if "runs" in row:
            assert row["times_slower"] == pytest.approx(row["seconds"] / rows[None]["seconds"])
            assert row["same_tokens_as_all_on"] == 6 and 0 < row["share_of_floor"] < 1


def test_some_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "admission,order", "--set", "page_size=16"]) == 0
    said = capsys.readouterr().out
    lines = said.split("\n\n")[-2].splitlines()
    assert [line.split()[0] for line in lines] == ["off", "nothing", "order:", "admission:"]
    assert "One run of each." in said and "so nothing was turned off" in said


def test_list_order_says_what_else_is_off_where_memory_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--config", "tiny", "--requests", "32", "--shared", "128", "--new", "8", "--ablation", "order"]
    for memory, said in (("1MB", True), ("64MB", False)):
        assert bench.main([*few, "--set", f"kv_memory={memory}"]) == 0
        assert ("order: requests are also admitted at their longest" in capsys.readouterr().out) is said


def test_a_variant_that_fails_is_reported_as_such(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(ablation.GroupScheduler):
        def next(self) -> Step | None:
            raise RuntimeError("out of luck\nand more")

    variants = [*variants_of(["order"]), Variant("late", "too late", scheduler=Fails)]
    found = ablate(model, {}, WORK, variants, runs=2, floor=False)
    assert [len(ablated.row.runs) for ablated in found.rows] == [2, 2, 0]
    assert "failed: RuntimeError: out of luck" in printed_tables.ablation_table(found)
    assert json_output.ablation_figures(found)["ablation"][-1]["error"] == "RuntimeError: out of luck"
    with pytest.raises(RuntimeError, match="out of luck"):
        ablate(model, {}, WORK, [Variant(ablation.ALL_ON, scheduler=Fails)], runs=1, floor=False)


def of_a_gpu(model: Any, all_on: Run) -> Ablation:
    """Made up, with figures as large as they get."""
    work = Workload(800, 2000, 200, 100, degree=16)
    floor = Floor(Needs(0, 0, 5.5e15, 4.27e11, 0.0, 0.0), Rates(667e12, 4.27e12), alone=False)
    report = all_on.ours.report
    assert report is not None
    report = type(report)(**{**vars(report), "computed_tokens": 1_760_000, "recomputed_tokens": 123_456})
    rows = [
        Ablated(
            variant,
            Measurement(variant.name, work, [100.0 + nth, 110.0 + nth], floor=floor),
            report,
            800,
            800 - (nth == 2),
        )
        for nth, variant in enumerate(variants_of(NAMES))
    ]
    for ablated in rows:
        ablated.row.made = [80_000] * 2
    return Ablation(rows, rounds=2)


def test_what_only_a_gpu_can_tell_has_its_place(model: Any, all_on: Run, tmp_path: Path) -> None:
    ablation_of = of_a_gpu(model, all_on)
    lines = printed_tables.ablation_table(ablation_of).splitlines()
    assert len({len(line) for line in lines[: len(NAMES) + 2]}) == 1 and max(map(len, lines)) <= 120
    assert "1.01 x" in lines[2] and "123,456" in lines[2] and "at most 256 at once" in lines[9]
    said = " ".join(lines)
    assert "except for these numbers of 800 prompts: 1 (cascade)." in said and "differ by up to 10.0 %" in said
    pytest.importorskip("matplotlib")
    found = {
        **json_output.machine_figures(model, "a model", "a GPU"),
        "work": "some",
        **json_output.ablation_figures(ablation_of),
    }
    plot(json.loads(json.dumps(found)), tmp_path / "ablation.svg")
    assert (tmp_path / "ablation.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ablation", "cascades"], "'cascades' is not one of sharing, cascade"),
        (["--ablation", "--degrees", "1,2"], "--degrees and --ablation are two tables"),
        (["--ablation", "--workload", "decode"], "prompts that share prefixes: leave out --workload decode"),
        (["--ablation", "--shared", "0"], "leave out --shared 0"),
        (["--ablation", "--degree", "1"], "leave out --degree 1"),
        (["--ablation", "--rivals", "generate"], "--rivals has no place in the table of --ablation: leave it out"),
        (["--ablation", "--stop-after", "5"], "--stop-after has no place in the table of --ablation"),
        (["--ablation", "--no-pieces"], "--no-pieces has no place"),
        (["--ablation", "--set", "scheduler=fifo"], "--ablation sets scheduler itself: leave out --set"),
        (["--ablation", "--set", "fuse=false"], "--ablation sets fuse itself: leave out --set"),
        (["--max-running", "5"], "--max-running is about the row admission of --ablation"),
        (["--ablation", "order", "--max-running", "5"], "--max-running is about the row admission of --ablation"),
    ],
)
def test_what_it_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert words in capsys.readouterr().err


def test_a_field_may_be_set_that_no_row_turns_off() -> None:
    asked = read_arguments(["--ablation", "order", "--set", "fuse=false", "--set", "kv_memory=3MB"], "bench")
    assert asked.fields == {"fuse": False, "kv_memory": "3MB"} and asked.ablation == ("order",) and asked.runs == 1
    assert read_arguments([], "bench").runs == 3 and read_arguments(["--ablation"], "bench").ablation == NAMES
