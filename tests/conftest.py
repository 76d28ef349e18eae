"""What all tests share: no test asks the model hub for anything, and tests marked ``gpu`` need a CUDA device.

With CASES=some in the environment, as in `make test`, tests marked ``some_cases`` run a part of their cases: a quarter,
of 24 or more a sixth, one at least (``support_cases``); of ``some_cases("name")`` such a part for each value of the
parameter ``name``. Which ones depends on their names alone, so a case that is added hardly changes the others.
"""

import gc
import importlib.util
import os
import signal
import sys
import zlib
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub

import pytest
from hypothesis import settings
from support_cases import SOME, share

# A property test on a busy machine is slow now and then; pytest-timeout catches one that hangs.
settings.register_profile("default", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("default")

# `make` installs these packages. A machine with a GPU may lack them: the header then names the files left out.
_NEEDED_BY = {
    "lm_eval": ["test_lm_eval.py", "test_benchmarks_harness.py"],
}
_LEFT_OUT = {name: files for name, files in _NEEDED_BY.items() if importlib.util.find_spec(name) is None}
collect_ignore = [file for files in _LEFT_OUT.values() for file in files]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as a program has it from the start: other tests may have changed that, and a shell has whatever it starts
    in the background ignore it. Hypothesis has the collector call it, where an interrupt would be lost."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(autouse=True, scope="module")
def gpu_memory_given_back() -> Iterator[None]:
    """What PyTorch keeps of a GPU's memory is not free for the tests of other processes."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def pytest_report_header() -> list[str]:
    return [f"{name} is not installed: {', '.join(files)} left out" for name, files in _LEFT_OUT.items()]


@pytest.hookimpl(trylast=True)  # of the cases that -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SOME:
        _leave_out_cases(config, items)
    _one_for_all_that_need_a_gpu(config, items)


def _leave_out_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("some_cases")
        if mark and not item.get_closest_marker("gpu"):
            each = [str(item.callspec.params[name]) for name in mark.args]  # type: ignore[attr-defined]
            tests.setdefault((item.nodeid.partition("[")[0], *each), []).append(item)
    gone: set[pytest.Item] = set()
    for cases in tests.values():
        by_name = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
        gone.update(by_name[share(len(cases)) :])
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=list(gone))


def _one_for_all_that_need_a_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU one skipped case stands for all of a test's, of which there are thousands, and says so."""
    marked: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            marked.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        if workers > 1:  # a test that takes more than its share of the GPU fails by itself, and no others do
            torch.cuda.set_per_process_memory_fraction(1 / (workers + 1))
        return
    left_out: list[pytest.Item] = []
    for first, *others in marked.values():
        more = f": this case and {len(others):,} more of its test" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"needs a CUDA device{more}"))
        left_out += others
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """What has been imported by now stays. Nobody who collects garbage has to walk through it, which takes half a
    second each time, and there are hundreds of times."""
    gc.collect()
    gc.freeze()
