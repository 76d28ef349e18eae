"""A pool that was idle, broken off, or spoken to at odd moments, and processes that are forked beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_pool import Load, is_running, none_left_behind, process_ids, ready_pool
from support_quick_python import QuickPython
from support_quick_workers import quick_workers
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, GeneratorPool, PoolError, PromptError
from hf_batchllm.pool.pool_call import PoolCall

quick_workers()

PROMPTS = [[5, number, number // 7] for number in range(60)]


pytestmark = pytest.mark.xdist_group("pool_odd_moments")


@pytest.fixture(scope="module")
def pool() -> Iterator[GeneratorPool]:
    with ready_pool(Load(slow={0: 0.01, 1: 0.01}), patience=4.0) as made:
        yield made


def of_many_lengths(count: int) -> list[GenerationConfig]:
    """The first results come long before the last ones."""
    return [GenerationConfig(max_new_tokens=3 + number % 40, do_sample=False) for number in range(count)]


def is_right(pool: GeneratorPool) -> None:
    found = pool.generate(PROMPTS, max_new_tokens=3, progress=False)
    with BatchGenerator(build("llama")) as one:
        assert found == one.generate(PROMPTS, max_new_tokens=3, progress=False)
    assert len(pool) == 2


def test_a_pool_that_was_idle_for_long(pool: GeneratorPool) -> None:
    """Nobody hangs who has nothing to do."""
    time.sleep(4.5)
    is_right(pool)


def test_a_call_does_not_wait_for_who_is_late(tmp_path: Path) -> None:
    """Nor does close(): what the late one waits for never comes."""
    with GeneratorPool(Load(waits_for={0: tmp_path / "never"}), gpus=["cpu", "cpu"]) as pool:
        for count in (1, 2, 60):
            assert len(pool.generate(PROMPTS[:count], max_new_tokens=2, progress=False)) == count


def test_other_weights_are_an_error_each_time(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    with GeneratorPool(Load(other_weights=(1,), waits_for={1: go_on}), gpus=["cpu", "cpu"]) as pool:
        go_on.touch()
        for _ in range(2):
            with pytest.raises(PoolError, match="other weights"):
                pool.wait()
        with pytest.raises(PoolError, match="other weights"):
            pool.generate(PROMPTS, max_new_tokens=2, progress=False)


def test_prompts_that_do_not_fit_are_an_error_before_the_first_step() -> None:
    slow = Load(slow={0: 600.0, 1: 600.0})  # nobody would live to see a step
    refused = pytest.raises(PromptError, match="prompt 60 has 200 tokens")
    with ready_pool(slow, page_size=4, kv_memory=100_000) as pool, refused:
        pool.generate([*PROMPTS, [6] * 200], max_new_tokens=40, progress=False)


def test_an_interrupt_while_parts_are_handed_out(pool: GeneratorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    real, given = PoolCall._give, []

    def interrupted(self: PoolCall, *rest: Any) -> None:
        given.append(rest)
        if len(given) == 2:
            raise KeyboardInterrupt
        real(self, *rest)

    monkeypatch.setattr(PoolCall, "_give", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.generate(PROMPTS * 20, max_new_tokens=200, eos_token_id=None, progress=False)
    monkeypatch.undo()
    is_right(pool)


def test_all_are_free_again_after_a_stream_was_closed(pool: GeneratorPool) -> None:
    for _ in range(3):
        stream = pool.stream(PROMPTS * 10, max_new_tokens=60, eos_token_id=None)
        stream.close()  # type: ignore[attr-defined]
        stream = pool.stream(PROMPTS * 10, max_new_tokens=60, eos_token_id=None)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        pool.generate(PROMPTS[:1], max_new_tokens=1, progress=False)
    time.sleep(4.5)  # longer than patience lasts
    is_right(pool)
    assert all(worker.free for worker in pool._crew.workers)


def test_work_is_taken_over_after_a_stream_was_closed() -> None:
    """The slow one is asked for work while it still ends what it had before."""
    prompts = [[number % 97, number % 13, number % 7] for number in range(120)]
    with ready_pool(Load(slow={1: 0.3}), max_batch_tokens=16) as pool:
        stream = pool.stream(prompts, max_new_tokens=4)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        pool.generate(prompts, max_new_tokens=2, progress=False)
        assert pool.last_report is not None
        fast, slow = pool.last_report.workers
        assert fast.pieces > slow.pieces


def test_an_error_beside_an_open_stream_ends_the_pool() -> None:
    streams, pool = [], GeneratorPool(Load(), gpus=["cpu"])

    def fail() -> None:
        with pool:
            streams.append(pool.stream(PROMPTS, max_new_tokens=2))
            next(streams[0])
            raise ZeroDivisionError

    with none_left_behind() as started:
        started += process_ids(pool)
        with pytest.raises(ZeroDivisionError):
            fail()


def test_a_report_of_a_call_that_lost_a_worker() -> None:
    """What the lost one had read counts, and so does its time."""
    with ready_pool(Load(slow={0: 0.05, 1: 0.05})) as pool:
        stream = pool.stream([[number % 97] * 30 for number in range(60)], of_many_lengths(60))
        next(stream)
        os.kill(process_ids(pool)[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match="SIGKILL"):
            rest = list(stream)
        assert len(rest) == 59 and pool.last_report is not None
        lost = pool.last_report.workers[0]
        assert lost.lost and lost.busy > 0
        read = sum(worker.read_tokens for worker in pool.last_report.workers)
        assert pool.last_report.computed_tokens == pytest.approx(read, rel=0.2)


def test_a_copy_of_the_process_cannot_use_the_pool(pool: GeneratorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has none of the threads that read and write."""
    monkeypatch.setattr(pool._crew, "_owner", -1)
    with pytest.raises(PoolError, match="belongs to the process that made it"):
        pool.generate(PROMPTS, max_new_tokens=1)


@pytest.mark.some_cases
@pytest.mark.parametrize("how", ["kill", "close"])
def test_what_a_worker_has_forked_ends_with_it(how: str, tmp_path: Path) -> None:
    """And does not keep its end from being noticed."""

    def load() -> Any:
        child = os.fork()
        if not child:
            time.sleep(300)
            os._exit(0)
        (tmp_path / os.environ["HF_BATCHLLM_WORKER"]).write_text(str(child))
        return Load(slow={0: 0.02, 1: 0.02})()

    with none_left_behind() as started, GeneratorPool(load, gpus=["cpu", "cpu"]) as pool:
        pool.wait()
        started += [int((tmp_path / name).read_text()) for name in "01"]
        if how == "kill":
            stream = pool.stream(PROMPTS * 4, of_many_lengths(240))
            next(stream)
            os.kill(process_ids(pool)[0], signal.SIGKILL)
            with pytest.warns(UserWarning, match="SIGKILL"):
                assert len(list(stream)) == 239


def test_workers_end_though_a_copy_of_the_pools_process_lives_on(tmp_path: Path) -> None:
    """The workers are the pool's own children, as the users' are."""
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from support_pool import Load
from hf_batchllm import GeneratorPool
pool = GeneratorPool(Load(), gpus=["cpu"])
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
print(child, *[worker.process_id for worker in pool._crew.workers], flush=True)
time.sleep(60)
"""
    (tmp_path / "script.py").write_text(script)
    parent = QuickPython([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, *workers = map(int, parent.stdout.readline().split())
    try:
        with none_left_behind() as started:
            started += workers
            parent.kill()
            parent.wait()
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)
