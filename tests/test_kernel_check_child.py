"""Kernels are checked in a child process: whatever is wrong with one, answers are right and somebody is told."""

from __future__ import annotations

import io
import json
import multiprocessing.spawn
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from support_families import build
from support_kernel_check import CPU, LAYERS, Break
from support_kernel_check import break_kernel as break_kernel  # a fixture
from support_kernel_check import checking as checking  # a fixture
from support_kernel_check import nothing_remembered as nothing_remembered  # a fixture of all tests here
from support_kernels import INTERPRETED, plain, takes_all_masks
from support_parity import assert_parity
from support_pool import is_running

from hf_batchllm import BatchConfig, BatchGenerator, ConfigError
from hf_batchllm.cli import main
from hf_batchllm.kernel_check import child, outcomes, run_in_child, trust, verdicts
from hf_batchllm.kernel_check.outcomes import CRASHED, NO_ROOM, NOT_TRIED, PASSED, RAISED, WRONG, Outcome
from hf_batchllm.model.attention.choose_backend import check_backend
from hf_batchllm.notices import Notices

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, number] for number in range(20, 26)]
ATTEND = "decode_triton.attend_items"
ENDS = {  # the kernel that is broken, and what is said of the first case that runs it
    "wrong": (ATTEND, "decode, float16, head 128: wrong", "off by"),
    # In the first case of all: on a busy machine another one may take longer than the few seconds that are given here.
    "hung": ("layer_ops_triton.rope_and_write", "KV cache, float16, head 128: hung", "stopped after 6 s"),
    "out of bounds": (ATTEND, "decode, float16, head 128: crashed", "SIGSEGV"),
    "out of resources": (ATTEND, "decode, float16, head 128: raised an error", "shared memory"),
}


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("way", [pytest.param(way, marks=takes_all_masks) if way == "wrong" else way for way in ENDS])
def test_a_broken_kernel_ends_in_plain_pytorch(
    way: str, checking: None, break_kernel: Break, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child and its end are real. Answers are those of ``generate``, and one warning names card, case and cause."""
    kernel, failed, detail = ENDS[way]
    break_kernel(way, kernel)
    monkeypatch.setattr("hf_batchllm.model.model_in_use.warn_of_refused", lambda *given: None)  # of other groups
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with BatchGenerator(build("llama")) as generator:
            result = generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
            again = generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
    assert_parity("llama", PROMPTS, result, 4)
    assert again.token_ids == result.token_ids
    said = [str(each.message) for each in heard if "attention" in str(each.message)]
    assert len(said) == 2 and "for the first time" in said[0]
    assert "plain PyTorch" in said[1] and failed in said[1] and detail in said[1]
    assert "hf-batchllm check" in said[1]
    (remembered,) = (tmp_path / "cache").rglob("attention-*.json")
    assert failed in json.loads(remembered.read_text())["failed"]


@plain
def test_kernels_that_were_asked_for_by_name_are_refused_with_the_cause(checking: None, break_kernel: Break) -> None:
    break_kernel("aborted", ATTEND)
    with pytest.raises(ConfigError, match="SIGABRT"), pytest.warns(UserWarning, match="for the first time"):
        check_backend(BatchConfig(backend="triton"), CPU, Notices())


AROUND = {
    "no room": ("no memory for it", "before the model is loaded"),
    "killed": ("no memory for it", "SIGKILL"),
    "terminated": ("that cannot be done: SIGTERM",),
    "no compiler": ("that cannot be done: RuntimeError: Failed to find C compiler",),
    "missing file": ("that cannot be done: FileNotFoundError",),
    "full disk": ("that cannot be done: exit code 74",),
    "no headers": ("gcc failed", "Python.h: No such file"),
}


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("way", AROUND)
def test_what_is_around_a_kernel_is_no_verdict(way: str, checking: None, break_kernel: Break, tmp_path: Path) -> None:
    break_kernel(way)
    with pytest.warns(UserWarning, match="for the first time"):
        reason = trust.refusal("layers", CPU) or ""
    assert "have to be checked on this card first" in reason and all(words in reason for words in AROUND[way])
    assert "-O3" not in reason, "a compiler's command is long"
    assert not list(tmp_path.rglob("*.json"))


@plain
@pytest.mark.parametrize("program", ["", "/nowhere/python", "frozen"])
def test_where_no_child_can_be_started(
    program: str, checking: None, break_kernel: Break, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_kernel(None)
    if program == "frozen":
        monkeypatch.setattr("sys.frozen", True, raising=False)
    else:
        monkeypatch.setattr(multiprocessing.spawn, "_python_exe", program)
    with pytest.warns(UserWarning, match="for the first time"):
        reason = trust.refusal("layers", CPU) or ""
    assert "have to be checked on this card first" in reason and program in reason
    assert not list(tmp_path.rglob("*.json")), "nothing is known of the kernels"


@plain
def test_a_program_that_is_not_python_starts_no_child_of_its_own(
    checking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started in the place of Python."""
    monkeypatch.setenv(run_in_child.CHECKING, "1")
    monkeypatch.setattr(trust, "outcomes", lambda *given: pytest.fail("started a child of its own"))
    assert "not Python" in (trust.refusal("layers", CPU) or "")


@plain
def test_after_a_crash_the_other_cases_run_in_a_new_child(break_kernel: Break) -> None:
    break_kernel("aborted", "layer_ops_triton.act_and_mul")
    found = {each.case: each.verdict for each in run_in_child.outcomes("layers", CPU, to_the_end=True)}
    assert found == {name: CRASHED if name.startswith("activation") else PASSED for name in LAYERS}


@plain
def test_a_child_that_cannot_even_begin(break_kernel: Break) -> None:
    break_kernel(None, start="import sys\nprint('no luck', file=sys.stderr)\nsys.exit(3)\n", anew=True)
    (found,) = run_in_child.outcomes("layers", CPU, to_the_end=True)
    assert found.case == "start" and found.verdict == NOT_TRIED and "exit code 1: SystemExit: 3" in found.detail


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("code", ["0", "7"])
def test_an_end_without_a_word_is_a_failure(code: str, break_kernel: Break) -> None:
    """Whatever code the process ends with, no case after it has run."""
    break_kernel(f"left with {code}")
    (found,) = run_in_child.outcomes("layers", CPU)
    assert found.verdict == CRASHED and f"exit code {code}" in found.detail


LAST = "import atexit\ndef last():\n    {}\natexit.register(last)\n"


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("start", ["import os; os.abort()", "import time; time.sleep(600)", "print('bye')"])
def test_what_else_the_child_says_and_how_it_ends_is_of_no_account(start: str, break_kernel: Break) -> None:
    break_kernel(None, start=f"print('hello'); print('[1]'); print('{{}}')\n{LAST.format(start)}")
    found = list(run_in_child.outcomes("layers", CPU, to_the_end=True))
    assert [(each.case, each.verdict) for each in found] == [(name, PASSED) for name in LAYERS]


@plain
def test_what_a_kernel_leaves_behind_is_ended_too(break_kernel: Break, tmp_path: Path) -> None:
    """A compiler that hangs, say. It holds the files, too."""
    break_kernel("left behind")
    assert [*run_in_child.outcomes("layers", CPU)][-1].verdict == CRASHED
    assert_ends(tmp_path / "noted")


@plain
def test_a_child_ends_with_the_process_that_started_it(
    break_kernel: Break, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a kernel that hangs, nobody else would ever stop it. It leaves no file behind."""
    break_kernel("noted, hung")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    program = (
        "import torch; from hf_batchllm.kernel_check.run_in_child import outcomes\n"
        "list(outcomes('layers', torch.device('cpu')))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    for _ in range(600):
        if (tmp_path / "noted").exists() and (tmp_path / "noted").read_text():
            break
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert_ends(tmp_path / "noted")
    assert not list((tmp_path / "temporary").rglob("outcomes"))


def assert_ends(noted: Path) -> None:
    """Within a while, which is longer than any machine needs for it."""
    for _ in range(600):
        if not is_running(int(noted.read_text())):
            return
        time.sleep(0.1)
    pytest.fail(f"process {noted.read_text()} runs on")


@plain
def test_modules_of_the_current_folder_are_not_the_childs(
    break_kernel: Break, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_kernel(None, anew=True)
    monkeypatch.delenv("PYTHONPATH")
    (tmp_path / "queue.py").write_text("raise ImportError('not the real one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *run_in_child.sys.path])
    assert [each.verdict for each in run_in_child.outcomes("layers", CPU)] == [PASSED] * len(LAYERS)


@plain
@pytest.mark.parametrize("given", ["soon", "0", "-3"])
def test_a_limit_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_BATCHLLM_CHECK_SECONDS", given)
    with pytest.raises(ConfigError, match="seconds above 0"):
        run_in_child.seconds_for_a_case()


@plain
@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), NO_ROOM),
        (MemoryError(), NO_ROOM),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), NOT_TRIED),
        (subprocess.CalledProcessError(1, ["gcc"]), NOT_TRIED),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), NOT_TRIED),
        (RuntimeError("PTX assembly aborted"), RAISED),
    ],
)
def test_what_an_error_says(error: Exception, verdict: str) -> None:
    assert outcomes.verdict_of(error) == verdict


@plain
def test_a_child_that_sees_another_card_tries_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number means another card where CUDA_VISIBLE_DEVICES was changed after CUDA had begun."""
    monkeypatch.setattr(child, "card_of", lambda device: "another card, 8.0")
    lines = io.StringIO()
    child.main(lines, "layers", "cuda:0", "a card, 9.0")
    (found,) = (Outcome(*json.loads(line)) for line in lines.getvalue().splitlines())
    assert (found.case, found.verdict) == ("start", NOT_TRIED) and "CUDA_VISIBLE_DEVICES" in found.detail


# -- hf-batchllm check ---------------------------------------------------------------------------------------------


@plain
def test_the_command_prints_a_table(break_kernel: Break, capsys: pytest.CaptureFixture[str]) -> None:
    break_kernel("wrong", "layer_ops_triton.act_and_mul")
    assert main(["check", "--only", "layers", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "triton:" in text and "norm" in text and "2 failed" in text
    lines = [line for line in text.splitlines() if line.strip().startswith("activation")]
    assert len(lines) == 2 and all("wrong" in line for line in lines)
    assert verdicts.read(verdicts.key_of(CPU), "layers")


@plain
@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="is about a machine without a GPU")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "--device cuda: "),
        (["--device", "cpu"], "need a CUDA GPU"),
        (["--device", "gpu"], "--device gpu: "),
        (["--only", "x"], "'x'"),
    ],
)
def test_where_there_is_nothing_to_check(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert why in capsys.readouterr().err


@plain
def test_a_failure_is_not_hidden_by_want_of_memory(
    break_kernel: Break, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_kernel(None)
    found = [Outcome("norm", WRONG, "off by far"), Outcome("activation", NO_ROOM, "OutOfMemoryError")]
    monkeypatch.setattr(run_in_child, "outcomes", lambda *given, **named: iter(found))
    assert main(["check", "--only", "layers", "--device", "cpu"]) == 1
    assert "1 failed" in capsys.readouterr().out
    assert "off by far" in str(verdicts.read(verdicts.key_of(CPU), "layers"))
