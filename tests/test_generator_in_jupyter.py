"""In a real Jupyter kernel: a cell is interrupted, a cell fails, IPython keeps what it can get, and life goes on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parents[1]
SECONDS = 120  # to wait for a message

pytestmark = pytest.mark.xdist_group("kernel")  # one kernel: most of the time goes into its imports

SETUP = """
import sys, time, traceback
from support_families import build
from support_live_tensors import Storages
from support_untouched import fingerprint, prompts
storages = Storages()
storages.watch()
model, given, options = build("gemma2"), prompts(count=14), {"max_new_tokens": 8}
steps = []

def new_generator(**fields):
    return BatchGenerator(model, max_batch_tokens=24, page_size=8, min_shared_tokens=4, **fields)

def wait_here():
    print("WAITING", flush=True)
    time.sleep(30)

def pausing(step):
    def hook(*args):
        steps.append(len(steps))
        if len(steps) == step:
            wait_here()
    steps.clear()
    model.model.layers[1].register_forward_pre_hook(hook)

def unhook():
    model.model.layers[1]._forward_pre_hooks.clear()

def tokens(rows):
    return {row.index: row.token_ids for row in rows}

def assert_as_before(gen):
    unhook()
    assert fingerprint(model) == before
    assert storages.seen and storages.alive() == 0
    if not gen._closed:
        assert tokens(gen.generate(given, **options)) == expected

with new_generator() as gen:
    expected = tokens(gen.generate(given, **options))
before = fingerprint(model)
"""


@dataclass
class Cell:
    """What became of it."""

    out: str = ""
    err: str = ""
    error: str = ""  # its name
    traceback: str = ""  # as it is shown, without colours
    shown: list[dict[str, Any]] = field(default_factory=list)  # by kinds


class Kernel:
    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])  # this checkout, whatever is installed
        self.manager, self.client = start_new_kernel(
            kernel_name="python3", env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        )

    def run(self, code: str) -> Cell:
        """Whatever prints WAITING is interrupted there."""
        cell, sent = Cell(), self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            content = message["content"]
            if message["parent_header"].get("msg_id") != sent:
                continue
            match message["msg_type"]:
                case "stream" if content["name"] == "stdout":
                    cell.out += content["text"]
                    if "WAITING" in content["text"]:
                        self.manager.interrupt_kernel()
                case "stream":
                    cell.err += content["text"]
                case "display_data" | "execute_result":
                    cell.shown.append(content["data"])
                case "error":
                    cell.error = content["ename"]
                    cell.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
                case "status" if content["execution_state"] == "idle":
                    return cell

    def check(self, code: str) -> Cell:
        """A cell that has to run through."""
        cell = self.run(code)
        assert not cell.error, cell.traceback
        return cell

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(autouse=True)
def a_generator(kernel: Kernel) -> Iterator[None]:
    """``gen``, with which all is as before in the end."""
    kernel.check("gen = new_generator()")
    yield
    kernel.check("assert_as_before(gen); gen.close()")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        imported = kernel.check("from hf_batchllm import BatchGenerator, GenerationInterrupted")
        assert imported == Cell(), "the first cell of many notebooks says something"
        kernel.check(SETUP)
        yield kernel
    finally:
        kernel.end()


@pytest.mark.some_cases
@pytest.mark.parametrize("step", [1, 12])
def test_what_had_finished_is_had_in_the_next_cell(kernel: Kernel, step: int) -> None:
    kernel.check(f"pausing({step})")
    cell = kernel.run("out = gen.generate(given, **options)")
    assert cell.error == "GenerationInterrupted" and "UserWarning: there are hooks on" in cell.err
    shown = cell.traceback.splitlines()
    if step == 1:
        assert shown == ["GenerationInterrupted: interrupted: none of 14 sequences had finished"]
    else:
        assert len(shown) == 2
        assert re.fullmatch(r"GenerationInterrupted: interrupted: \d+ of 14 sequences had finished", shown[0])
        assert "in `gen.interrupted`" in shown[1] and "`sys.last_value.result`" in shown[1]
    kernel.check(f"""
first = sys.last_value.result
assert gen.interrupted is first and first.report.finished == len(first) and (len(first) > 0) == ({step} > 1)
assert tokens(first).items() <= expected.items()
""")
    assert kernel.run("out").error == "NameError"  # which takes the place of the exception
    assert kernel.run("gen.generate(given, max_new_token=8)").error == "UnsupportedOptionError"
    kernel.check("""
