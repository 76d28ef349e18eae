"""Whatever happens to a pool's processes, answers are right, the loss is told of once, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build, random_prompts
from support_pool import Load, all_heard, is_running, none_left_behind, process_ids, ready_pool
from support_quick_python import QuickPython
from support_quick_workers import quick_workers
from transformers import GenerationConfig

from hf_batchllm import (
    BatchGenerator,
    BatchResult,
    CacheMemoryError,
    ConfigError,
    GenerationInterrupted,
    GeneratorBusyError,
    GeneratorPool,
    PoolError,
)
from hf_batchllm.pool.worker_handle import WorkerHandle

quick_workers()

PROMPTS = random_prompts(random.Random(4), 97, "nested", 60)
GIVEN: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "progress": False}
SLOW = {0: 0.004, 1: 0.004, 2: 0.004}


def wanted(prompts: list[list[int]] = PROMPTS, **given: Any) -> BatchResult:
    with BatchGenerator(build("llama")) as one:
        return one.generate(prompts, **GIVEN | given)


def said(heard: list[warnings.WarningMessage]) -> list[str]:
    own = [str(each.message) for each in heard if issubclass(each.category, UserWarning)]
    return [each for each in own if "process" in each]


# Answers end one after the other.
CONFIGS = [GenerationConfig(max_new_tokens=2 + place % 50, do_sample=True) for place in range(len(PROMPTS))]


def after(pool: GeneratorPool, results: int, act: Callable[[], object]) -> BatchResult:
    """A call in whose midst something happens: once so many results have come."""
    stream = pool.stream(PROMPTS, CONFIGS, seed=3)
    found = [next(stream) for _ in range(results)]
    act()
    found += stream
    return BatchResult(sorted(found, key=lambda row: row.index), pool.last_report)


@cache
def wanted_after() -> BatchResult:
    with BatchGenerator(build("llama")) as one:
        return one.generate(PROMPTS, CONFIGS, seed=3, progress=False)


@pytest.mark.some_cases
@pytest.mark.parametrize(("how", "processes"), [(signal.SIGKILL, 3), (signal.SIGSEGV, 2)])
def test_a_process_is_killed(how: signal.Signals, processes: int) -> None:
    with ready_pool(Load(slow=SLOW), processes) as pool:
        lost = process_ids(pool)[random.Random(how).randrange(processes)]
        with all_heard() as heard:
            found = after(pool, 5, lambda: os.kill(lost, how))
            assert found == wanted_after()
            assert len(said(heard)) == 1 and how.name in said(heard)[0] and "go to the other" in said(heard)[0]
            assert pool.generate(PROMPTS, **GIVEN) == wanted(), "the next call goes on without it"
            assert len(said(heard)) == 1 and len(pool) == processes - 1
        assert found.report is not None
        assert [bool(worker.lost) for worker in found.report.workers].count(True) == 1
        assert how.name in str(found.report)


@pytest.mark.filterwarnings("ignore:the process on")
def test_all_are_killed() -> None:
    with ready_pool(Load(slow=SLOW)) as pool:
        for number in process_ids(pool):
            threading.Timer(0.4, os.kill, (number, signal.SIGKILL)).start()
        with pytest.raises(PoolError, match=r"no process of the pool is left.*SIGKILL") as error:
            pool.generate(PROMPTS * 20, **GIVEN | {"seed": 1, "max_new_tokens": 2000, "eos_token_id": None})
        if pool.interrupted is not None:
            assert len(pool.interrupted) and error.value.result is pool.interrupted  # type: ignore[attr-defined]
        with pytest.raises(PoolError, match="no process"):
            pool.generate(PROMPTS, **GIVEN)


def test_a_process_hangs() -> None:
    """It is stopped, say by a debugger: nothing comes of it, and it does not end."""
    with ready_pool(Load(slow=SLOW), patience=3.0) as pool, all_heard() as heard:
        assert after(pool, 3, lambda: os.kill(process_ids(pool)[0], signal.SIGSTOP)) == wanted_after()
        assert len(said(heard)) == 1 and "has not got on for" in said(heard)[0]


def test_a_step_hangs() -> None:
    """The process is there, and its threads answer, but the model's step does not end."""
    told = pytest.warns(UserWarning, match="has not got on for")
    with ready_pool(Load(slow={1: 600.0}), patience=3.0) as pool, told:
        assert pool.generate(PROMPTS, **GIVEN) == wanted()


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_a_device_fails_or_is_full(error: Exception) -> None:
    """Where a step cannot even run in parts."""
    load = Load(fails_at_work={0: error}, slow=SLOW)
    with ready_pool(load, max_batch_tokens=64) as pool, all_heard() as heard:
        assert pool.generate(PROMPTS, **GIVEN) == wanted()
    assert len(said(heard)) == 1 and str(error) in said(heard)[0]


