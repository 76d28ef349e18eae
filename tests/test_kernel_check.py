"""Kernels are checked before they are trusted: whatever is wrong with one, answers are right and somebody is told."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import multiprocessing.spawn
import subprocess
import threading
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support_broken_kernels import broken
from support_families import build
from support_kernels import DEVICE, INTERPRETED, kernel, plain
from support_parity import assert_parity

from hf_batchllm import BatchConfig, BatchGenerator, ConfigError
from hf_batchllm.cli.commands import dispatch
from hf_batchllm.cli.messages import UsageError
from hf_batchllm.kernel_check import child, errors_in_a_check, run_in_child, trust, verdicts, which_card
from hf_batchllm.kernel_check.attention_cases import Shape
from hf_batchllm.kernel_check.comparing import Where, Wrong, near, same
from hf_batchllm.kernel_check.groups import GROUPS
from hf_batchllm.kernel_check.outcomes import CRASHED, HUNG, NO_ROOM, NOT_TRIED, PASSED, RAISED, WRONG, Outcome
from hf_batchllm.kernel_check.verdicts import Verdicts
from hf_batchllm.kernels import decode_torch, prefill_torch
from hf_batchllm.model import triton_attention
from hf_batchllm.model.choose_backend import check_backend
from hf_batchllm.notices import Notices
from hf_batchllm.patches.fused_experts import ExpertKernels
from hf_batchllm.sampling.sampling_kernels import SamplingKernels

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, number] for number in range(20, 26)]
KEY = {"card": "a card", "driver": "1", "torch": "2", "triton": "3", "compiled for": "", "sources": "abc"}


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_answers", {})


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes its CPU for a device that kernels run on; only the child knows that they are interpreted."""
    monkeypatch.setattr(trust, "unusable", lambda device, amd=False: None)
    monkeypatch.setattr("hf_batchllm.model.choose_backend.unusable", lambda device, amd=False: None)
    monkeypatch.setattr("hf_batchllm.model.choose_backend.is_interpreted", lambda: False)


# -- the cases -------------------------------------------------------------------------------------------------


@kernel
@pytest.mark.parametrize("group", GROUPS)
def test_all_kernels_pass(group: str) -> None:
    for name, case in GROUPS[group](Where(torch.device(DEVICE))).items():
        case()
        assert name


@plain
def test_what_counts_as_wrong() -> None:
    twins = torch.linspace(-1, 1, 100)
    near(twins + 1e-6, twins)
    with pytest.raises(Wrong, match=r"off by 1\.7e-01"):
        near(twins + 0.1, twins)
    odd = twins.clone()
    odd[3] = torch.nan
    with pytest.raises(Wrong, match="1 values of the result are no numbers, and 0 of the twin's"):
        near(odd, twins)
    near(odd, odd.clone())
    with pytest.raises(Wrong, match="float64"):
        near(twins.double(), twins)
    with pytest.raises(Wrong, match="2 of 5 values of the tokens"):
        same(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 0, 0]), "the tokens", but=1)


# -- the child -------------------------------------------------------------------------------------------------

ENDS = {
    "wrong": (WRONG, "off by"),
    "hung": (HUNG, "stopped after 2 s"),
    "aborted": (CRASHED, "SIGABRT"),
    "out of bounds": (CRASHED, "SIGSEGV"),
    "out of resources": (RAISED, "shared memory"),
}


@plain
@pytest.mark.parametrize("way", ENDS)
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
    broken(monkeypatch, tmp_path, "aborted", "layer_ops_triton.add_rms_norm")
    found = {each.case: each.verdict for each in run_in_child.outcomes("layers", CPU, to_the_end=True)}
    assert found == {
        "norm": CRASHED,
        "activation": PASSED,
        "digest of weights": PASSED,
    }


@plain
def test_a_child_that_cannot_even_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, None)
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
    assert len(found) == 3 and all(each.verdict == PASSED for each in found)


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


