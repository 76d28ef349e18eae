"""The settings of products whose sums are not split, which are put back."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support_interrupts import Stop

from hf_batchllm.model import unsplit_products
from hf_batchllm.model.unsplit_products import UnsplitProducts, why_not_unsplit

LT, CUBLAS, APART = "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"
LIBRARY = torch._C._BlasBackend


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that were preferred, one after the other."""
    set_one: list[Any] = [LIBRARY.Cublas]

    def preferred(*library: Any) -> Any:
        set_one.extend(library)
        return set_one[-1]

    monkeypatch.delenv(LT, raising=False)
    monkeypatch.setenv(CUBLAS, ":4096:8")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    return set_one


def test_a_sum_may_not_be_split_and_has_no_room_for_it(libraries: list[Any]) -> None:
    before, matmul = settings(), torch.backends.cuda.matmul

    def in_force() -> bool:
        reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
        return (os.environ[LT], os.environ[CUBLAS], *reduced) == ("1", ":4096:8", False, False)

    def run() -> None:
        with UnsplitProducts().applied():
            assert in_force() and libraries[-1] == LIBRARY.Cublaslt
            with UnsplitProducts().applied():  # a criterion that generates, say
                assert in_force()
            assert in_force()
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert settings() == before
    assert LT not in os.environ and os.environ[CUBLAS] == ":4096:8"
    assert libraries == [LIBRARY.Cublas, LIBRARY.Cublaslt, LIBRARY.Cublas]


def test_what_the_environment_says_comes_back(libraries: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LT, "64")
    with UnsplitProducts().applied():
        assert os.environ[LT] == "1"
    assert os.environ[LT] == "64"


def test_newer_versions_of_pytorch_are_told_by_a_call(libraries: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the environment once in a process, which may be long ago."""
    sizes = [1 << 20]
    monkeypatch.setattr(torch._C, "_cuda_setCublasLtWorkspaceSize", sizes.append, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCublasLtWorkspaceSize", lambda: sizes[-1], raising=False)
    with UnsplitProducts().applied():
        assert sizes[-1] == 1024 and LT not in os.environ
    assert sizes == [1 << 20, 1024, 1 << 20] and LT not in os.environ


def settings() -> unsplit_products._Settings:
    return unsplit_products._Settings.now()


def test_two_threads_leave_nothing_behind(libraries: list[Any]) -> None:
    before = settings()
    one, other = UnsplitProducts(), UnsplitProducts()
    first, second = one.applied(), other.applied()
    first.__enter__()
    second.__enter__()
    within = settings()
    first.__exit__(None, None, None)
    assert settings() == within and torch.nn.functional.linear is not before.linear
    second.__exit__(None, None, None)
    assert settings() == before


def test_nothing_is_left_after_an_interrupt(libraries: list[Any]) -> None:
    before = settings()
    files = ("model/unsplit_products.py",)

    def run() -> None:
        products = UnsplitProducts()
        try:
            with products.applied():
                pass
        finally:
            products.restore()  # as a call does when it is over
            gc.collect()

    every = Stop(0, files)
    every.during(run)
    for at in range(1, every.count):
        stop = Stop(at, files)
        with contextlib.suppress(KeyboardInterrupt):
            stop.during(run)
        UnsplitProducts().restore()  # another may come while the first is made good
        assert settings() == before, stop.place
        assert not unsplit_products._in_force


def test_memory_that_is_kept_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(APART, raising=False)
    assert why_not_unsplit() is None
    monkeypatch.setenv(APART, "0")
    assert f"{APART} is off" in (why_not_unsplit() or "")


@pytest.mark.gpu
def test_products_of_others_have_their_memory_afterwards() -> None:
    """A stream that such products were the first to use."""
    stream, x = torch.cuda.Stream(), torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(stream), UnsplitProducts().applied():
        x @ x
    assert torch.cuda.memory_allocated() - before > 1 << 20


@pytest.mark.gpu
def test_products_that_came_before_on_a_gpu() -> None:
    """A notebook has run the model before: the settings of products are in force all the same."""
    x, weight = (torch.randn(rows, 14336, device="cuda", dtype=torch.bfloat16) for rows in (512, 4096))

    def varies() -> bool:
        every = torch.nn.functional.linear(x, weight)
        return any(not torch.equal(torch.nn.functional.linear(x[:rows], weight), every[:rows]) for rows in (1, 8, 64))

    assert varies()
    with UnsplitProducts().applied():
        assert not varies()
    assert varies()
    torch.use_deterministic_algorithms(True)
    try:
        with UnsplitProducts().applied():
            assert not varies()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_nothing_is_said_of_experiments() -> None:
    """PyTorch does so once in a process, on standard error."""
    code = "import torch; from hf_batchllm.model.unsplit_products import UnsplitProducts as Unsplit\n"
    code += "with Unsplit().applied(): torch.ones(8, 8, device='cuda') @ torch.ones(8, 8, device='cuda')"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