@pytest.mark.filterwarnings("ignore:the process on")
def test_all_devices_are_full() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    pool = GeneratorPool(Load(fails_at_work={0: full, 1: full}), gpus=["cpu", "cpu"])
    with pool, pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        pool.generate(PROMPTS, **GIVEN)


def test_one_cannot_load_the_model() -> None:
    fails = Load(fails={1: torch.OutOfMemoryError("no room")})
    with all_heard() as heard, GeneratorPool(fails, gpus=["cpu", "cpu"]) as pool:
        assert pool.generate(PROMPTS, **GIVEN) == wanted()
        pool.wait()
        assert pool.generate(PROMPTS, **GIVEN) == wanted()
        assert len(pool) == 1
    assert len(said(heard)) == 1 and "no room" in said(heard)[0]


@pytest.mark.filterwarnings("ignore:the process on")
def test_none_can_load_the_model() -> None:
    why = ValueError("there is no such folder")
    with pytest.raises(ValueError, match="no such folder"):
        GeneratorPool(Load(fails={0: why, 1: why}), gpus=["cpu", "cpu"])


def test_a_process_is_late() -> None:
    """Others run what it was to have, as far as they have time for it."""
    with GeneratorPool(Load(late={1: 1.5}, slow={0: 0.02}), gpus=["cpu", "cpu"]) as pool:
        assert pool._crew.workers[1].loaded is None
        result = pool.generate(PROMPTS * 4, **GIVEN)
        assert result == wanted(PROMPTS * 4)


def test_a_slow_process_hands_work_over() -> None:
    prompts = random_prompts(random.Random(5), 97, "distinct", 120)
    with ready_pool(Load(slow={0: 0.2}), max_batch_tokens=32) as pool:
        result = pool.generate(prompts, **GIVEN)
        assert result == wanted(prompts)
        assert result.report is not None
        slow, fast = result.report.workers
        assert fast.pieces > 2 * slow.pieces


def test_a_process_has_nothing_to_do() -> None:
    with ready_pool(Load(), 3) as pool:
        assert pool.generate(PROMPTS[:1], **GIVEN) == wanted(PROMPTS[:1])
        assert pool.generate(PROMPTS[:2], **GIVEN) == wanted(PROMPTS[:2])


def test_prompts_that_do_not_fit() -> None:
    prompts = [[5] * 10, [6] * 200, [7] * 10]
    with GeneratorPool(Load(), gpus=["cpu", "cpu"], page_size=4, kv_memory=100_000) as pool:
        result = pool.generate(prompts, max_new_tokens=2, on_error="record", progress=False)
        assert [row.error is None for row in result] == [True, False, True] and "KV cache" in str(result[1].error)
        stream = pool.stream([*prompts, []], max_new_tokens=2, on_error="record")
        found = sorted((row.index, row.error is None) for row in stream)
        assert found == [(0, True), (1, False), (2, True), (3, False)]
        with pytest.raises((ValueError, CacheMemoryError), match="prompt 1 has 200 tokens"):
            pool.generate(prompts, max_new_tokens=2, progress=False)
        scores = pool.score(prompts, [[1], [2], [3]], on_error="record", progress=False)
        assert [score.error is None for score in scores] == [True, False, True]
        assert len(pool.generate(prompts[:1], max_new_tokens=2, progress=False)) == 1


