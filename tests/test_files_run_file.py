"""Files in, files out: the whole way, over a tiny model."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from support_cases import up_to
from support_families import build
from support_file_lines import answered, in_a_child, records, results, write_lines
from support_file_lines import generator as generator  # a fixture
from support_word_tokenizer import word_tokenizer
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_batchllm import BatchGenerator, FileReport, run_file
from hf_batchllm.errors import FilesError, InputFileError, RunChangedError
from hf_batchllm.files.output import FileOutput

FAMILY = "llama"
KILLS = int(os.environ.get("KILLS", up_to(20)))  # a hundred take half a minute
SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "seed": 5, "progress": False}


def test_results_are_those_of_generate(tmp_path: Path, generator: BatchGenerator) -> None:
    lines = records(90)
    report = run_file(
        generator, write_lines(tmp_path / "in.jsonl", lines, broken=(50,)), tmp_path / "out.jsonl", **SETTINGS
    )
    found = results(tmp_path / "out.jsonl")
    assert [each["index"] for each in found] == list(range(90))
    assert report.written == report.records == 90 and report.left == 0
    assert report.errors == 3 == sum("error" in each for each in found)
    assert "line 51" in found[50]["error"] and "line 14" in found[13]["error"]
    assert 0.3 < report.saving < 1
    model, tokenizer = build(FAMILY), word_tokenizer(97)
    for line, each in zip(lines, found, strict=True):
        assert each.get("id") == line.get("id") or "error" in each
        if "error" in each or "temperature" in line:
            continue
        ids = torch.tensor([tokenizer(line["prompt"]).input_ids])
        new = model.generate(ids, max_new_tokens=line.get("max_new_tokens", 6), do_sample=False)[0, ids.shape[1] :]
        assert each["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert each["new_tokens"] == len(new) and each["prompt_tokens"] == ids.shape[1]
    assert [len(each["samples"]) for each in found if "samples" in each] == [3] * 8
    again = run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", **SETTINGS)
    assert again.written == 0 and "Nothing to do" in str(again)


def test_a_line_with_a_seed_of_its_own_gives_the_same_anywhere(tmp_path: Path, generator: BatchGenerator) -> None:
    line = {"prompt": "w5 w6 w7", "temperature": 2.0, "seed": 11, "n": 2, "top_k": 0}
    other = {**line, "seed": 12}
    for name, lines in {"one": [line], "two": [other, other, line]}.items():
        source = write_lines(tmp_path / name, lines)
        run_file(generator, source, tmp_path / f"{name}.jsonl", format="jsonl", progress=False)
    one, two = results(tmp_path / "one.jsonl"), results(tmp_path / "two.jsonl")
    assert one[0]["samples"] == two[2]["samples"] != two[0]["samples"] == two[1]["samples"]
    config = GenerationConfig(do_sample=True, temperature=2.0, top_k=0, num_return_sequences=2)
    direct = generator.generate([line["prompt"]], config, seed=[11])
    assert [each["text"] for each in one[0]["samples"]] == [each.text for each in direct]


def test_windows_give_what_one_window_gives(tmp_path: Path, generator: BatchGenerator) -> None:
    source = write_lines(tmp_path / "in.jsonl", records(80))
    whole = run_file(generator, source, tmp_path / "whole.jsonl", **SETTINGS)
    parts = run_file(generator, source, tmp_path / "parts.jsonl", window_bytes=20_000, **SETTINGS)
    assert results(tmp_path / "whole.jsonl") == results(tmp_path / "parts.jsonl")
    assert whole.new_tokens == parts.new_tokens
    assert parts.saving > whole.saving - 0.1  # whoever shares a document is in the same window


def test_beams_log_probabilities_and_samples_in_one_file(tmp_path: Path, generator: BatchGenerator) -> None:
    prompt = "w5 w6 w7 w8"
    lines = [
        {"prompt": prompt},
        {"prompt": prompt, "num_beams": 3},
        {"prompt": prompt, "logprobs": 2},
        {"prompt": prompt, "n": 2, "temperature": 1},
        {"prompt": prompt, "num_beams": 3, "logprobs": 2},
        {"prompt": [5, 6, 7, 8]},
        {"messages": [{"role": "user", "content": "w7"}]},
        {"prompt": prompt, "num_beams": 3, "n": 5},
    ]
    run_file(generator, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", token_ids=True, **SETTINGS)
    plain, beams, told, sampled, both, ids, chat, wrong = results(tmp_path / "out.jsonl")
    assert plain["token_ids"] == ids["token_ids"] == told["token_ids"]
    assert beams["token_ids"] == generator.generate([prompt], num_beams=3, max_new_tokens=6)[0].token_ids
    assert [len(each["top"]) for each in told["logprobs"]] == [2] * told["new_tokens"] and "logprobs" not in plain
    assert len(sampled["samples"]) == 2 and chat["prompt_tokens"] > 1
    assert "logprobs" in both["error"] and "num_beams" in wrong["error"] and "line 8" in wrong["error"]


# -- what may happen on the way ----------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, nothing is there twice, and no line is half: what comes out is what one run gives."""
    source = write_lines(tmp_path / "in.jsonl", records(500), broken=(77,))
    target, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    model, tokenizer = build(FAMILY), word_tokenizer(97)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a copy of a process has no other threads
    # The bars' own lock is for all processes: a child that is killed while it holds it would stop this one, too.
    monkeypatch.setattr(tqdm, "_lock", threading.RLock(), raising=False)

    def run(to: Path = target) -> FileReport:
        with BatchGenerator(model, tokenizer) as fresh:
            return run_file(fresh, source, to, window_bytes=200_000, **{**SETTINGS, "max_new_tokens": 3})

    began = time.monotonic()
    run(whole)
    took = time.monotonic() - began
    expected = {each["index"]: each for each in results(whole)}
    assert len(expected) == 500

    rng, kills, partly = random.Random(7), 0, 0
    over = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while kills < KILLS:
        for path in tmp_path.glob("out.jsonl*"):
            path.unlink()
        before = 0
        for _ in range(6):  # each of them goes on where the one before it was killed
            child = in_a_child(run)
            if kills % 2:  # at any moment
                time.sleep(rng.uniform(0.0, 0.2) * took)
            else:  # once there is more, however slow the machine is
                goal = size_of(target) + rng.uniform(0.0, 0.1) * size_of(whole)
                while size_of(target) <= goal and os.waitid(os.P_PID, child, over) is None:
                    time.sleep(0.002)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
            there = target.read_bytes() if target.exists() else b""
            lines = [json.loads(line) for line in there[: there.rfind(b"\n") + 1].splitlines()]
            assert len({line["index"] for line in lines}) == len(lines) >= before
            assert all(line == expected[line["index"]] for line in lines)
            before = len(lines)
            partly += 0 < before < 500
        run()
        assert target.read_bytes() == whole.read_bytes()
    assert partly > kills // 4
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("out.jsonl", r"7 of 60 results are in .*out\.jsonl: run the same again"),
        ("out.csv", r"out\.csv\.part\.jsonl \(.*comes at the end"),
    ],
)
def test_an_interrupt_says_that_the_same_call_goes_on(
    tmp_path: Path, generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", records(60)), tmp_path / name
    run_file(generator, source, tmp_path / f"whole.{name}", **SETTINGS)
    append = FileOutput.append
    for after, expected in ((0, r"^interrupted$"), (7, said)):
        left = [after]

        def interrupted(self: FileOutput, lines: Any, left: list[int] = left) -> None:
            if not left[0]:
                signal.raise_signal(signal.SIGINT)
            left[0] -= 1
            append(self, lines)

        with monkeypatch.context() as patched:
            patched.setattr(FileOutput, "append", interrupted)
            handler = signal.signal(signal.SIGINT, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt, match=expected):
                run_file(generator, source, target, **SETTINGS)
            signal.signal(signal.SIGINT, handler)
        assert target.exists() == (name == "out.jsonl" and after > 0), "no new files before the first result"
    assert run_file(generator, source, target, **SETTINGS).before == 7
    assert target.read_bytes() == (tmp_path / f"whole.{name}").read_bytes()


def test_what_differs_from_the_earlier_part_is_named(tmp_path: Path, generator: BatchGenerator) -> None:
    lines = records(40, bad=False)
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_file(generator, source, target, limit=10, **SETTINGS)
    assert len(results(target)) == 10
    kept = target.read_bytes()
    with pytest.raises(RunChangedError, match="max_new_tokens was 6 and is 7"):
        run_file(generator, source, target, **{**SETTINGS, "max_new_tokens": 7})
    with pytest.raises(RunChangedError, match="seed was 5 and is 6"):
        run_file(generator, source, target, **{**SETTINGS, "seed": 6})
    changed = copy.deepcopy(build(FAMILY))
    with torch.no_grad():
        next(changed.parameters())[0] += 1
    with (
        BatchGenerator(changed, word_tokenizer(97)) as other,
        pytest.raises(RunChangedError, match="with other weights"),
    ):
        run_file(other, source, target, **SETTINGS)
    with pytest.raises(RunChangedError, match="line 3"):
        run_file(generator, write_lines(source, [*lines[:2], lines[3], *lines[3:]]), target, **SETTINGS)
    assert target.read_bytes() == kept
    more = write_lines(source, [*lines, *records(5, seed=9)])  # lines may be added
    report = run_file(generator, more, target, **SETTINGS)
    assert (report.before, report.written) == (10, 35) and len(results(target)) == 45
    assert run_file(generator, more, target, restart=True, **SETTINGS).written == 45
    assert len(results(tmp_path / "out.jsonl.bak-1")) == 45


def in_the_midst(name: str) -> Callable[[Any, Any], None]:
    def change(model: Any, tokenizer: Any) -> None:
        tensor = model.get_submodule(name).weight
        with torch.no_grad():
            tensor.view(-1)[len(tensor.view(-1)) // 3] += 1

    return change


def other_frequencies(model: Any, tokenizer: Any) -> None:
    next(each for name, each in model.named_buffers() if name.endswith("inv_freq")).mul_(1.5)


def another_post_processor(model: Any, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = word_tokenizer(97, bos=True).backend_tokenizer.post_processor


CHANGES: list[tuple[Callable[[Any, Any], object], str]] = [
    (in_the_midst("lm_head"), "begun with other weights. Load"),
    (in_the_midst("model.embed_tokens"), "begun with other weights. Load"),
    (in_the_midst("model.layers.1.mlp.down_proj"), "begun with other weights. Load"),
    (other_frequencies, "begun with other buffers. Load"),
    (lambda model, _: setattr(model.config, "rms_norm_eps", 0.01), "begun with another config. Load"),
    (
        lambda model, _: setattr(model.generation_config, "forced_eos_token_id", 7),
        "generation_config.forced_eos_token_id was not set and is 7",
    ),
    (another_post_processor, "begun with another tokenizer. Load"),
    (
        lambda _, tokenizer: setattr(tokenizer, "chat_template", "{{ messages[0].content }}"),
        "begun with another chat template. Load",
    ),
]


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_a_run_goes_on_with_the_same_model_alone(
    tmp_path: Path, change: Callable[[Any, Any], object], why: str
) -> None:
    model, tokenizer = copy.deepcopy(build(FAMILY)), word_tokenizer(97, template=True)
    source, target = write_lines(tmp_path / "in.jsonl", records(20, bad=False)), tmp_path / "out.jsonl"
    with BatchGenerator(model, tokenizer) as generator:
        run_file(generator, source, target, limit=5, **SETTINGS)
        assert run_file(generator, source, target, limit=10, **SETTINGS).written == 5
    change(model, tokenizer)
    with BatchGenerator(model, tokenizer) as generator, pytest.raises(RunChangedError, match=why):
        run_file(generator, source, target, **SETTINGS)
    assert len(results(target)) == 10


def test_a_run_goes_on_with_the_model_loaded_again(tmp_path: Path) -> None:
    model, tokenizer = copy.deepcopy(build(FAMILY)), word_tokenizer(97, template=True)
    source, target = write_lines(tmp_path / "in.jsonl", records(20, bad=False)), tmp_path / "out.jsonl"
    for given in (model, tokenizer):
        given.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")
    model.config._name_or_path = loaded[0].config._name_or_path
    tokenizer.backend_tokenizer.enable_padding()  # as a call of the user's leaves it
    tokenizer.backend_tokenizer.enable_truncation(500)
    with BatchGenerator(model, tokenizer) as generator:
        run_file(generator, source, target, limit=5, **SETTINGS)
    with BatchGenerator(*loaded) as generator:
        assert run_file(generator, source, target, **SETTINGS).written == 15


def test_bad_records_can_stop_a_run(tmp_path: Path, generator: BatchGenerator) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", records(60)), tmp_path / "out.jsonl"
    with pytest.raises(InputFileError, match="line 14") as caught:
        run_file(generator, source, target, on_error="raise", **SETTINGS)
    assert "line 54" in str(caught.value)
    write_lines(source, [{"prompt": "w5"}, {"prompt": "w5 w6", "num_beams": 2, "n": 3}])
    with pytest.raises(InputFileError, match=r"line 2: .*num_beams"):
        run_file(generator, source, tmp_path / "other.jsonl", on_error="raise", **SETTINGS)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_in_and_out(tmp_path: Path, generator: BatchGenerator, suffix: str) -> None:
    lines = records(20, bad=False)
    run_file(generator, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", keep="id", **SETTINGS)
    frame = pandas.DataFrame(lines)
    source, target = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    frame.to_csv(source, index=False) if suffix == "csv" else frame.to_parquet(source)
    report = run_file(generator, source, target, **SETTINGS)
    assert report.written == 20 and report.errors == 0
    table = pandas.read_csv(target) if suffix == "csv" else pandas.read_parquet(target)
    rows = []
    for each in results(tmp_path / "out.jsonl"):
        rows += [sample["text"] for sample in each.get("samples", [each])]
    assert table["text"].tolist() == rows
    assert "Nothing to do" in str(run_file(generator, source, target, **SETTINGS))


def test_a_template_and_fields_that_are_kept(tmp_path: Path, generator: BatchGenerator) -> None:
    lines = [{"context": "w5 w6", "question": "w7", "label": "yes"}, {"context": "w5 w6", "label": "no"}]
    good, bad = answered(generator, tmp_path, lines, template="{context} {question}", keep=["label"])
    assert good["label"] == "yes" and good["text"] == generator.generate(["w5 w6 w7"], max_new_tokens=4)[0].text
    assert bad["label"] == "no" and "question" in bad["error"]


def test_what_cannot_be_run_is_said_at_once(tmp_path: Path, generator: BatchGenerator) -> None:
    source = write_lines(tmp_path / "in.jsonl", records(3))
    with pytest.raises(FilesError, match="BatchGenerator"):
        run_file(build(FAMILY), source, tmp_path / "out.jsonl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean `max_new_tokens`"):
        run_file(generator, source, tmp_path / "out.jsonl", max_new_token=5)
    with pytest.raises(ValueError, match="is the input"):
        run_file(generator, source, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