@plain
@pytest.mark.parametrize("code", ["0", "7"])
def test_an_end_without_a_word_is_a_failure(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever code the process ends with, no case after it has run."""
    broken(monkeypatch, tmp_path, "left", "layer_ops_triton.add_rms_norm", code)
    (found,) = run_in_child.outcomes("layers", CPU)
    assert found.verdict == CRASHED and f"exit code {code}" in found.detail


@plain
@pytest.mark.parametrize("way", ["import os; os.abort()", "import time; time.sleep(600)"])
def test_how_the_child_ends_after_its_last_word_is_of_no_account(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, None)
    text = f"import atexit\ndef last():\n    {way}\natexit.register(last)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began = time.monotonic()
    found = list(run_in_child.outcomes("layers", CPU, to_the_end=True))
    assert [each.verdict for each in found] == [PASSED] * 3
    assert time.monotonic() - began < 60


@plain
def test_what_a_kernel_leaves_behind_is_ended_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that hangs, say. It holds the pipe, too."""
    broken(monkeypatch, tmp_path, "left behind", "layer_ops_triton.add_rms_norm")
    began = time.monotonic()
    found = list(run_in_child.outcomes("layers", CPU))
    assert found[-1].verdict == CRASHED and time.monotonic() - began < 60
    time.sleep(0.2)
    left = int((tmp_path / "left").read_text())
    state = Path(f"/proc/{left}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@plain
def test_modules_of_the_current_folder_are_not_the_childs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, None)
    (tmp_path / "queue.py").write_text("raise ImportError('not the real one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *run_in_child.sys.path])
    assert [each.verdict for each in run_in_child.outcomes("layers", CPU)] == [PASSED] * 3


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


@plain
@pytest.mark.parametrize("group", GROUPS)
def test_each_kernel_of_a_group_is_tried(group: str) -> None:
    """All that another room takes out of the kernels' modules is called by some case."""
    from hf_batchllm.kernel_check import attention_cases, other_cases

    asked = {
        "attention": ["rope_and_write", "attend_items", "merge_parts", "attend_chunks"],
        "layers": ["add_rms_norm", "act_and_mul", "digest"],
        "sampling": [field.name for field in dataclasses.fields(SamplingKernels)],
        "experts": [field.name for field in dataclasses.fields(ExpertKernels)],
        "states": ["short_convolution", "delta_rule", "state_space", "selective_scan", "decay_and_beta", "gated_norm"],
    }
    text = inspect.getsource(attention_cases if group == "attention" else getattr(other_cases, group))
    assert [name for name in asked[group] if name not in text] == []


@plain
def test_float32_is_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 may be rounded to TF32, as environment variables and settings of torch have it."""
    from hf_batchllm.kernel_check import attention_cases

    seen = []
    for module, name in ((decode_torch, "attend_items"), (prefill_torch, "attend_chunks")):
        place = 1 if name == "attend_items" else 0
        real = getattr(module, name)

        def watched(*given: Any, _real: Any = real, _place: int = place, **named: Any) -> None:
            seen.append(given[_place].dtype)
            _real(*given, **named)

        monkeypatch.setattr(module, name, watched)
    monkeypatch.setattr("hf_batchllm.kernels.decode_triton.attend_items", decode_torch.attend_items)
    monkeypatch.setattr("hf_batchllm.kernels.decode_triton.merge_parts", decode_torch.merge_parts)
    monkeypatch.setattr("hf_batchllm.kernels.prefill_triton.attend_chunks", prefill_torch.attend_chunks)
    assert attention_cases.tried(CPU, Shape(4, 1, 128, 128, 16, torch.float32)) is None
    assert set(seen) == {torch.float32, torch.float64} and len(seen) >= 8


# -- verdicts --------------------------------------------------------------------------------------------------


@plain
def test_a_verdict_is_reused_by_later_processes(
    checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, None)
    with pytest.warns(UserWarning, match="for the first time"):
        assert trust.refusal("layers", CPU) is None
    monkeypatch.setattr(trust, "_answers", {})  # another process
    monkeypatch.setattr(trust, "outcomes", lambda *given: pytest.fail("checked again"))
    assert trust.refusal("layers", CPU) is None


@plain
@pytest.mark.parametrize("changed", KEY)
def test_a_verdict_is_forgotten_when_anything_changes(changed: str, tmp_path: Path) -> None:
    kept = Verdicts(tmp_path)
    kept.write(KEY, "layers", "norm: wrong")
    assert kept.read(KEY, "layers") == "norm: wrong"
    assert kept.read(KEY, "attention") is None
    assert kept.read(KEY | {changed: "another"}, "layers") is None


@plain
def test_the_key_holds_all_that_matters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = verdicts.key_of(CPU)
    assert set(KEY) | {"library"} <= set(key) and key["torch"] == torch.__version__
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    assert verdicts.key_of(CPU) != key
    monkeypatch.setattr(verdicts, "_HERE", tmp_path)  # another check
    assert verdicts.sources.__wrapped__() != key["sources"]


@plain
@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {}}', "null", '{"failed": ""}'])
def test_a_damaged_file_counts_as_none(text: str, tmp_path: Path) -> None:
    kept = Verdicts(tmp_path)
    kept.write(KEY, "layers", "")
    assert kept.read(KEY, "layers") == ""
    kept.path(KEY, "layers").write_text(text)
    assert kept.read(KEY, "layers") is None


@plain
def test_a_folder_that_cannot_be_written_to_is_told_of(
    checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, None)
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setattr(trust, "outcomes", lambda *given: iter([Outcome("norm", PASSED)]))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert trust.refusal("layers", CPU) is None
        assert trust.refusal("layers", CPU) is None, "this process remembers"
    said = [str(each.message) for each in heard]
    assert len(said) == 2 and "cannot be remembered" in said[1] and "HF_BATCHLLM_CACHE" in said[1]


@plain
def test_processes_that_begin_together_check_once(
    checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, tmp_path, None)
    ran = []

    def slow(*given: Any) -> Any:
        ran.append(given)
        time.sleep(0.3)
        return iter([Outcome("norm", WRONG, "off by far")])

    monkeypatch.setattr(trust, "outcomes", slow)
    found: list[str | None] = []
    key = verdicts.key_of(CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=lambda: found.append(trust._found("layers", CPU, key))) for _ in range(3)]
        [each.start() for each in threads]
        [each.join() for each in threads]
    assert len(ran) == 1 and len(set(found)) == 1 and "off by far" in str(found[0])


@plain
@pytest.mark.skipif(verdicts.fcntl is None, reason="this system has no locks on files")
def test_a_process_that_is_stopped_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verdicts, "_SILENT_WAIT", 0.2)
    monkeypatch.setattr(verdicts, "_LONGEST_WAIT", 0.6)
    kept, began = Verdicts(tmp_path), time.monotonic()
    with kept.alone(KEY, "layers"), pytest.warns(UserWarning, match="another process"), kept.alone(KEY, "layers"):
        assert 0.5 < time.monotonic() - began < 5


@plain
def test_a_question_that_starts_no_check(checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A digest of the weights may be computed otherwise: it does not wait for a check."""
    broken(monkeypatch, tmp_path, None)
    monkeypatch.setattr(trust, "outcomes", lambda *given: iter([Outcome("norm", PASSED)]))
    assert not trust.is_known_good("layers", CPU)
    with pytest.warns(UserWarning, match="for the first time"):
        assert trust.refusal("layers", CPU) is None
    assert trust.is_known_good("layers", CPU) and not trust.is_known_good("experts", CPU)


@plain
def test_amds_cards_run_what_was_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_batchllm.sampling import device_sampler, sampling_kernels

    gpu, asked = torch.device("cuda", 0), []

    def refusal(group: str, device: torch.device, *, amd: bool = False) -> str | None:
        asked.append(amd)
        return None if amd else "nobody has tried"

    monkeypatch.setattr(sampling_kernels, "refusal", refusal)
    monkeypatch.setattr(trust, "refusal", refusal)
    monkeypatch.setattr(trust, "unusable", lambda device, amd=False: None if amd else "nobody has tried")
    assert sampling_kernels.sampling_kernels(gpu, amd=True) == sampling_kernels.triton_sampling()
    assert sampling_kernels.sampling_kernels(gpu) == sampling_kernels.torch_sampling()
    assert device_sampler.may_pick_on(gpu, amd=True)
    assert asked == [True, False, True]


# -- which cards are checked -----------------------------------------------------------------------------------


@plain
@pytest.mark.parametrize(
    ("capability", "version", "proven"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.8.0", False), ((8, 0), "3.6.0", False), ((12, 0), "3.6.0", False)],
)
def test_what_the_projects_tests_have_run_on_is_trusted(
    capability: tuple[int, int], version: str, proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_BATCHLLM_CHECK", raising=False)
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr("hf_batchllm.kernels.cards.capability_on", lambda device: capability)
    assert trust.is_checked(torch.device("cuda")) != proven
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "never")
    assert not trust.is_checked(torch.device("cuda"))
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "sometimes")
    with pytest.raises(ConfigError, match="`always` or `never`"):
        trust.is_checked(torch.device("cuda"))


# -- shapes that come up later ---------------------------------------------------------------------------------


@plain
def test_a_shape_that_fails_falls_back_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from support_attention_twins import TWINS

    tried: list[Shape] = []

    def failing(device: torch.device, shape: Shape) -> str | None:
        tried.append(shape)
        return f"decode, {shape}: OutOfResources: shared memory" if shape.window is None else None

    def make_backend(config: Any, device: Any, storage: Any, notices: Any) -> Any:
        return triton_attention.TritonBackend(TWINS, storage, device, notices, tries_shapes=True)

    monkeypatch.setattr(triton_attention, "_tried", cache(failing))
    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
    with warnings.catch_warnings(record=True) as heard, BatchGenerator(build("gemma3")) as generator:
        warnings.simplefilter("always")
        result = generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
        generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
    assert_parity("gemma3", PROMPTS, result, 4)
    assert len(tried) == 2 and {shape.window is None for shape in tried} == {True, False}
    said = [str(each.message) for each in heard if "OutOfResources" in str(each.message)]
    assert len(said) == 1 and "runs in plain PyTorch" in said[0]


@plain
def test_what_a_try_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_batchllm.kernel_check import attention_cases

    shape = Shape(4, 2, 64, 64, 16, torch.float16)
    monkeypatch.setattr(attention_cases, "decode", lambda where, shape, **given: None)
    monkeypatch.setattr(attention_cases, "prompts", lambda where, shape: None)
    assert attention_cases.tried(CPU, shape) is None

    def out_of_memory(where: Any, shape: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention_cases, "prompts", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        attention_cases.tried(CPU, shape)


# -- the command -----------------------------------------------------------------------------------------------


@plain
def test_the_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, tmp_path, "wrong", "layer_ops_triton.add_rms_norm")
    assert dispatch(["check", "--only", "layers", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "triton:" in text and "activation" in text and "1 failed" in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("norm")]
    assert "wrong" in line
    assert Verdicts(tmp_path / "cache" / "kernel-checks").read(verdicts.key_of(CPU), "layers")


@plain
@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="is about a machine without a GPU")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no GPU"),
        (["--device", "cpu"], "need a CUDA GPU"),
        (["--device", "gpu"], "is 'gpu'"),
        (["--only", "x"], "'x'"),
    ],
)
def test_where_there_is_nothing_to_check(arguments: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        dispatch(["check", *arguments])
