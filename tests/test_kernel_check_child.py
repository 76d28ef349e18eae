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
from support_broken_kernels import broken
from support_families import build
from support_kernel_check import CPU, LAYERS
from support_kernel_check import checking as checking  # a fixture
from support_kernel_check import nothing_remembered as nothing_remembered  # a fixture of all tests here
from support_kernels import plain, takes_all_masks
from support_parity import assert_parity
from support_pool import is_running

from hf_batchllm import BatchConfig, BatchGenerator, ConfigError
from hf_batchllm.kernel_check import child, errors_in_a_check, run_in_child, trust, which_card
from hf_batchllm.kernel_check.outcomes import CRASHED, HUNG, NO_ROOM, NOT_TRIED, PASSED, RAISED, WRONG
from hf_batchllm.model.choose_backend import check_backend
from hf_batchllm.notices import Notices

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, number] for number in range(20, 26)]


ENDS = {
    "wrong": (WRONG, "off by"),
    "hung": (HUNG, "stopped after 6 s"),
    "out of bounds": (CRASHED, "SIGSEGV"),
    "out of resources": (RAISED, "shared memory"),
}


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("way", [pytest.param(way, marks=takes_all_masks) if way == "wrong" else way for way in ENDS])
def test_a_broken_kernel_ends_in_plain_pytorch(
    way: str, checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child and its end are real. Answers are those of ``generate``, and one warning names card, case and cause."""
    broken(monkeypatch, tmp_path, way)
    monkeypatch.setattr("hf_batchllm.model.model_in_use.warn_of_refused", lambda *given: None)  # of other groups
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with BatchGenerator(build("llama")) as generator:
            result = generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
            again = generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
    assert_parity("llama", PROMPTS, result, 4)
    assert again.token_ids == result.token_ids
    verdict, detail = ENDS[way]
    said = [str(each.message) for each in heard if "attention" in str(each.message)]
    assert len(said) == 2 and "for the first time" in said[0]
    assert "plain PyTorch" in said[1] and f"decode, float16, head 128: {verdict}" in said[1] and detail in said[1]
    assert "hf-batchllm check" in said[1]
    (remembered,) = (tmp_path / "cache").rglob("attention-*.json")
    assert verdict in json.loads(remembered.read_text())["failed"]


@plain
def test_kernels_that_were_asked_for_by_name_are_refused_with_the_cause(
    checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, "aborted")
    with pytest.raises(ConfigError, match="SIGABRT"), pytest.warns(UserWarning, match="for the first time"):
        check_backend(BatchConfig(backend="triton"), CPU, Notices())


@plain
def test_after_a_crash_the_other_cases_run_in_a_new_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, "aborted", "layer_ops_triton.act_and_mul")
    found = {each.case: each.verdict for each in run_in_child.outcomes("layers", CPU, to_the_end=True)}
    assert found == {name: CRASHED if name.startswith("activation") else PASSED for name in LAYERS}


@plain
def test_a_child_that_cannot_even_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, None, anew=True)
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('no luck', file=sys.stderr)\nsys.exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = run_in_child.outcomes("layers", CPU, to_the_end=True)
    assert found.case == "start" and found.verdict == NOT_TRIED and "exit code 1: SystemExit: 3" in found.detail


@plain
def test_others_may_print_in_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, None)
    noise = "print('hello'); print('[1]'); print('{}')\nimport atexit; atexit.register(print, 'bye')\n"
    (tmp_path / "sitecustomize.py").write_text(noise)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = list(run_in_child.outcomes("layers", CPU))
    assert [each.case for each in found] == LAYERS and all(each.verdict == PASSED for each in found)


@plain
@pytest.mark.parametrize("given", ["soon", "0", "-3"])
def test_a_limit_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_BATCHLLM_CHECK_SECONDS", given)
    with pytest.raises(ConfigError, match="seconds above 0"):
        run_in_child.seconds_for_a_case()


@plain
@pytest.mark.parametrize("program", ["", "/nowhere/python"])
def test_where_no_child_can_be_started(
    program: str, checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, None)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", program)
    with pytest.warns(UserWarning, match="for the first time"):
        reason = trust.refusal("layers", CPU) or ""
    assert "have to be checked on this card first" in reason
    assert not list(tmp_path.rglob("*.json")), "nothing is known of the kernels"


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("way", ["no room", "killed"])
def test_want_of_memory_is_no_verdict(
    way: str, checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, way, "layer_ops_triton.add_rms_norm")
    with pytest.warns(UserWarning, match="for the first time"):
        reason = trust.refusal("layers", CPU) or ""
    assert "no memory for that" in reason and "before the model is loaded" in reason
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("way", ["terminated", "no compiler", "missing file"])
def test_what_is_around_a_kernel_is_no_verdict(
    way: str, checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, way, "layer_ops_triton.add_rms_norm")
    with pytest.warns(UserWarning, match="for the first time"):
        reason = trust.refusal("layers", CPU) or ""
    assert "that cannot be done" in reason
    assert not list(tmp_path.rglob("*.json"))


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
    assert errors_in_a_check.verdict_of(error) == verdict


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("code", ["0", "7"])
def test_an_end_without_a_word_is_a_failure(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever code the process ends with, no case after it has run."""
    broken(monkeypatch, tmp_path, "left", "layer_ops_triton.add_rms_norm", code)
    (found,) = run_in_child.outcomes("layers", CPU)
    assert found.verdict == CRASHED and f"exit code {code}" in found.detail


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("way", ["import os; os.abort()", "import time; time.sleep(600)"])
def test_how_the_child_ends_after_its_last_word_is_of_no_account(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, None)
    text = f"import atexit\ndef last():\n    {way}\natexit.register(last)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = list(run_in_child.outcomes("layers", CPU, to_the_end=True))
    assert [each.verdict for each in found] == [PASSED] * len(LAYERS)


@plain
def test_what_a_kernel_leaves_behind_is_ended_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that hangs, say. It holds the pipe, too."""
    broken(monkeypatch, tmp_path, "left behind", "layer_ops_triton.add_rms_norm")
    assert [*run_in_child.outcomes("layers", CPU)][-1].verdict == CRASHED
    ends(int((tmp_path / "left").read_text()))


def ends(process_id: int) -> None:
    """Within a while, which is longer than any machine needs for it."""
    for _ in range(600):
        if not is_running(process_id):
            return
        time.sleep(0.1)
    pytest.fail(f"process {process_id} runs on")


@plain
def test_a_child_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a kernel that hangs, nobody else would ever stop it."""
    broken(monkeypatch, tmp_path, "hung", "layer_ops_triton.add_rms_norm")
    monkeypatch.setenv("HF_BATCHLLM_CHECK_SECONDS", "300")
    start = tmp_path / "sitecustomize.py"
    start.write_text(
        start.read_text().replace(
            "import time; time",
            f"open(r'{tmp_path}/pid', 'w').write(str(__import__('os').getpid())); import time; time",
        )
    )
    program = (
        "import torch; from hf_batchllm.kernel_check.run_in_child import outcomes\n"
        "list(outcomes('layers', torch.device('cpu')))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    child_id = tmp_path / "pid"
    for _ in range(600):
        if child_id.exists() and child_id.read_text():
            break
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    ends(int(child_id.read_text()))


@plain
def test_what_a_compiler_says_is_passed_on(checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, "no headers", "layer_ops_triton.add_rms_norm")
    with pytest.warns(UserWarning, match="for the first time"):
        reason = trust.refusal("layers", CPU) or ""
    assert "gcc failed" in reason and "Python.h: No such file" in reason and "-O3" not in reason


@plain
def test_modules_of_the_current_folder_are_not_the_childs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, None, anew=True)
    (tmp_path / "queue.py").write_text("raise ImportError('not the real one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *run_in_child.sys.path])
    assert [each.verdict for each in run_in_child.outcomes("layers", CPU)] == [PASSED] * len(LAYERS)


@plain
def test_a_program_that_is_not_python_is_not_started_again(
    checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, None)
    monkeypatch.setattr("sys.frozen", True, raising=False)
    with pytest.warns(UserWarning, match="for the first time"):
        assert "frozen" in (trust.refusal("layers", CPU) or "")
    monkeypatch.delattr("sys.frozen")
    monkeypatch.setenv(run_in_child.CHECKING, "1")  # such a program, started in the place of Python
    monkeypatch.setattr(trust, "_answers", {})
    monkeypatch.setattr(trust, "_no_checks", {})
    monkeypatch.setattr(trust, "outcomes", lambda *given: pytest.fail("started a child of its own"))
    assert "not Python" in (trust.refusal("layers", CPU) or "")
    assert not list(tmp_path.rglob("*.json"))


@plain
def test_the_child_runs_on_the_same_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is another one where CUDA_VISIBLE_DEVICES was changed after CUDA had begun."""
    marks = {0: "GPU-b", 1: "GPU-a"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(which_card, "mark_of", lambda device: marks[device.index])
    named = torch.device("cuda", 0)
    assert which_card.device_with("GPU-a", named) == torch.device("cuda", 1)
    assert which_card.device_with("", named) == named
    lines = io.StringIO()
    child.main(["layers", "cuda:0", "GPU-c"], lines)
    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert line["case"] == "start" and line["verdict"] == NOT_TRIED and "CUDA_VISIBLE_DEVICES" in line["detail"]
