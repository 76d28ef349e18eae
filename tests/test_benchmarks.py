"""The scripts of examples/benchmarks that run on a CPU, in their smallest form; and what they find that is off."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support_bench import settings_of_others as settings_of_others  # a fixture
from support_fused import REFERENCES
from support_invariant import that_counts_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "benchmarks"))

import bench_ablation as ablation
import bench_agreement
import bench_experts
import bench_profile as profile
import calibrate_experts
import check_invariant
import common
import plot
from bench_experts import NAMES, ExpertShape, experts_of, with_tokens

from hf_batchllm.bench.workload import SHAPES, Workload, load_model, words_of
from hf_batchllm.model.attention.torch_attention import CascadePlan
from hf_batchllm.model.attention.triton_attention import TritonBackend

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "benchmarks"
FEW = "--requests 6 --degree 3 --shared 40 --own 5 --new 3"
ON_A_CPU = {
    "bench_ablation": f"{FEW} --parts order admission --max-running 2 --floor",
    "bench_admission": f"{FEW} --memory 1MB",
    "bench_agreement": "--prompts 2 --samples 2 --prompt 9 --new 4 --ways BatchGenerator generate",
    "bench_grammar_masks": "--vocabulary 3000 --rows 4 --steps 5",
    "bench_images": "--config tiny --images 2 --questions 2 --new 4 --runs 1 --batches 2 --size 56",
    "bench_invariant": "--times 1 --short",
    "bench_options": "--requests 3 --prompt 8 --new 4 --runs 1 --only greedy eight",
    "bench_pool": f"{FEW} --gpus cpu,cpu --runs 1",
    "bench_rollouts": "--steps 2 --prompts 2 --samples 4 --rows 4 --shared 32 --own 8 --new 6 --ways generate hook",
    "bench_scoring": "--questions 4 --shots 1 --question 6 --answer 3 --choices 2 --runs 1 --batch-sizes 1 2",
    "check_invariant": "--cases 4 --longest 60 --new 6 --seed 1 --dtype float32",
    "simulate_schedule": "--cases 16,",
}
NEED_A_GPU = (
    "bench_decode_attention bench_prefill_attention calibrate_attention calibrate_cards bench_experts "
    "calibrate_experts bench_small_kernels bench_sampling_kernels bench_fused_layers bench_prompt_step "
    "bench_two_streams bench_graph_sizes bench_profile"
).split()


def lines_of(printed: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}


@pytest.mark.some_cases
@pytest.mark.parametrize("script", sorted(ON_A_CPU))
def test_a_script_runs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    if script == "bench_rollouts":
        pytest.importorskip("trl", reason="needs the extra `trl`")
    device = [] if script in ("bench_grammar_masks", "simulate_schedule") else ["--device", "cpu"]
    assert not importlib.import_module(script).main([*ON_A_CPU[script].split(), *device])
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("script", NEED_A_GPU)
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_script_says_that_it_needs_a_gpu(script: str) -> None:
    with pytest.raises(SystemExit, match="GPU"):
        importlib.import_module(script).main([])


def test_every_script_is_in_the_list_of_scripts() -> None:
    page = (FOLDER / "README.md").read_text()
    assert [path.name for path in FOLDER.glob("*.py") if f"[{path.name}]" not in page] == []
    known = {*ON_A_CPU, *NEED_A_GPU, "bench_drafts", "bench_harness", "bench_host_time", "bench_tensor_parallel"}
    assert {path.stem for path in FOLDER.glob("*_*.py")} - known <= {
        "attention_libraries",
        "attention_rivals",
        "other_schedulers",
        "simulated_gpu",
    }


def test_a_table_keeps_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = common.Table({"name": "<6", "ms": "8.2f", "share": "+6.1%"})
    table.add({"name": "one", "ms": 1.5, "share": 0.25}, more=[1])
    table.add({"name": "two"})
    assert capsys.readouterr().out.splitlines() == [
        "name         ms  share", "one        1.50 +25.0%", "two           -      -"
    ]  # fmt: skip
    table.write(tmp_path / "rows.json", rates=3)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0] == {
        "name": "one", "ms": 1.5, "share": 0.25, "more": [1]
    }  # fmt: skip


# -- one part off at a time ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(None, "tiny", torch.device("cpu"), torch.float32)


def off(model: Any, name: str, **fields: Any) -> tuple[list[list[int]], Any]:
    """The tokens of a run with one part off, and its report."""
    variant = ablation.variants(3)[name] if name else ablation.Variant(ablation.ALL_ON)
    work = Workload(requests=14, shared=30, own=6, new=5, degree=4)
    given = {"min_shared_tokens": 1, "page_size": 8, "max_batch_tokens": 50, **fields}
    ours = ablation.contender(model, variant, given)
    with variant.around():
        tokens = ours(work.prompts(words_of(model)), work.answers)
    return tokens, ours.report


@pytest.mark.some_cases
@pytest.mark.parametrize("pages", [None, 13])
@pytest.mark.parametrize("name", ablation.variants())
def test_no_token_changes_with_a_part_off(name: str, pages: int | None, model: Any) -> None:
    memory = {} if pages is None else {"kv_memory": pages * 8 * 2 * 2 * 32 * 4 * 4}
    all_on, whole = off(model, "")
    tokens, report = off(model, name, **memory)
    assert tokens == all_on
    assert report.computed_tokens == (14 * 36 if name == "sharing" else whole.computed_tokens)
    running = int(report.timeline.running.max())
    assert running == 3 if name == "admission" and pages is None else running < 14 if pages else running == 14


def test_readers_that_wait_for_a_prefix_take_a_step_more(model: Any) -> None:
    together, apart = (off(model, name, max_batch_tokens=1000)[1].steps for name in ("", "same-step"))
    assert apart == together + 1


def test_without_a_cascade_rows_read_alone_and_all_is_put_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[CascadePlan] = []
    init, before = CascadePlan.__init__, (TritonBackend.work_of, CascadePlan._divide)
    monkeypatch.setattr(CascadePlan, "__init__", lambda self, *given: (plans.append(self), init(self, *given))[1])

    def read_together(name: str) -> int:
        plans.clear()
        off(model, name, max_batch_tokens=1000)
        return max(len(plan._shared) for plan in plans if plan.batch.rows == len(plan.batch.spans))

    assert read_together("") == 4 and read_together("cascade") == 0
    with pytest.raises(InterruptedError), ablation.without_cascade():
        raise InterruptedError
    assert (TritonBackend.work_of, CascadePlan._divide) == before


def test_a_variant_that_fails_is_reported_and_its_figures_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(ablation.InListOrder):
        def next(self) -> Any:
            raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(ablation, "InListOrder", Fails)
    path = tmp_path / "ablation.json"
    ablation.main([*FEW.split(), "--device", "cpu", "--parts", "order", "cascade", "--runs", "2", "--json", str(path)])
    said = capsys.readouterr().out
    assert "RuntimeError: out of luck" in said and "Medians of 2 rounds" in said
    rows = json.loads(path.read_text())["rows"]
    assert [len(row.get("runs", [])) for row in rows] == [2, 2, 0]
    pytest.importorskip("matplotlib")
    plot.draw(json.loads(path.read_text()), tmp_path / "ablation.svg")
    assert (tmp_path / "ablation.svg").read_text().rstrip().endswith("</svg>")


def test_a_field_that_a_row_varies_is_not_set_for_all() -> None:
    for more in (["--set", "fuse=false"], ["--vary", "page_size=16,32", "--set", "page_size=8"]):
        with pytest.raises(SystemExit, match="is what a row varies: leave out one of them"):
            ablation.main([*more, "--device", "cpu"])


# -- where a GPU's time goes -----------------------------------------------------------------------------------


def test_where_a_devices_time_goes() -> None:
    ms = 1_000_000
    spans = [
        profile.Span("nvjet_tst_128x256", 0, 4 * ms),
        profile.Span("_attend_chunks", 4 * ms, 6 * ms),  # the last with prompts
        profile.Span("_act_and_mul", 6 * ms + 5_000, 7 * ms),  # 5 us later
        profile.Span("_attend_items", 9 * ms, 12 * ms),  # two at a time
        profile.Span("_attend_items", 10 * ms, 11 * ms),
        profile.Span("void at::native::elementwise_kernel<128, 4>(int)", 11 * ms, 13 * ms),
    ]
    found = profile.time_of(spans)
    assert sum(found.parts) == pytest.approx(0.013) and found.kernels == 6
    assert found.seconds["products"] == [0.004, 0] and found.seconds["attention of prompts"] == [0.002, 0]
    assert found.seconds["attention of answers"] == [0, pytest.approx(0.003)]
    assert found.seconds["idle, under 10 us at a time"] == [0, pytest.approx(5e-6)]
    assert found.seconds["idle, longer"] == [0, pytest.approx(0.002)]
    assert found.busy == [1.0, pytest.approx(1 - 2.005 / 7)]
    assert found.gaps[-1] == (pytest.approx(0.007), pytest.approx(0.002), "_act_and_mul", "_attend_items")
    assert profile.kind_of("splitKreduce_kernel") == "products" and profile.kind_of("Memcpy HtoD (Pinned)") == "copies"


# -- agreement, and invariant=True -----------------------------------------------------------------------------

AGREE = "--device cpu --dtype float32 --prompts 2 --samples 2 --prompt 9 --new 4 --ways BatchGenerator".split()


def test_probabilities_that_are_off_are_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures() -> list[float]:
        bench_agreement.main(AGREE)
        return [float(each.rstrip("%")) for each in lines_of(capsys.readouterr().out)["BatchGenerator"]]

    tokens, far, mean, largest, bias = figures()
    assert tokens == 2 * 2 * 4 and far == 0 and mean < 1e-4 and largest <= 1e-3 and abs(bias) < 1e-4
    by_us = bench_agreement.by_us

    def moved(*given: Any) -> Any:
        rows = by_us(*given)
        for row in rows:
            row.logprobs[0] -= 0.2  # one token of four
        return rows

    monkeypatch.setitem(bench_agreement.WAYS, "BatchGenerator", moved)
    assert figures()[1:] == [pytest.approx(each, abs=1e-3) for each in (25.0, 0.05, 0.2, 0.05)]


def test_heads_are_narrowed_to_the_entropy_that_was_asked_for() -> None:
    model = load_model(None, "tiny", torch.device("cpu"), torch.float32)
    bench_agreement.narrow(model, [[1, 2, 3, 4, 5]], 1.0)
    logits = model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0]
    assert torch.distributions.Categorical(logits=logits).entropy().mean().item() == pytest.approx(1.0, abs=1e-3)


def test_cases_that_differ_are_counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--device", "cpu", "--cases", "16", "--longest", "60", "--new", "6", "--seed", "1"]
    assert check_invariant.main(few) == 0
    assert lines_of(capsys.readouterr().out)["all"] == ["16", "0"]
    own = common.load_model
    monkeypatch.setattr(common, "load_model", lambda *given: that_counts_rows(own(*given)))
    check_invariant.main([*few, "--without"])
    cases, differ = lines_of(capsys.readouterr().out)["all"]
    assert cases == "16" and int(differ) > 0


# -- experts ---------------------------------------------------------------------------------------------------

LESS: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {"hidden_size": 64, "num_experts": 16, "moe_intermediate_size": 32},
    "gpt-oss-20b": {"hidden_size": 64, "num_local_experts": 8, "intermediate_size": 32},
    "mixtral-8x7b": {"hidden_size": 64, "intermediate_size": 32},
}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def some_experts(name: str) -> list[Any]:
    return experts_of(name, 2, "cpu", torch.float32, **LESS[name] | FEW_HEADS)


def test_the_shapes_of_experts_and_their_floor() -> None:
    shapes = {name: ExpertShape.of(name) for name in NAMES}
    assert shapes == {
        "qwen3-30b-a3b": ExpertShape(128, 8, 2048, 768),
        "gpt-oss-20b": ExpertShape(32, 4, 2880, 2880),
        "mixtral-8x7b": ExpertShape(8, 2, 4096, 14336),
    }
    shape = shapes["qwen3-30b-a3b"]  # reading for few tokens, computing for many
    up, down = shape.floors(16, met=80, copy=4e12, matmul=8e14)
    assert up == pytest.approx(1e3 * 80 * 2 * 768 * 2048 * 2 / 4e12) == 2 * down
    up, down = shape.floors(100_000, met=128, copy=4e12, matmul=8e14)
    assert up == pytest.approx(1e3 * 2 * 800_000 * 2 * 768 * 2048 / 8e14) == 2 * down


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_ours_and_theirs_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the references; and each piece is timed on what the one before has made."""
    monkeypatch.setattr(bench_experts, "KERNELS", REFERENCES.experts)
    monkeypatch.setattr(bench_experts, "DTYPE", torch.float32)
    for layer in with_tokens(some_experts(name), 5):
        assert layer.x.shape == (5, 64) and layer.indices.shape == (5, SHAPES[name]["num_experts_per_tok"])
        assert layer.met == len(set(layer.indices.flatten().tolist()))
        torch.testing.assert_close(layer.ours(REFERENCES.experts), layer.theirs(), rtol=1e-4, atol=1e-6)
        (up, bias), (down, _) = layer.weight("gate_up_proj"), layer.weight("down_proj")
        assert up.shape[1:] == (64, 64) and down.shape[1:] == (64, 32) and (bias is not None) == ("gpt" in name)
        count = SHAPES[name].get("num_local_experts", 0)
        shape = ExpertShape(
            LESS[name].get("num_experts", LESS[name].get("num_local_experts", count)), layer.indices.shape[1], 64, 32
        )
        made = [piece() for piece in bench_experts.pieces_of(layer, shape).values()]
        torch.testing.assert_close(made[-1], layer.ours(REFERENCES.experts))


def test_tokens_that_resemble_each_other_meet_fewer_experts_and_tiles_suit_their_rows() -> None:
    found = some_experts("qwen3-30b-a3b")
    assert sum(each.met for each in with_tokens(found, 12, 20.0)) < sum(each.met for each in with_tokens(found, 12))
    shape = ExpertShape(128, 8, 2048, 768)
    assert [calibrate_experts.row_sizes(shape, tokens)[-1] for tokens in (16, 256, 1024, 8192)] == [16, 32, 64, 128]
    jobs = calibrate_experts.jobs_of(shape, with_tokens(some_experts("gpt-oss-20b"), 1)[0], 256)
    assert {job.rows for job in jobs} == {16, 32} and {job.which for job in jobs} == {"up", "down"}
    assert all(job.transposed and job.biased and job.gating.interleaved for job in jobs)
    assert len(set(jobs)) == len(jobs)
