"""The settings of products whose sums are not split: put back, and never those with which a stream gets its memory."""

from __future__ import annotations

import os

import pytest
import torch

from hf_batchllm.model.unsplit_products import make_room_on_stream, unsplit_products, why_not_unsplit

LT, CUBLAS, APART = "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, str | None]]:
    """The settings with which a stream got its memory, each time."""
    seen: list[tuple[str | None, str | None]] = []
    monkeypatch.delenv(LT, raising=False)
    monkeypatch.setenv(CUBLAS, ":4096:8")
    monkeypatch.setattr(
        torch.cuda, "current_blas_handle", lambda: seen.append((os.environ.get(LT), os.environ[CUBLAS]))
    )
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *library: None)
    return seen


def test_a_stream_gets_its_memory_as_the_owner_has_set_it(made: list[tuple[str | None, str | None]]) -> None:
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction

    def run() -> None:
        with unsplit_products():
            assert (os.environ[LT], os.environ[CUBLAS]) == ("1", ":16:8")
            make_room_on_stream()  # of a capture
            assert (os.environ[LT], os.environ[CUBLAS]) == ("1", ":16:8")
            with unsplit_products():  # a criterion that generates, say
                make_room_on_stream()
            assert (os.environ[LT], os.environ[CUBLAS]) == ("1", ":16:8")
            assert not matmul.allow_bf16_reduced_precision_reduction
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert LT not in os.environ and os.environ[CUBLAS] == ":4096:8"
    assert matmul.allow_bf16_reduced_precision_reduction == reduced
    make_room_on_stream()
    assert made == [(None, ":4096:8")] * 5


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
    with torch.cuda.stream(stream), unsplit_products():
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
    with unsplit_products():
        assert not varies()
    assert varies()
