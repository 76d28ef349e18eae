"""Runs from a file to a file with answers made up on the spot, and ways to kill them. No torch.

As a program it kills runs (``python -m support_file_runs ...``): it forks, so it must not be a process with threads.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hf_batchllm.files.output import open_output
from hf_batchllm.files.run_record import RunRecord
from hf_batchllm.files.sources import open_source, record_key

_COUNT = 18  # records of a run that is killed at every call
SETTINGS = {"max_new_tokens": 50, "model": {"name": "tiny"}}


def answer(number: int, raw: bytes, error: bool = False, seed: int | None = None) -> bytes:
    said = {"error": "bad"} if error else {"text": f"{raw.decode()} é {seed}", "finish_reason": "stop"}
    return json.dumps({"index": number, **said, "key": record_key(raw)}, ensure_ascii=False).encode()


def write_input(path: str, count: int) -> None:
    Path(path).write_text("".join(json.dumps({"prompt": f"p{n} " + "x" * (n % 37)}) + "\n" for n in range(count)))


def run(
    given: str,
    wanted: str,
    *,
    batch: int = 3,
    settings: dict[str, Any] = SETTINGS,
    seed: int | None = None,
    bad: Iterable[int] = (),
    stop_after: int | None = None,
    retry_errors: bool = False,
    limit: int | None = None,
    shuffle: int | None = 0,
    done: Callable[[int], None] = lambda number: None,
    seen: Callable[[set[int]], None] = lambda todo: None,
    **options: Any,
) -> list[str]:
    """Returns the notes. Records finish in an order of their own; ``done`` is called when a result is appended."""
    notes: list[str] = []
    with open_source(given) as source, open_output(wanted, source=source, note=notes.append, **options) as output:
        asked = RunRecord(settings, seed, input=source.summary())
        numbers = np.arange(source.count if limit is None else limit)
        record = output.begin(asked, numbers, source, retry_errors=retry_errors)
        todo = output.missing()
        seen(set(todo.tolist()))
        if len(todo):
            output.start({})
        bad, left = set(bad), len(todo) if stop_after is None else stop_after
        for window in source.windows(todo, window_bytes=20_000):
            numbers = window.tolist()
            if shuffle is not None:
                random.Random(shuffle).shuffle(numbers)
            for first in range(0, len(numbers), batch):
                chosen = numbers[first : first + min(batch, left)]
                lines = [
                    (number, answer(number, raw, number in bad, record.seed))
                    for number, raw in zip(chosen, source.records(chosen), strict=True)
                ]
                output.append(lines)
                for number in chosen:
                    done(number)
                left -= len(chosen)
                if not left:
                    break
        if stop_after is None:
            output.finish({"results": len(output)})
    return notes


def results(wanted: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(wanted).read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


class Deaths:
    """Every call that changes a file counts; before the one with the number ``at`` the process kills itself.

    ``half``: writes alone count, and a part of the last one goes out.
    """

    NAMES = ("open", "write", "fsync", "replace", "rename", "unlink")

    def __init__(self, at: int, half: bool) -> None:
        self.at, self.half, self.calls = at, half, 0
        for name in ["write"] if half else self.NAMES:
            setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                if self.half:
                    call(args[0], bytes(args[1])[: len(args[1]) * 2 // 3])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return counted


def kill_at_every_call(folder: str, wanted: str, options: dict[str, Any]) -> dict[str, Any]:
    """One run for each call that changes a file, killed there, and gone on with: what is found wrong."""
    wrong: list[str] = []
    deaths = 0
    expected = os.path.join(folder, "expected" + os.path.splitext(wanted)[1])
    write_input(expected + ".in.jsonl", _COUNT)
    run(expected + ".in.jsonl", expected, seed=7)
    whole = Path(expected).read_bytes()
    for half in (False, True):
        at = 0
        while True:
            at += 1
            place = os.path.join(folder, f"{at}-{half}")
            os.mkdir(place)
            given, output = os.path.join(place, "in.jsonl"), os.path.join(place, wanted)
            write_input(given, _COUNT)
            if options.get("before"):  # an earlier run, of which something is there
                run(given, output, seed=7, **options["before"])
            acknowledged = mmap.mmap(-1, _COUNT)
            child = os.fork()
            if child == 0:
                Deaths(at, half)
                try:
                    run(given, output, seed=7, done=acknowledged_by(acknowledged), **options["run"])
                finally:
                    os._exit(0)
            killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            deaths += killed
            wrong += [f"call {at}, half {half}: {said}" for said in go_on(given, output, whole, acknowledged, options)]
            if not killed:
                break
    return {"deaths": deaths, "wrong": wrong}


def acknowledged_by(shared: mmap.mmap) -> Callable[[int], None]:
    def done(number: int) -> None:
        shared[number] = 1

    return done


def go_on(given: str, output: str, whole: bytes, acknowledged: mmap.mmap, options: dict[str, Any]) -> list[str]:
    wrong: list[str] = []

    def seen(todo: set[int]) -> None:
        again = [number for number in todo if acknowledged[number]]
        if again:
            wrong.append(f"done, and run again: {again}")

    try:
        run(given, output, seed=7, seen=seen, **options.get("again", {}))
    except Exception as error:
        return [f"does not go on: {error!r}"]
    if Path(output).read_bytes() != whole:
        wrong.append("is not what an uninterrupted run writes")
    name = os.path.basename(output)
    left = set(os.listdir(os.path.dirname(given))) - {"in.jsonl", name, f"{name}.run.json", *options.get("allowed", ())}
    if left:
        wrong.append(f"left behind: {left}")
    return wrong


def kill_at_random(folder: str, wanted: str, rounds: int, count: int) -> dict[str, Any]:
    """Kills a run again and again, wherever it may be. One that is done too early begins anew."""
    given, output = os.path.join(folder, "in.jsonl"), os.path.join(folder, wanted)
    write_input(given, count)
    chance = random.Random(count)
    acknowledged = mmap.mmap(-1, count)
    wrong: list[str] = []
    deaths = 0
    expected = os.path.join(folder, "expected" + os.path.splitext(output)[1])
    run(given, expected, seed=7)

    def slowly(number: int) -> None:
        acknowledged[number] = 1
        if deaths < rounds:
            time.sleep(0.0005)

    def seen(todo: set[int]) -> None:
        if any(acknowledged[number] for number in todo):
            os._exit(3)

    while True:
        child = os.fork()
        if child == 0:
            try:
                run(given, output, seed=7, batch=1, done=slowly, seen=seen)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(4)
            os._exit(0)
        if deaths < rounds:
            time.sleep(chance.random() * 0.02)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGKILL:
            deaths += 1
            continue
        if code:
            wrong.append(f"exit code {code}")
        elif Path(expected).read_bytes() != Path(output).read_bytes():
            wrong.append("is not what an uninterrupted run writes")
        if wrong or deaths >= rounds:
            break
        for path in (output, f"{output}.run.json"):
            os.unlink(path)
        acknowledged[:] = bytes(count)
    return {"deaths": deaths, "wrong": wrong}


def main(what: str, *args: str) -> None:
    if what == "every":
        reports = {}
        for name, case in json.loads(args[1]).items():
            folder = os.path.join(args[0], name.replace(" ", "-"))
            os.mkdir(folder)
            reports[name] = kill_at_every_call(folder, case.get("output", "out.jsonl"), case)
        print(json.dumps(reports))
    else:
        print(json.dumps(kill_at_random(args[0], args[1], int(args[2]), int(args[3]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