@pytest.mark.parametrize("what", ["weights", "rows", "frequencies"])
def test_models_that_differ_are_found(what: str) -> None:
    """Where the pool is made, if both have loaded by then, else where it is waited for."""
    named = "other buffers" if what == "frequencies" else "other weights"
    with (
        pytest.raises(PoolError, match=f"has loaded {named} than another"),
        GeneratorPool(Load(**{f"other_{what}": (1,)}), gpus=["cpu"] * 2) as pool,
    ):
        pool.wait()


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c() -> None:
    """It reaches this process alone: the workers go on with the next call."""
    with ready_pool(Load(slow=SLOW)) as pool:
        for seconds in (0.05, 0.6):
            gc.collect()  # an interrupt that comes while an earlier test's connection is collected is lost
            timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(GenerationInterrupted) as interrupt:
                pool.generate(PROMPTS * 30, **GIVEN | {"max_new_tokens": 300, "eos_token_id": None})
            part = interrupt.value.result
            assert all(row.token_ids for row in part)
            # On a busy machine the first comes before the call has read its prompts, and such a call leaves nothing.
            begun = "before the first sequence" not in str(interrupt.value)
            assert pool.interrupted is (part if begun else None)
            assert pool.generate(PROMPTS, **GIVEN) == wanted()
        assert all(map(is_running, process_ids(pool)))


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from support_pool import Load
from support_quick_workers import quick_workers
from hf_batchllm import GeneratorPool
quick_workers()
print("begun", flush=True)
pool = GeneratorPool(Load(slow={{0: 0.01, 1: 0.01}}), gpus=["cpu", "cpu"])
print(*[worker.process_id for worker in pool._crew.workers], flush=True)
{then}
"""
RUNS = "pool.generate([[5, number] for number in range(90)] * 200, max_new_tokens=50, progress=False)"


@pytest.mark.some_cases
@pytest.mark.parametrize("how", ["SIGKILL", "error"])
def test_no_process_is_left_where_this_one_ends(how: str, tmp_path: Path) -> None:
    then = {
        "error": "1 / 0",
        "exit in a call": f"import os, threading\nthreading.Timer(1, os._exit, (3,)).start()\n{RUNS}",
    }
    text = SCRIPT.format(tests=str(Path(__file__).parent), then=then.get(how, RUNS))
    (tmp_path / "script.py").write_text(text)
    with none_left_behind() as started:
        parent = QuickPython(
            [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n", "the script is run once, by its own process"
        started += map(int, parent.stdout.readline().split())
        assert len(started) == 2
        if how.startswith("SIG"):
            time.sleep(0.5)
            parent.send_signal(signal.Signals[how])
        assert parent.stdout.read() == ""
        parent.wait(30)


def test_a_pool_that_is_closed_or_busy() -> None:
    with none_left_behind() as started:
        pool = GeneratorPool(Load(), gpus=["cpu"])
        started += process_ids(pool)
        assert "LlamaForCausalLM, the CPU" in repr(pool)
        stream = pool.stream(PROMPTS, **GIVEN)
        next(stream)
        with pytest.raises(GeneratorBusyError, match=r"close\(\)"):
            pool.close()
        list(stream)
        pool.close()
        pool.close()
        assert "closed" in repr(pool)
        for call in (lambda: pool.generate([[1]]), lambda: pool.plan([[1]]), lambda: next(pool.stream([[1]]))):
            with pytest.raises(GeneratorBusyError, match="closed"):
                call()


def test_a_pool_that_nobody_holds_ends_by_itself() -> None:
    with none_left_behind() as started:
        pool = GeneratorPool(Load(), gpus=["cpu"])
        started += process_ids(pool)
        del pool


def test_what_a_process_prints_is_seen_once(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> Any:
        print("loading it my way")
        return Load()()

    with GeneratorPool(load, gpus=["cpu", "cpu"]) as pool:
        pool.wait()
        assert isinstance(pool._crew.workers[0], WorkerHandle)
    assert capsys.readouterr().err.count("loading it my way") == 1


def test_a_pool_cannot_be_forked_off_a_wrong_model() -> None:
    with pytest.raises(ConfigError, match="pass where it comes from"):
        GeneratorPool(build("llama"), gpus=["cpu"])  # type: ignore[arg-type]
