"""Other threads and other processes: results are the same there, and nobody waits for ever."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from support_families import build
from support_fingerprint import fingerprint
from support_process_states import CALLS, PROMPTS, made

from hf_batchllm import BatchGenerator

TOKENS = 6
_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def _generated(generator: BatchGenerator, **options: Any) -> list[list[int]]:
    return generator.generate(PROMPTS, max_new_tokens=TOKENS, progress=False, **options).token_ids


def _in_fork(work: Callable[[], Any], patience: float = 120) -> Any:
    """What ``work`` gives, or the text of its error, in a forked process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)  # GNU's OpenMP has no other threads after a fork, and would wait for them for ever
        try:
            theirs.send(work())
        except BaseException as error:
            theirs.send(repr(error))

    process = context.Process(target=run)
    process.start()
    try:
        assert ours.poll(patience), "the forked process does not answer"
        return ours.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("families", [("llama",), ("gemma2",), ("llama", "gemma3")], ids="-".join)
@pytest.mark.parametrize(("options", "calls"), [({}, 6), ({"num_beams": 2}, 1)])
def test_generators_in_several_threads_take_turns(
    families: tuple[str, ...], options: dict[str, Any], calls: int
) -> None:
    models = [build(families[number % len(families)]) for number in range(3)]  # one for all, or some with their own
    known, before = [_generated(made(model), **options) for model in models], [*map(fingerprint, models)]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        generator = made(models[number])
        found[number] = [_generated(generator, **options) for _ in range(calls)]

    workers = [Thread(target=run, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [found[number] for number in range(3)] == [[each] * calls for each in known]
    assert [*map(fingerprint, models)] == before


@_forks
def test_a_fork_after_a_generator_was_made_and_used() -> None:
    generator = made(build("llama"))
    assert _in_fork(lambda: _generated(generator)) == _generated(generator)
    assert _in_fork(lambda: _generated(generator, num_beams=2)) == _generated(generator, num_beams=2)


@_forks
def test_a_fork_while_a_stream_is_open() -> None:
    generator = made(build("llama"))
    stream = generator.stream(PROMPTS, max_new_tokens=TOKENS)
    next(stream)
    assert "let it end" in _in_fork(lambda: _generated(generator))
    there = _in_fork(lambda: [row.token_ids for row in stream])
    assert there == [row.token_ids for row in stream]


@pytest.mark.some_cases
@_forks
@pytest.mark.parametrize("seconds", [0.2, 1.5])
def test_a_fork_while_another_thread_runs_a_step(seconds: float) -> None:
    """The fork waits for a step, but not for long."""
    model = build("llama")
    known, inside, fork = _generated(made(model)), Event(), Event()

    def slow(*_: Any) -> None:
        inside.set()
        fork.wait(10)
        time.sleep(seconds)

    hook = model.model.layers[1].register_forward_hook(slow)
    worker = Thread(target=_generated, args=(made(model),))
    worker.start()
    inside.wait(10)
    hook.remove()
    generator = made(build("gemma3"))  # has a lock of its own
    both = made(model)
    fork.set()
    try:
        assert _in_fork(lambda: (_generated(both), _generated(generator))) == (known, _generated(generator))
        if seconds < 1:  # the model in the fork has its own attention
            ids = torch.tensor([PROMPTS[0]])
            expected = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).tolist()
            assert _in_fork(lambda: model.generate(ids, max_new_tokens=2, do_sample=False).tolist()) == expected
    finally:
        worker.join()


# Without the asserts of the library, as with ``python -O``; that would compile PyTorch and transformers anew, too.
_PROGRAM = """
import json
import sys
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path

ROOT = Path(sys.argv[1])
OURS = [ROOT / "hf_batchllm", ROOT / "kernels", ROOT / "patches"]

class WithoutAsserts(SourceFileLoader):
    def get_code(self, name):
        path = self.get_filename(name)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)

def finder(folder):
    if not {Path(folder), *Path(folder).parents} & set(OURS):
        raise ImportError
    return FileFinder(folder, (WithoutAsserts, [".py"]))

sys.path_hooks.insert(0, finder)
sys.path_importer_cache.clear()
from hf_batchllm import generator
from hf_batchllm.engine import call
assert type(generator.__loader__) is type(call.__loader__) is WithoutAsserts
from support_families import build
from support_process_states import CALLS
found = [CALLS[name](build("llama")) for name in ("sampled", "beams", "scores")]
print(json.dumps(found))
"""


def test_without_asserts_and_with_another_hash_seed() -> None:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}
    command = [sys.executable, "-c", _PROGRAM, str(here.parent)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    known = [CALLS[name](build("llama")) for name in ("sampled", "beams", "scores")]
    assert json.loads(out.splitlines()[-1]) == json.loads(json.dumps(known))
