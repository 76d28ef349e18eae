"""The benchmark's command line, on a model that takes no time: what it says, what it writes, what it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_bench import settings_of_others as settings_of_others  # a fixture
from support_families import build
from transformers import GenerationConfig

from hf_batchllm.bench import __main__ as bench
from hf_batchllm.bench import printed_tables
from hf_batchllm.bench.batch_sizes import fastest_batch_size
from hf_batchllm.bench.contenders import Generate, GenerateBatch, Ours
from hf_batchllm.bench.floor import Floor, Needs
from hf_batchllm.bench.gpu_busy import GpuBusy
from hf_batchllm.bench.machine_rates import Rates
from hf_batchllm.bench.measuring import Measurement
from hf_batchllm.bench.model_alone import time_model_alone
from hf_batchllm.bench.models import end_at_random, load_model
from hf_batchllm.bench.parameter_sweeps import SyncCell, SyncSweep
from hf_batchllm.bench.plot import main as draw
from hf_batchllm.bench.plot import plot
from hf_batchllm.bench.printed_tables import batch_sizes_tried
from hf_batchllm.bench.recording_scheduler import RecordingScheduler, StepSize
from hf_batchllm.bench.shapes import SHAPES
from hf_batchllm.bench.workload import Mix, Workload
from hf_batchllm.planning.base_scheduler import BaseScheduler
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import GroupScheduler
from hf_batchllm.planning.step import Step

MPS = torch.backends.mps.is_available()
SMALL = "--config tiny --requests 6 --degree 3 --shared 40 --own 5 --new 3 --runs 1 --batch-sizes 2,4".split()


def test_the_workload_is_that_of_the_rfc() -> None:
    workload = Workload(requests=7, shared=20, own=4, new=2, degree=3)
    grouped = workload.grouped(1000)
    assert [len(prompt) for prompt in grouped] == [24] * 7
    for index, prompt in enumerate(grouped):
        same = [other[:20] == prompt[:20] for other in grouped]
        assert same == [other // 3 == index // 3 for other in range(7)]
    assert len({tuple(prompt[20:]) for prompt in grouped}) == 7
    shuffled = workload.prompts(1000)
    assert shuffled != grouped and sorted(shuffled) == sorted(grouped)
    assert Workload(7, 20, 4, 2, 3, shuffle=False).prompts(1000) == grouped
    assert sorted(workload.first(4).prompts(1000)) == sorted(grouped[:4])
    assert "3 prefixes of 20 tokens, each shared by 3" in str(workload)


def test_the_table_and_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert bench.main([*SMALL, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    for words in ("hf_batchllm", "model.generate, batch", "generate_batch, shuffled", "generate_batch, sorted"):
        assert words in said
    assert "same tokens as model.generate: 6 of 6 prompts" in said
    assert "hf_batchllm takes" in said and "LM head for sampled rows" in said
    assert max(map(len, said.splitlines())) <= 120
    figures = json.loads(path.read_text())
    assert [row["requests"] for row in figures["contenders"]] == [6] * 4
    assert all(len(row["runs"]) == 1 and row["seconds"] > 0 for row in figures["contenders"])
    assert figures["computed_tokens"] == 2 * 40 + 6 * 5 and figures["prompt_tokens"] == 6 * 45
    assert figures["same_tokens"] == [6, 6]


def test_the_floor_stands_beside_the_speeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert bench.main([*SMALL, "--floor", "--rivals", "generate", "--no-pieces", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    for words in ("of the floor", "rates of the machine", "prompts/s; hf_batchllm reaches", "small operations", "GB/s"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 120
    figures = json.loads(path.read_text())
    floor = figures["floor"]
    assert floor["seconds"] == pytest.approx(floor["products_seconds"] + floor["kv_seconds"] + floor["weights_seconds"])
    assert floor["prompt_tokens"] == figures["computed_tokens"] and floor["decode_tokens"] == 6 * 2
    for row in figures["contenders"]:
        assert row["share_of_floor"] == pytest.approx(floor["seconds"] / row["seconds"])
    assert figures["decode_reads_bytes_per_second"] > 0 and figures["gpu_busy_share"] is None


def test_a_model_that_has_no_floor_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "load_model", lambda *args: greedy(build("jetmoe")))
    assert bench.main([*SMALL, "--floor", "--rivals", "none", "--no-pieces"]) == 0
    assert "no floor: not every token meets all of its matrices" in capsys.readouterr().out


SMALLER_MIXTURES = {
    "qwen3-30b-a3b": {"num_experts": 16, "moe_intermediate_size": 32},
    "gpt-oss-20b": {"num_local_experts": 8},
    "mixtral-8x7b": {},
}


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("qwen3-30b-a3b", "--degree 3 --shared 40 --batch-sizes 3"),
        ("gpt-oss-20b", "--workload decode --batch-sizes 3"),
        ("mixtral-8x7b", "--shared 40 --degrees 1,3 --rivals none"),
        ("mixtral-8x7b", "--degree 3 --shared 40 --ablation sharing,order"),
    ],
)
def test_mixtures_of_experts(name: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every table, with the floor and the rivals."""
    fields = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config, path = tmp_path / "config.json", tmp_path / "figures.json"
    config.write_text(json.dumps(SHAPES[name] | fields | SMALLER_MIXTURES[name]))
    arguments = f"--config {config} --requests 6 --own 5 --new 4 --runs 1 --floor --json {path} {asked}"
    assert bench.main(arguments.split()) == 0
    said = capsys.readouterr().out
    assert "routing of the run ... counted over" in said and "no floor" not in said
    figures = json.loads(path.read_text())
    floor = figures["degrees"][1]["floor"] if "degrees" in figures else figures["floor"]
    experts, top = SMALLER_MIXTURES[name].get("num_experts", 8), SHAPES[name]["num_experts_per_tok"]
    assert floor["experts"] == experts and top < floor["experts_met"] <= experts
    assert floor["routed_tokens"] in (3 * 3, 6 * 3) and floor["seconds"] > 0
    if "contenders" in figures:
        assert figures["same_tokens"] == [6, 6] and "layers without attention" in said
        assert f"of {experts} in a layer, on average; counted over 18 tokens" in said
        assert not figures["pieces"]["products_only"] and max(map(len, said.splitlines())) <= 120


