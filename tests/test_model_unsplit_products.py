"""The settings of products whose sums are not split, which are put back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from hf_batchllm.model import unsplit_products
from hf_batchllm.model.unsplit_products import unsplit, why_not_unsplit

LIBRARY = torch._C._BlasBackend
MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that were preferred, one after the other, and never cuBLAS while no sum may be split: it would refuse."""
    set_one: list[Any] = [LIBRARY.Cublas]

    def preferred(*library: Any) -> Any:
        if library:
            assert MATMUL.allow_bf16_reduced_precision_reduction_split_k
            assert MATMUL.allow_fp16_reduced_precision_reduction_split_k
        set_one.extend(library)
        return set_one[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    return set_one


def test_no_sum_may_be_split(libraries: list[Any]) -> None:
    before, environment = settings(), dict(os.environ)

    def in_force() -> bool:
        split = (
            MATMUL.allow_bf16_reduced_precision_reduction_split_k,
            MATMUL.allow_fp16_reduced_precision_reduction_split_k,
        )
        return libraries[-1] == LIBRARY.Cublaslt and not any(split) and dict(os.environ) == environment

    def run() -> None:
        with unsplit():
            assert in_force() and not MATMUL.allow_bf16_reduced_precision_reduction
            with unsplit():  # a criterion that generates, say
                assert in_force()
            assert in_force()
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert settings() == before
    assert libraries == [LIBRARY.Cublas, LIBRARY.Cublaslt, LIBRARY.Cublas]


def test_what_the_user_has_chosen_comes_back(libraries: list[Any]) -> None:
    libraries.append(LIBRARY.Cublaslt)
    MATMUL.allow_bf16_reduced_precision_reduction = (False, True)
    try:
        before = settings()
        with unsplit():
            assert settings() != before
        assert settings() == before
        assert libraries == [LIBRARY.Cublas, LIBRARY.Cublaslt]  # it was preferred all along
    finally:
        MATMUL.allow_bf16_reduced_precision_reduction = (True, True)


def settings() -> unsplit_products._Settings:
    return unsplit_products._Settings.now()


def test_two_that_overlap_leave_nothing_behind(libraries: list[Any]) -> None:
    before = settings()
    first, second = unsplit(), unsplit()
    first.__enter__()
    second.__enter__()
    within = settings()
    first.__exit__(None, None, None)
    assert settings() == within and torch.nn.functional.linear is not before.linear
    second.__exit__(None, None, None)
    assert settings() == before


@pytest.mark.parametrize(
    ("name", "nothing", "something"),
    [("CUBLASLT_WORKSPACE_SIZE", "0", "10"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:2:16:8")],
)
def test_a_library_without_memory_is_refused(
    name: str, nothing: str, something: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert why_not_unsplit() is None
    monkeypatch.setenv(name, something)
    assert why_not_unsplit() is None
    monkeypatch.setenv(name, nothing)
    assert why_not_unsplit() == f"{name}={nothing} leaves cuBLASLt no memory: unset it"


@pytest.mark.gpu
def test_products_that_came_before_on_a_gpu() -> None:
    """A notebook has run the model before: the settings of products are in force all the same."""
    shapes, linear = ((4096, 14336), (1024, 3072), (512, 4096), (264, 4096)), torch.nn.functional
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    bias = torch.randn(4096, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def varies() -> bool:
        for weight in weights:
            x = torch.randn(512, weight.shape[1], device="cuda", dtype=torch.bfloat16)
            for also in (None, bias[: len(weight)]):
                every = linear.linear(x, weight, also)
                if any(not torch.equal(linear.linear(x[:rows], weight, also), every[:rows]) for rows in (1, 8, 64)):
                    return True
        return False

    varies()  # as a rule
    with unsplit():
        assert not varies()
    varies()
    torch.use_deterministic_algorithms(True)
    try:
        with unsplit():
            assert not varies()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_nothing_is_said_of_experiments() -> None:
    """PyTorch does so once in a process, on standard error."""
    code = "import torch; from hf_batchllm.model.unsplit_products import unsplit\n"
    code += "with unsplit(): torch.ones(8, 8, device='cuda') @ torch.ones(8, 8, device='cuda')"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == ""


@pytest.mark.gpu
def test_products_of_others_have_their_memory_afterwards() -> None:
    """Of a stream that such products were the first to use: PyTorch gets the memory of either library once."""
    weight, bias = (torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in ((512, 512), (512,)))

    def made_for(around: contextlib.AbstractContextManager[None]) -> int:
        stream, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
        with torch.cuda.stream(stream), around:
            torch.nn.functional.linear(weight, weight)
            torch.nn.functional.linear(weight, weight, bias)  # which is cuBLASLt's in any case
        with torch.cuda.stream(stream):
            torch.nn.functional.linear(weight, weight)
            torch.nn.functional.linear(weight, weight, bias)
        return torch.cuda.memory_allocated() - before

    assert made_for(unsplit()) == made_for(contextlib.nullcontext())
