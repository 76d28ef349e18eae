"""The benchmark: fair workloads, its command on a model that takes no time, what it writes and what it refuses."""

from __future__ import annotations

import copy
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support_bench import settings_of_others as settings_of_others  # a fixture
from support_families import build
from transformers import GenerationConfig

from hf_batchllm.bench import __main__ as bench
from hf_batchllm.bench.contenders import (
    Measurement,
    Ours,
    by_generate,
    by_generate_batch,
    fastest_batch_size,
    measure,
)
from hf_batchllm.bench.floor import Floor, Rates
from hf_batchllm.bench.workload import SHAPES, PromptGroup, Workload, load_model

SMALL = "--config tiny --requests 6 --degree 3 --shared 40 --own 5 --new 3 --runs 1 --batch-sizes 2,4".split()


# -- workloads -------------------------------------------------------------------------------------------------


def test_the_workload_is_that_of_the_rfc() -> None:
    workload = Workload(requests=7, shared=20, own=4, new=2, degree=3)
    grouped = replace(workload, shuffle=False).prompts(1000)
    assert [len(prompt) for prompt in grouped] == [24] * 7
    for index, prompt in enumerate(grouped):
        same = [other[:20] == prompt[:20] for other in grouped]
        assert same == [other // 3 == index // 3 for other in range(7)]
    assert len({tuple(prompt[20:]) for prompt in grouped}) == 7
    shuffled = workload.prompts(1000)
    assert shuffled != grouped and sorted(shuffled) == sorted(grouped) and shuffled == workload.prompts(1000)
    assert replace(workload, seed=1, shuffle=False).prompts(1000) != grouped
    assert sorted(workload.first(4).prompts(1000)) == sorted(grouped[:4])
    assert [len(group.own) for group in workload.groups] == [3, 3, 1]
    assert workload.groups[0] == PromptGroup(20, [4] * 3, [2] * 3)
    assert "3 prefixes of 20 tokens, each shared by 3" in str(workload)


def test_the_lengths_of_chats() -> None:
    chats = Workload(4000, 0, 2048, 2048, 1, kind="sharegpt")
    prompts, answers = ([getattr(group, name)[0] for group in chats.groups] for name in ("own", "new"))
    for lengths, mean, median in ((prompts, 218, 100), (answers, 201, 112)):
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.07)
        assert statistics.median(lengths) == pytest.approx(median, rel=0.07)
        assert min(lengths) >= 4 and 1500 < max(lengths) <= 2048
    few = Workload(20, 0, 200, 100, 1, kind="sharegpt")
    given = few.prompts(500)
    assert [len(prompt) for prompt in given] == [group.own[0] for group in few.groups]
    assert max(map(len, given)) <= 200 and max(few.answers) <= 100 and len(set(few.answers)) > 5
    assert few.first(5).prompts(500) == given[:5] and few.first(5).answers == few.answers[:5]


def test_groups_of_mixed_lengths() -> None:
    mixed = Workload(400, 2000, 200, 2048, 8, seed=3, kind="mixed")
    assert len(mixed.groups) == 50 and sum(len(group.own) for group in mixed.groups) == 400
    assert statistics.median(group.shared for group in mixed.groups) == pytest.approx(2000, rel=0.3)
    assert min(mixed.answers) == 10 and 1500 < max(mixed.answers) <= 2048
    assert statistics.median(mixed.answers) == pytest.approx(205, rel=0.4)
    few = replace(mixed, requests=6, degree=3, shared=20, own=5)
    whole = [(group.shared + own, new) for group in few.groups for own, new in zip(group.own, group.new, strict=True)]
    given = list(zip(map(len, few.prompts(500)), few.answers, strict=True))
    assert sorted(given) == sorted(whole) and given != whole


# -- contenders ------------------------------------------------------------------------------------------------


def tiny() -> Any:
    return load_model(None, "tiny", torch.device("cpu"), torch.float32)


def test_each_prompt_has_an_answer_length_of_its_own_with_every_contender() -> None:
    chats, model = Workload(8, 0, 120, 90, 1, kind="sharegpt"), tiny()
    prompts, answers = chats.prompts(4096), chats.answers
    assert len(set(answers)) > 3
    ours = Ours(model)(prompts, answers)
    assert [len(answer) for answer in ours] == answers
    assert ours == by_generate(model, 3, prompts, answers) == by_generate_batch(model, prompts, answers)