def test_without_a_count_experts_are_taken_to_be_alike(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("hf_batchllm.bench.measuring.with_measured_shares", fails)
    monkeypatch.setattr(bench, "load_model", lambda *args: greedy(build("mixtral")))
    assert bench.main([*SMALL, "--floor", "--rivals", "none", "--no-pieces"]) == 0
    said = capsys.readouterr().out
    assert "OutOfMemoryError; experts are taken to be chosen equally often" in said and "if all are met alike" in said


def greedy(model: Any) -> Any:
    model = copy.deepcopy(model)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def test_nothing_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    arguments = "--config tiny --workload decode --requests 4 --own 8 --new 5 --runs 1 --batch-sizes 4 --no-pieces"
    arguments += " --rivals generate"
    assert bench.main([*arguments.split(), "--floor", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "4 prompts of 8 tokens, nothing shared; 5 new tokens" in said
    assert "same tokens as model.generate: 4 of 4 prompts" in said and "waiting for weights" in said
    rows = json.loads(path.read_text())["contenders"]
    assert [row["name"] for row in rows] == ["hf_batchllm", "model.generate, batch 4"]


def test_each_prompt_has_an_answer_length_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every contender, and the same one."""
    path = tmp_path / "figures.json"
    arguments = "--config tiny --workload sharegpt --requests 8 --own 120 --new 90 --runs 1 --batch-sizes 3"
    arguments += " --rivals generate"
    assert bench.main([*arguments.split(), "--json", str(path)]) == 0
    assert "same tokens as model.generate: 8 of 8 prompts" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    mix = Mix(8, own=120, new=90)
    assert len(set(mix.answers)) > 3
    assert figures["workload"] == mix.as_dict() and len(figures["contenders"]) == 2
    for row in figures["contenders"]:
        assert row["new_tokens_per_second"] * row["seconds"] == pytest.approx(sum(mix.answers))
    model = load_model(None, "tiny", torch.device("cpu"), torch.float32)
    prompts, answers = mix.prompts(4096), mix.answers
    found = [Ours(model).run(prompts, answers), Generate(model, 3).run(prompts, answers)]
    found.append(GenerateBatch(model).run(prompts, answers))
    assert found[0] == found[1] == found[2]
    assert [len(answer) for answer in found[0]] == answers


def test_answers_that_end_at_random(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--config tiny --workload decode --requests 6 --own 8 --new 40 --stop-after 4 --runs 1 --batch-sizes 3"
    arguments += " --rivals generate"
    assert bench.main(arguments.split()) == 0
    said = capsys.readouterr().out
    assert "40 new tokens, or fewer: one token in 4 ends an answer" in said and "same tokens" not in said
    model = load_model(None, "tiny", torch.device("cpu"), torch.float32)
    end_at_random(model, 4)
    for contender in (Ours(model), Generate(model, 3), GenerateBatch(model)):
        torch.manual_seed(0)
        answers = contender.run([[1000 + index] * 8 for index in range(12)], 40)
        assert len({len(answer) for answer in answers}) > 2
        for answer in answers:
            assert not any(token % 4 == 0 for token in answer[:-1])
            assert answer[-1] % 4 == 0 or len(answer) == 40


def test_the_table_over_degrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    arguments = [*without(SMALL, "--degree"), "--degrees", "1,3,6", "--requests", "12", "--floor", "--json", str(path)]
    assert bench.main(arguments) == 0
    said = capsys.readouterr().out
    assert "x generate" in said and "the degree does not change its work" in said and "floor prompts/s" in said
    assert max(map(len, said.splitlines())) <= 120
    figures = json.loads(path.read_text())
    counts = [(row["workload"]["degree"], row["requests"]) for row in figures["degrees"]]
    assert counts == [(1, 4), (3, 9), (6, 12)]  # so many that runs take about as long
    assert figures["generate"]["requests"] in (4, 8)  # twice its best batch

    given = [*without(without(SMALL, "--degree"), "--requests"), "--degrees", "1,3", "--requests", "2,6"]
    assert bench.main([*given, "--rivals", "none"]) == 0
    printed_tables = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed_tables if line.split()[:1] in (["1"], ["3"])] == [
        ["1", "2"],
        ["3", "6"],
    ]


@pytest.mark.parametrize("more", [[], ["--stop-after", "3"]])
def test_the_table_over_steps_per_sync(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert bench.main([*without(SMALL, "--batch-sizes"), "--steps-per-sync", "1,3", *more, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "idle tokens" in said and "there are no CUDA graphs to turn off" in said
    assert ("every answer's length is known" in said) == (not more)
    figures = json.loads(path.read_text())
    assert [cell["steps_per_sync"] for cell in figures["with_graphs"]] == [1, 3]
    assert figures["without_graphs"] == []


def test_both_halves_of_the_table_over_steps_per_sync() -> None:
    workload = Workload(4, 0, 8, 500, degree=1)
    on = [
        SyncCell(Measurement("", workload, [1.0], made=[2000]), 0),
        SyncCell(Measurement("", workload, [0.5], made=[2000]), 1234),
    ]
    off = [SyncCell(Measurement("", workload.cut_short(32), [2.0], made=[128]), idle) for idle in (0, 56)]
    lines = printed_tables.sync_table(SyncSweep([1, 16], on, off, off_new=32, drawn=True)).splitlines()
    assert lines[0].split("  ")[-1].strip() == "no graphs, 32 new tokens"
    assert lines[2].split() == ["1", "2,000", "0", "64", "0"] and lines[3].split() == [
        "16",
        "4,000",
        "1,234",
        "64",
        "56",
    ]
    assert len(lines) == 4 and len(set(map(len, lines))) == 1  # aligned


def test_what_only_a_gpu_can_tell_has_its_place_in_the_table() -> None:
    ours = Measurement(
        "hf_batchllm", Workload(800, 2000, 200, 100, degree=16), [10.5], made=[80_000], peak_bytes=120 << 30
    )
    theirs = Measurement("model.generate, batch 32", ours.workload.first(64), [8.0], made=[6400], peak_bytes=30 << 30)
    ours.floor = theirs.floor = Floor(Needs(0, 0, 6.67e15, 4.27e11, 0.0, 0.0), Rates(667e12, 4.27e12), alone=False)
    lines = printed_tables.contenders_table([ours, theirs]).splitlines()
    assert "120.0 GiB" in lines[1] and "96 %" in lines[1]
    assert lines[2].split()[-8:-3] == ["9.52", "x", "as", "fast", "126"]
    assert max(map(len, lines)) <= 120
    assert "GPU busy 97.5 % of the decode part: its last 1.20 s" in printed_tables.busy_line(GpuBusy(0.975, 1.2), 96)
    assert "floor" in printed_tables.floor_lines(ours.floor, ours).splitlines()[0]


def test_a_step_that_is_repeated_counts_as_often() -> None:
    class Once(GroupScheduler):
        repeat = BaseScheduler.repeat

    class Repeats(GroupScheduler):
        def repeat(self, step: Step, most: int) -> int:
            return min(3, most)

    step = Step()
    step.rows.append(Request(0, np.arange(4), 8))
    assert RecordingScheduler(Once()).repeat(step, 5) == 1
    recording = RecordingScheduler(Repeats())
    recording.sizes.append(StepSize.of(step))
    assert recording.repeat(step, 5) == 3 and recording.repeat(step, 1) == 1
    assert recording.sizes == [StepSize(1, 0, 1)] * 3


def test_ours_alone_and_a_setting_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--rivals", "none", "--no-pieces", "--set", "share_prefixes=false", "--sorted"]) == 0
    said = capsys.readouterr().out
    assert "0.0% saved" in said and "generate" not in said.replace("to generate", "") and "sorted" in said


def test_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their share is that of as many floors."""
    file = tmp_path / "figures.json"
    more = ["--rivals", "none", "--no-pieces", "--gpus", "cpu,cpu", "--floor", "--runs", "1", "--json", str(file)]
    assert bench.main([*SMALL, *more]) == 0
    said = capsys.readouterr().out
    assert "hf_batchllm, 2 processes" in said and "in which they were started" in said and "busy" in said
    one, two = json.loads(file.read_text())["contenders"]
    assert two["share_of_floor"] == pytest.approx(two["floor_seconds"] / two["seconds"] / 2)
    assert one["share_of_floor"] == pytest.approx(one["floor_seconds"] / one["seconds"])


def test_a_rival_on_a_part_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--rivals", "generate", "--rival-requests", "3", "--no-pieces"]) == 0
    assert "same tokens as model.generate: 3 of 3 prompts" in capsys.readouterr().out


def test_a_rival_that_fails_is_reported_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(GenerateBatch, "run", fails)
    assert bench.main([*SMALL, "--no-pieces"]) == 0
    assert "failed: RuntimeError: out of luck" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
        (["--own", "0"], "--own at least 1"),
        (["--set", "page_size"], "NAME=VALUE"),
        (["--model", "x", "--config", "tiny"], "not allowed with"),
        (["--dtype", "int8"], "invalid choice"),
        (["--degrees", "1,2", "--degree", "4"], "leave out --degree"),
        (["--degrees", "1,2", "--workload", "decode"], "leave out --workload decode"),
        (["--degrees", "1,2", "--steps-per-sync", "1,2"], "two tables"),
        (["--degrees", "1,0"], "'0' is not a whole number of at least 1"),
        (["--requests", "4,8"], "--requests has 2 numbers, and there is a single workload"),
        (["--requests", "4,8", "--degrees", "1,2,4"], "--requests has 2 numbers, and --degrees has 3"),
        (["--requests", "four"], "'four' is not a whole number"),
        (["--workload", "sharegpt", "--shared", "10"], "--shared does not go with --workload sharegpt"),
        (["--workload", "sharegpt", "--stop-after", "10"], "--stop-after does not go with"),
        (["--stop-after", "10", "--floor"], "--floor needs to know their lengths"),
        (["--degrees", "1,2", "--no-pieces"], "--no-pieces has no place in the table of --degrees: leave it out"),
        (["--degrees", "1,2", "--rivals", "generate,generate_batch"], "--rivals generate_batch has no place"),
        (["--steps-per-sync", "1,2", "--rivals", "generate"], "--rivals has no place in the table of --steps-per-sync"),
        (["--steps-per-sync", "1,2", "--rival-runs", "2"], "--rival-runs has no place"),
        (["--degrees", "1,2", "--gpus", "2"], "--gpus has no place in the table of --degrees: leave it out"),
        (["--gpus", "2", "--stop-after", "9"], "leave out one"),
        (["--json", "/tmp"], "--json /tmp is a folder: name a file in it"),
        (["--off-new", "10"], "without graphs of --steps-per-sync"),
        (["--steps-per-sync", "1,2", "--set", "cuda_graphs=false"], "sets cuda_graphs itself: leave out --set"),
        (["--plot", "figure.doc"], "must end in .svg, .png, .pdf"),
        (["--trace", "figure.doc"], "--trace figure.doc: the name must end in .svg, .png, .pdf"),
        (["--trace", "figure.svg", "--degrees", "1,2"], "--trace draws one run, not --degrees"),
        (["--workload", "mixed", "--shared", "0"], "--shared and --degree must be at least 1"),
        (["--profile", "--device", "cpu"], "it needs --device cuda"),
        (["--profile", "--device", "cuda", "--runs", "3"], "--profile measures nothing else: leave out --runs"),
        (["--profile", "--device", "cuda", "--floor"], "leave out --floor"),
        (["--profile", "--device", "cuda", "--no-pieces"], "leave out --no-pieces"),
        (["--profile", "--device", "cuda", "--rival-requests", "8"], "leave out --rival-requests"),
        (["--plot", "nowhere/figure.svg", "--steps-per-sync", "1"], "not --steps-per-sync"),
        (["--json", "nowhere/figures.json"], "there is no folder nowhere"),
        (["--rivals", "vllm"], "'vllm' is not one of generate, generate_batch, none"),
        pytest.param(["--device", "mps"], "finds no GPU of a Mac", marks=pytest.mark.skipif(MPS, reason="a Mac's GPU")),
    ],
)
def test_what_it_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert words in capsys.readouterr().err


def test_a_picture_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main([*SMALL, "--plot", "figure.svg"])
    assert "pip install 'hf-batchllm[bench]'" in capsys.readouterr().err


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for arguments in (["--floor", "--no-pieces"], ["--degrees", "1,3"]):
        path = tmp_path / f"{arguments[0].strip('-')}.svg"
        asked = [*SMALL, *arguments, "--rivals", "generate", "--plot", str(path)]
        assert bench.main(asked if "--floor" in arguments else without(asked, "--degree")) == 0
        assert path.read_text().rstrip().endswith("</svg>") and path.stat().st_size > 5000


def test_steps_over_time_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.svg"
    mixed = "--config tiny --workload mixed --requests 6 --degree 3 --shared 30 --own 5 --new 12 --runs 1".split()
    assert bench.main([*mixed, "--rivals", "none", "--no-pieces", "--trace", str(path)]) == 0
    assert path.read_text().rstrip().endswith("</svg>") and path.stat().st_size > 5000


def test_a_picture_of_figures_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    assert bench.main([*SMALL, "--rivals", "none", "--no-pieces", "--json", str(figures)]) == 0
    assert draw([str(figures), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_the_picture_maker_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw(["figures.json"]) == draw(["figures.json", "picture.doc"]) == 2
    assert "FIGURES.json PICTURE (.svg, .png, .pdf)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="only one workload, --degrees and --ablation"):
        plot({"with_graphs": []}, tmp_path / "picture.svg")


def without(arguments: list[str], flag: str) -> list[str]:
    place = arguments.index(flag)
    return arguments[:place] + arguments[place + 2 :]


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"llama-8b, .* qwen3-0\.6b, .* tiny"):
        load_model(None, "lama", torch.device("cpu"), torch.float32)


@pytest.mark.some_cases
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_shapes_can_be_made(name: str) -> None:
    assert load_model(None, name, torch.device("meta"), torch.bfloat16).config.vocab_size


def test_the_steps_are_recorded() -> None:
    model = build("llama")
    ours = Ours(model, {"max_batch_tokens": 30})
    ours.run([[5 + index] * 10 for index in range(6)], 4)
    assert sum(size.chunk_tokens for size in ours.scheduler.sizes) == 60
    assert sum(size.samples for size in ours.scheduler.sizes) == 24
    assert ours.report is not None and len(ours.scheduler.sizes) == ours.report.steps


@pytest.mark.parametrize(("family", "products_only"), [("mixtral", False)])
def test_the_model_alone(family: str, products_only: bool) -> None:
    model = build(family)
    before = {name: id(value) for name, value in vars(model.config).items()}
    pieces = time_model_alone(model, [StepSize(0, 12, 1), StepSize(3, 9, 4), StepSize(4, 0, 4)])
    assert pieces.products_only == products_only
    assert min(pieces.prefill, pieces.decode, pieces.head) > 0
    assert pieces.total == pieces.prefill + pieces.decode + pieces.head
    assert {name: id(value) for name, value in vars(model.config).items()} == before


def test_larger_batches_are_tried_until_they_are_slower() -> None:
    seconds = {1: 1.0, 2: 1.2, 4: 2.0, 8: 5.0, 16: 1.0}
    sizes = [32, 16, 8, 4, 2, 1]
    best, speeds = fastest_batch_size("a rival", sizes, 16, lambda size: size / seconds[size], slower=1.02)
    assert best == 4 and list(speeds) == [1, 2, 4, 8]
    best, speeds = fastest_batch_size("a rival", sizes, 16, lambda size: size / seconds[size], slower=None)
    assert best == 16 and list(speeds) == [1, 2, 4, 8, 16]


def test_a_batch_size_that_fails_ends_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    def speed_of(size: int) -> float:
        if size > 2:
            raise MemoryError
        return size

    assert fastest_batch_size("a rival", [1, 2, 4, 8], 8, speed_of, slower=1.02) == (2, {1: 1, 2: 2})
    told = [f"a rival, batches of {each}\n" for each in ("1: 1.00/s", "2: 2.00/s", "4: MemoryError")]
    assert capsys.readouterr().out == "".join(told)
    with pytest.raises(MemoryError):
        fastest_batch_size("a rival", [4, 8], 8, speed_of, slower=1.02)


def test_a_best_batch_size_at_the_end_of_those_tried_is_said() -> None:
    assert "largest size tried" in batch_sizes_tried({2: 1.0, 4: 2.0})
    assert "largest" not in batch_sizes_tried({2: 2.0, 4: 1.0}) and "largest" not in batch_sizes_tried({4: 1.0})