assert gen.interrupted is first and not hasattr(sys.last_value, "result")
assert_as_before(gen)
assert gen.interrupted is None
""")


def test_while_it_plans(kernel: Kernel) -> None:
    cell = kernel.run("gen.generate((wait_here() or prompt for prompt in given), **options)")
    assert cell.traceback == "GenerationInterrupted: interrupted before the first sequence began"


@pytest.mark.parametrize("where", ["in a step", "between results"])
def test_a_stream(kernel: Kernel, where: str) -> None:
    in_a_step = where == "in a step"
    kernel.check(f"pausing({12 if in_a_step else 0}); had = []")
    cell = kernel.run(f"""
for generation in gen.stream(given, **options):
    had.append(generation)
    if not {in_a_step} and len(had) == 3:
        wait_here()
""")
    assert cell.error == "KeyboardInterrupt"
    assert "in gen.stream(given" in cell.traceback or "wait_here()" in cell.traceback
    assert "hook" not in cell.traceback and "modeling_gemma2" not in cell.traceback
    kernel.check("assert had and tokens(had).items() <= expected.items()")


def test_a_stream_that_has_a_name_stays_open_until_it_is_closed(kernel: Kernel) -> None:
    kernel.check("stream = gen.stream(given, **options)")
    assert kernel.run("for generation in stream: wait_here()").error == "KeyboardInterrupt"
    cell = kernel.run("gen.close()")
    assert cell.error == "GeneratorBusyError" and "a stream also by its close()" in cell.traceback
    kernel.check("stream.close()")


@pytest.mark.some_cases
@pytest.mark.parametrize("ended", ["interrupted", "failed"])
def test_close_gives_everything_back_whatever_ipython_keeps(kernel: Kernel, ended: str) -> None:
    kernel.check("""
gen, had = new_generator(keep_prefixes=4), len(storages.seen)
gen.generate(given, **options)
storages.note_kept(gen._resources.kv.storage)
assert storages.alive()
""")
    kernel.check("gen.generate(given, **options)")  # now there are _, Out[...] and so on
    if ended == "interrupted":
        kernel.check("pausing(6)")
    else:
        kernel.check("""
def fails(module, args):
    seen_by_the_hook = args[0]
    if len(storages.seen) > had + 100:
        raise ZeroDivisionError("of the hook")
model.model.layers[1].register_forward_pre_hook(fails)
""")
    cell = kernel.run("gen.generate(given, **options)")
    assert cell.error == ("GenerationInterrupted" if ended == "interrupted" else "ZeroDivisionError")
    kernel.check("""
gen.close()
assert sys.last_traceback is not None and _ is not None
assert_as_before(gen)
""")
    if ended == "failed":  # what is the user's can be looked at
        kernel.check("""
frames = {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(sys.last_traceback)}
assert frames["fails"].f_locals["seen_by_the_hook"].isfinite().all()
del frames
""")


def test_the_bar_is_one_line_and_not_in_red(kernel: Kernel) -> None:
    cell = kernel.check("out = gen.generate(given, progress=True, **options)")
    assert not cell.err
    widgets = [data for data in cell.shown if "application/vnd.jupyter.widget-view+json" in data]
    if widgets:
        assert len(widgets) == 1 and not cell.out
    else:
        assert cell.out.count("\n") == 1 and "14 / 14 done" in cell.out.split("\r")[-1]


def test_in_a_loop_that_runs(kernel: Kernel) -> None:
    """A kernel runs cells in an event loop, and lets them wait in it."""
    kernel.check("""
import asyncio
async def later():
    await asyncio.sleep(0)
    return gen.generate(given, **options)
assert asyncio.get_running_loop().is_running()
assert tokens(await later()) == expected
assert tokens(await asyncio.to_thread(gen.generate, given, **options)) == expected
""")


def test_results_show_themselves(kernel: Kernel) -> None:
    kernel.check("out = gen.generate(given, **options)")
    for code in ("gen.plan(given)", "out.report", "out.to_pandas()"):
        (shown,) = kernel.check(code).shown
        assert "text/plain" in shown and "text/html" in shown, code
    (shown,) = kernel.check("out").shown
    assert "BatchResult of 14 generations" in shown["text/plain"]
