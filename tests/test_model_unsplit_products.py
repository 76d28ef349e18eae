"""The settings of products whose sums are not split: put back, and never those with which a stream gets its memory."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch
from support_interrupts import Stop

from hf_batchllm.model import unsplit_products
from hf_batchllm.model.unsplit_products import UnsplitProducts, make_room_for_capture, why_not_unsplit

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
        with UnsplitProducts().applied():
            assert (os.environ[LT], os.environ[CUBLAS]) == ("0", ":0:0")
            make_room_for_capture()  # of a capture
            assert (os.environ[LT], os.environ[CUBLAS]) == ("0", ":0:0")
            with UnsplitProducts().applied():  # a criterion that generates, say
                make_room_for_capture()
            assert (os.environ[LT], os.environ[CUBLAS]) == ("0", ":0:0")
            assert not matmul.allow_bf16_reduced_precision_reduction
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert LT not in os.environ and os.environ[CUBLAS] == ":4096:8"
    assert matmul.allow_bf16_reduced_precision_reduction == reduced
    make_room_for_capture()  # of others, which need nothing of it
    assert made == [(None, ":4096:8")] * 4


def test_pytorchs_deterministic_mode_allows_no_less_memory(
    made: list[tuple[str | None, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *library: libraries.extend(library))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with UnsplitProducts().applied():
        assert (os.environ[LT], os.environ[CUBLAS]) == ("1", ":16:8")
    assert libraries == ["cublaslt"]
    assert LT not in os.environ and os.environ[CUBLAS] == ":4096:8"


def settings() -> unsplit_products._Settings:
    return unsplit_products._Settings.now()


def test_two_threads_leave_nothing_behind(made: list[tuple[str | None, str | None]]) -> None:
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


def test_nothing_is_left_after_an_interrupt(made: list[tuple[str | None, str | None]]) -> None:
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
