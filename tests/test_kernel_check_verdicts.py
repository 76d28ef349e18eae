"""What a check found is remembered, for as long as nothing changes that it depends on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support_kernel_check import CPU, forget
from support_kernel_check import checking as checking  # a fixture
from support_kernel_check import nothing_remembered as nothing_remembered  # a fixture of all tests here
from support_kernels import INTERPRETED, plain

from hf_batchllm import BatchConfig, ConfigError
from hf_batchllm.kernel_check import trust, verdicts
from hf_batchllm.kernel_check.child import GROUPS
from hf_batchllm.kernel_check.outcomes import NO_ROOM, PASSED, WRONG, Outcome
from hf_batchllm.model.attention.choose_backend import warn_of_refused
from hf_batchllm.notices import Notices
from hf_batchllm.python_child import CannotStart

KEY = {"card": "a card", "driver": "1", "torch": "2", "triton": "3", "compiled for": "", "sources": "abc"}


def check_finds(patch: pytest.MonkeyPatch, found: Outcome | Exception, seconds: float = 0.0) -> list[str]:
    """What each check finds from now on, in place of a child; gives the groups that are checked."""
    groups = []

    def outcomes(group: str, device: torch.device) -> Iterator[Outcome]:
        groups.append(group)
        time.sleep(seconds)
        if isinstance(found, Exception):
            raise found
        yield found

    patch.setattr(trust, "outcomes", outcomes)
    return groups


@plain
def test_a_verdict_is_remembered(checking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of the weights may be computed otherwise: that question does not wait for a check."""
    groups = check_finds(monkeypatch, Outcome("norm", PASSED))
    assert not trust.is_known_good("layers", CPU)
    with pytest.warns(UserWarning, match="for the first time"):
        assert trust.refusal("layers", CPU) is None
    assert trust.is_known_good("layers", CPU) and not trust.is_known_good("experts", CPU)
    forget(monkeypatch)
    assert trust.refusal("layers", CPU) is None
    assert groups == ["layers"]


@plain
def test_a_verdict_is_forgotten_when_anything_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    verdicts.write(KEY, "layers", "norm: wrong")
    assert verdicts.read(KEY, "layers") == "norm: wrong"
    assert verdicts.read(KEY, "attention") is None
    assert all(verdicts.read(KEY | {changed: "another"}, "layers") is None for changed in KEY)
    key = verdicts.key_of(CPU)
    assert set(KEY) | {"library"} <= set(key) and key["torch"] == torch.__version__
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    assert verdicts.key_of(CPU) != key
    monkeypatch.setattr(verdicts, "_SOURCES", (verdicts._SOURCES[0], tmp_path))  # another check
    assert verdicts.sources.__wrapped__() != key["sources"]


@plain
@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {}}', "null", '{"failed": ""}'])
def test_a_damaged_file_counts_as_none(text: str) -> None:
    verdicts.write(KEY, "layers", "")
    path = verdicts.path_of(KEY, "layers")
    assert verdicts.read(KEY, "layers") == ""
    assert path.stat().st_mode & 0o777 == 0o644, "the folder may be one that a group shares"
    path.write_text(text)
    assert verdicts.read(KEY, "layers") is None


@plain
def test_a_folder_that_cannot_be_written_to_is_told_of(
    checking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    groups = check_finds(monkeypatch, Outcome("norm", PASSED))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert trust.refusal("layers", CPU) is None
        assert trust.refusal("layers", CPU) is None
    said = [str(each.message) for each in heard]
    assert len(said) == 2 and "cannot be remembered" in said[1] and "HF_BATCHLLM_CACHE" in said[1]
    assert len(groups) == 1, "this process remembers"


@plain
@pytest.mark.filterwarnings("ignore:.*for the first time")
def test_processes_that_begin_together_check_once(checking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, key = check_finds(monkeypatch, Outcome("norm", WRONG, "off by far"), seconds=0.3), verdicts.key_of(CPU)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: trust._found("layers", CPU, key), range(3)))
    assert len(groups) == 1 and len(set(found)) == 1 and "off by far" in str(found[0])


@plain
def test_amds_cards_run_what_was_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_batchllm.sampling import device_options, sampling_kernels

    gpu, asked = torch.device("cuda", 0), []

    def refusal(group: str, device: torch.device, *, amd: bool = False) -> str | None:
        asked.append(amd)
        return None if amd else "nobody has tried"

    monkeypatch.setattr(sampling_kernels, "refusal", refusal)
    monkeypatch.setattr(trust, "refusal", refusal)
    monkeypatch.setattr(trust, "unusable", lambda device, amd=False: None if amd else "nobody has tried")
    assert sampling_kernels.sampling_kernels(gpu, amd=True) == sampling_kernels.triton_sampling()
    assert sampling_kernels.sampling_kernels(gpu) == sampling_kernels.torch_sampling()
    assert device_options.may_pick_on(gpu, amd=True)
    assert asked == [True, False, True]


@plain
def test_a_verdict_by_hand_counts_on_a_card_that_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has run `hf-batchllm check` there. No check is started for the question."""
    monkeypatch.setattr(trust, "unusable", lambda device, amd=False: None)
    monkeypatch.setattr(trust, "is_proven", lambda device: True)
    checked = check_finds(monkeypatch, Outcome("norm", PASSED))
    assert trust.refusal("layers", CPU) is None
    verdicts.write(verdicts.key_of(CPU), "layers", "norm: wrong")
    forget(monkeypatch)
    assert "norm: wrong" in (trust.refusal("layers", CPU) or "") and not trust.is_known_good("layers", CPU)
    assert trust.refusal("sampling", CPU) is None
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "never")
    assert trust.refusal("layers", CPU) is None
    assert not checked


@plain
@pytest.mark.parametrize("end", ["start", "norm", None])
def test_one_cause_around_the_kernels_is_met_once(
    end: str | None, checking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the same for each group: one child, and one warning of a check."""
    none = CannotStart("there is no Python")
    begun = check_finds(monkeypatch, Outcome(end, NO_ROOM, "OutOfMemoryError") if end else none)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        reasons = {trust.refusal(group, CPU) for group in GROUPS}
        notices = Notices()
        warn_of_refused(["layers", "sampling", "states"], BatchConfig(backend="triton"), CPU, notices)
    assert len(reasons) == 1 and len(begun) == 1
    said = [str(each.message) for each in heard]
    assert len(said) == 2 and said[1].startswith("fused layers, picking tokens, layers that carry a state on cpu")


@plain
@pytest.mark.parametrize("error", [ImportError("no libtriton"), ValueError("triton.__spec__ is None")])
def test_a_broken_triton_is_told_of(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_find(name: str) -> None:
        raise error

    monkeypatch.setattr("importlib.util.find_spec", broken_find)
    assert f"cannot be imported: {type(error).__name__}" in str(trust._no_triton())


@plain
@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels need no compiler")
def test_no_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert trust._no_triton() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "C compiler" in str(trust._no_triton())
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "never")  # all launches may be in Triton's cache
    assert trust._no_triton() is None


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