def test_a_rival_that_fails_is_reported_and_ours_is_not_excused() -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("out of luck\nand more")

    row, model = Measurement("a rival", Workload(2, 0, 4, 2, 1)), tiny()
    assert measure(fails, model, row, 2, rival=True).error == "RuntimeError: out of luck"
    assert row.as_dict()["error"] and "failed: RuntimeError: out of luck" in bench.table([row])
    with pytest.raises(RuntimeError, match="out of luck"):
        measure(fails, model, row, 2)


def test_larger_batches_are_tried_until_they_are_slower_or_fail(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {1: 1.0, 2: 1.2, 4: 2.0, 8: 5.0, 16: 1.0}
    sizes = [32, 16, 8, 4, 2, 1]
    best, speeds = fastest_batch_size("a rival", sizes, 16, lambda size: size / seconds[size], 1.02)
    assert best == 4 and list(speeds) == [1, 2, 4, 8]
    best, speeds = fastest_batch_size("a rival", sizes, 16, lambda size: size / seconds[size], float("inf"))
    assert best == 16 and list(speeds) == [1, 2, 4, 8, 16]
    few = {1: 1.0, 2: 2.0}
    assert fastest_batch_size("a rival", [1, 2, 4, 8], 8, few.__getitem__) == (2, few)
    assert "a rival, batches of 4: KeyError" in capsys.readouterr().out
    with pytest.raises(KeyError):
        fastest_batch_size("a rival", [4, 8], 8, few.__getitem__)


@pytest.mark.some_cases
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_shapes_can_be_made(name: str) -> None:
    assert load_model(None, name, torch.device("meta"), torch.bfloat16).config.vocab_size


def test_no_tokenizer_is_taken_from_the_place_of_a_model_or_a_config(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    for model, config in ((str(tmp_path), "tiny"), (None, str(tmp_path)), (None, str(tmp_path / "config.json"))):
        assert load_model(model, config, torch.device("cpu"), torch.float32).config._name_or_path == ""


# -- the command -----------------------------------------------------------------------------------------------


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    assert bench.main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_the_table_and_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(tmp_path, *SMALL, "--floor")
    said = capsys.readouterr().out
    for words in ("x generate", "same tokens as model.generate: 6 of 6 prompts", "rates of the machine", "of it"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 120
    ours, *rivals = figures["contenders"]
    assert [row["name"].split(",")[0] for row in rivals] == ["model.generate", "generate_batch", "generate_batch"]
    assert [row["requests"] for row in (ours, *rivals)] == [6] * 4
    assert figures["computed_tokens"] == 2 * 40 + 6 * 5 and figures["prompt_tokens"] == 6 * 45
    assert figures["same_tokens"] == [6, 6] and figures["generate_prompts_per_second_by_batch_size"]
    assert {"model", "dtype", "machine", "torch", "transformers", "work", "steps"} <= figures.keys()
    floor = ours["floor"]
    assert floor["seconds"] == pytest.approx(floor["products_seconds"] + floor["kv_seconds"] + floor["weights_seconds"])
    assert floor["prompt_tokens"] == figures["computed_tokens"] and floor["decode_tokens"] == 6 * 2
    for row in (ours, *rivals):
        assert row["share_of_floor"] == pytest.approx(floor["seconds"] / row["seconds"]) and len(row["runs"]) == 1
        assert row["new_tokens_per_second"] * row["seconds"] == pytest.approx(18)


def test_several_degrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--degrees", "1,3,6", "--requests", "12"]
    *ours, theirs = run(tmp_path, *arguments, "--floor")["contenders"]
    counts = [(row["workload"]["degree"], row["requests"]) for row in ours]
    assert counts == [(1, 4), (3, 9), (6, 12)]  # so many that runs take about as long
    assert theirs["requests"] in (4, 8)  # twice its best batch
    assert len({row["floor"]["seconds"] for row in ours}) == 3
    capsys.readouterr()
    figures = run(tmp_path, *SMALL, "--degrees", "1,3", "--requests", "2,6", "--rivals", "none")
    assert [row["requests"] for row in figures["contenders"]] == [2, 6] and figures["same_tokens"] is None


def test_a_part_for_the_rivals_and_a_setting_of_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--rivals", "generate", "--rival-requests", "3", "--set", "share_prefixes=false", "--sorted"]
    figures = run(tmp_path, *SMALL, *more)
    assert figures["same_tokens"] == [3, 3] and figures["computed_tokens"] == 6 * 45
    assert not figures["contenders"][0]["workload"]["shuffle"] and "sorted" in capsys.readouterr().out


SMALLER = {
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
    ],
)
def test_mixtures_of_experts(name: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the floor and the rivals."""
    fields = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SHAPES[name] | fields | SMALLER[name]))
    figures = run(tmp_path, *f"--config {config} --requests 6 --own 5 --new 4 --runs 1 --floor {asked}".split())
    assert "routing of the run: counted over" in capsys.readouterr().out
    floor = figures["contenders"][0]["floor"]
    experts, top = SMALLER[name].get("num_experts", 8), SHAPES[name]["num_experts_per_tok"]
    assert floor["experts"] == experts and top < floor["experts_met"] <= experts
    assert floor["routed_tokens"] in (3 * 3, 6 * 3) and floor["seconds"] > 0
    assert figures["same_tokens"] in ([6, 6], None)


def test_what_is_said_where_the_floor_cannot_be_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_of(family: str) -> Any:
        model = copy.deepcopy(build(family))
        model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        return model

    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(bench, "with_shares", fails)
    for family, said in (
        ("jetmoe", "no floor: not every token meets all of its matrices"),
        ("mixtral", "OutOfMemoryError; experts are taken to be chosen equally often"),
    ):
        monkeypatch.setattr(bench, "load_model", lambda *args, family=family: model_of(family))
        assert bench.main([*SMALL, "--floor", "--rivals", "none"]) == 0
        assert said in capsys.readouterr().out


def test_what_only_a_gpu_can_tell_has_its_place_in_the_table() -> None:
    work = Workload(800, 2000, 200, 100, degree=16)
    floor = Floor(10.1, 10.0, 0.1, 0.0, 0, 0, 6.67e15, 4.27e11, 0.0, 0, 0, Rates(667e12, 4.27e12))
    ours = Measurement("hf_batchllm", work, runs=[10.5], tokens=[[0] * 100] * 800, peak_bytes=120 << 30, floor=floor)
    theirs = Measurement(
        "model.generate, batch 32", work.first(64), runs=[8.0], tokens=[[0] * 100] * 64, peak_bytes=30 << 30
    )
    theirs.floor = floor
    lines = bench.table([ours, theirs], theirs).splitlines()
    assert "120.0 GiB" in lines[1] and "96%" in lines[1] and "9.52" in lines[1] and max(map(len, lines)) <= 120
    assert "10.10 s, of which" in bench.floor_line(floor) and "667 TFLOP/s and 4.27 TB/s" in bench.floor_line(floor)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--requests 0", "'0' is not a whole number of at least 1"),
        ("--requests four", "'four' is not a whole number"),
        ("--own 0", "--own must be at least 1"),
        ("--runs 0", "argument --runs: '0' is not a whole number of at least 1"),
        ("--set page_size", "NAME=VALUE"),
        ("--set page_sise=4", "page_sise"),
        ("--model x --config tiny", "not allowed with"),
        ("--config lama", "llama-8b"),
        ("--dtype int8", "invalid choice"),
        ("--degrees 1,0", "is not a whole number of at least 1"),
        ("--degrees 1,2 --workload decode", "leave out --workload decode"),
        ("--requests 4,8", "--requests has 2 numbers, and there are 1 degrees"),
        ("--workload sharegpt --shared 10", "leave out --degree, --shared and --sorted"),
        ("--workload mixed --shared 0", "--shared must be at least 1"),
        ("--json /tmp", "--json /tmp: name a file"),
        ("--json nowhere/figures.json", "name a file in a folder that there is"),
        ("--rivals vllm", "vllm is not one of generate, generate_batch, none"),
    ],
)
def test_what_it_refuses(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    assert words in capsys.readouterr().err
