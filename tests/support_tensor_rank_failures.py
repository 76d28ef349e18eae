"""Cases of ranks of which one fails, is interrupted, leaves, or is killed."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_tensor_ranks import DEVICE, FOLDER, FOUND, QUIET, RANK, RANKS, error_of, group_of, sharded
from transformers.generation.streamers import BaseStreamer

from hf_batchllm import BatchGenerator
from hf_batchllm.model.inspection import architecture
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.parallel import leader


def interrupted_while_waiting(name: str) -> Any:
    """By a terminal, all of them: one plans for long, and the others wait for what it will say."""

    files = [FOLDER / f"plans-{rank}" for rank in range(RANKS - 1)]

    def prompts() -> Any:
        if RANK < RANKS - 1:
            files[RANK].write_text(str(os.getpid()))
        else:
            while not all(each.exists() and each.read_text() for each in files):
                time.sleep(0.01)
            time.sleep(0.5)  # by then the others wait; if they do not yet, they are in the call all the same
            for process in (*(int(each.read_text()) for each in files), os.getpid()):
                os.kill(process, signal.SIGINT)
            time.sleep(1.0)
        yield [1, 2, 3]

    with BatchGenerator(sharded(name)) as gen:
        found = error_of(lambda: gen.generate(prompts(), max_new_tokens=4, **QUIET))
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def left_while_waiting(name: str) -> Any:
    """By the first one, which is interrupted twice: it waits for one that comes after that."""
    left = FOLDER / "left"
    with BatchGenerator(sharded(name)) as gen:
        if RANK == 0:
            for after in (0.5, 1.0):
                threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
        while RANK and not left.exists():
            time.sleep(0.01)
        found = error_of(lambda: gen.generate([[1, 2]], max_new_tokens=2, **QUIET))
        left.touch()
        return found, error_of(lambda: gen.generate([[1, 2]], max_new_tokens=2, **QUIET))


def streams(name: str) -> Any:
    """Left before anything ran, and by one while another takes its time; Ctrl-C is the user's between results."""
    model = sharded(name)

    def left(given: Any, *, slow: float, **options: Any) -> list[int]:
        read = []
        for result in gen.stream(given, max_new_tokens=5, **options):
            read.append(result.index)
            if RANK:
                break
            time.sleep(slow)
        return read

    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        errors = [error_of(lambda: left([[], [1, 2, 3]], slow=0, on_error="record"))]
        patch.setattr(group_of(gen).watch, "_grace", 0.3)
        errors.append(error_of(lambda: left([[1, 2, 3]] * 4, slow=1.0)))
        before = signal.getsignal(signal.SIGINT)
        stream = gen.stream([[1, 2, 3]] * 4, max_new_tokens=5)
        next(stream)
        handlers = [signal.getsignal(signal.SIGINT)]
        stream.close()
        handlers.append(signal.getsignal(signal.SIGINT))
        return (
            errors,
            [each is before for each in handlers],
            gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids,
        )


def interrupted(name: str) -> Any:
    """One of them is."""
    model = sharded(name)
    with BatchGenerator(model) as gen:
        if RANK == RANKS - 1:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        found = error_of(lambda: gen.generate([[1, 2]] * 8, max_new_tokens=100_000, **QUIET))
        again = gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids
    return found, again


def one_fails(name: str) -> Any:
    """By a bad prompt, in a processor of the first one, and while it streams."""

    def failing(ids: Any, scores: Any) -> Any:
        if RANK == 0 and ids.shape[1] > 5:
            raise ValueError("no more of this")
        return scores

    def left(after: int) -> None:
        for number, _ in enumerate(gen.stream([[1, 2, 3]] * 40, max_new_tokens=40)):
            if number == after:
                raise OSError("the disk is full")

    with BatchGenerator(sharded(name)) as gen:
        found = [
            error_of(lambda: gen.generate([[1, 2, 3], [] if RANK else [4]], max_new_tokens=4, **QUIET)),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=40, logits_processor=[failing], **QUIET)),
            error_of(lambda: left(3 if RANK else 1000)),
            error_of(lambda: gen.generate([[1, 2, 3], []], max_new_tokens=4, **QUIET)),  # on all of them
        ]
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def one_is_gone(name: str) -> Any:
    """For good, in the midst of its work. torchrun ends the others then, which is not waited for here."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    own, steps = ModelRunner.launch, []

    def dying(*given: Any) -> Any:
        """Between two steps: gloo itself may wait for ever where one is killed while numbers are on their way."""
        steps.append(1)
        if RANK == 1 and len(steps) > 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*given)

    model = sharded("llama" if RANKS == 2 else "deepseek_v3")
    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(ModelRunner, "launch", dying)
        if RANK == 1 and DEVICE != "cpu":
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.monotonic()
        error = error_of(lambda: gen.generate([[1, 2]] * 8, max_new_tokens=100_000, **QUIET))
        took = time.monotonic() - began
        again = error_of(lambda: gen.generate([[1, 2]], max_new_tokens=2, **QUIET))
    (FOLDER / str(RANK)).write_bytes(pickle.dumps({**FOUND, "one_is_gone": (error, took, again)}))
    os._exit(0)


def failing_fourth_step(patch: pytest.MonkeyPatch, others: Callable[[], Any]) -> None:
    """The second rank fails in the middle of its fourth step, where the others do something else."""
    own, steps = ModelRunner.launch, []

    def step(self: ModelRunner, *given: Any) -> Any:
        steps.append(1)
        if len(steps) != 4:
            return own(self, *given)
        if RANK == 1:
            raise MemoryError("no memory in the middle of a step")
        others()
        return torch.zeros(1, 101)

    patch.setattr(ModelRunner, "launch", step)


def one_fails_in_a_step(name: str) -> Any:
    """The others wait for it on a device, from which nothing comes: here an event that the watch's thread sets."""
    model, released = sharded(name), threading.Event()

    def wait() -> None:
        assert released.wait(60)

    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        ends_soon(gen, patch, released)
        failing_fourth_step(patch, wait)
        began = time.monotonic()
        first = error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=40, **QUIET))
        took = time.monotonic() - began
        patch.undo()
        return first, took, error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **QUIET))


def ends_soon(gen: Any, patch: pytest.MonkeyPatch, released: threading.Event) -> None:
    """The group of devices, which is a CPU's: nothing but the event is to be released."""
    watch = group_of(gen).watch
    patch.setattr(watch, "_release", released.set)
    patch.setattr(watch, "_grace", 0.5)


def one_fails_behind(name: str) -> Any:
    """The first one runs ahead of it: it has told of the step that follows, and waits for its device."""
    model, released, ahead, steps = sharded(name), threading.Event(), FOLDER / "ahead", []
    own = ModelRunner.launch

    def step(self: ModelRunner, *given: Any) -> Any:
        steps.append(1)
        if len(steps) < 4:
            return own(self, *given)
        if RANK == 1:
            while not ahead.exists():
                time.sleep(0.01)
            time.sleep(0.2)
            raise MemoryError("no memory in the middle of a step")
        if len(steps) == 5:
            ahead.touch()
            assert released.wait(30)
        return torch.zeros(1, 101)

    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        ends_soon(gen, patch, released)
        patch.setattr(ModelRunner, "launch", step)
        return error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=40, **QUIET))


def one_loses_a_frame(name: str) -> Any:
    """It has no memory to read it. The first one waits for it on its device."""
    model, released, frames = sharded(name), threading.Event(), []

    def wait() -> None:
        assert released.wait(30)

    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        ends_soon(gen, patch, released)
        own = group_of(gen).receive

        def receive(*given: Any) -> Any:
            frame = own(*given)
            frames.append("launch" in frame[:3])
            if RANK == 1 and frames[-1] and sum(frames) == 4:
                raise MemoryError("no memory for a frame")
            return frame

        patch.setattr(group_of(gen), "receive", receive)
        failing_fourth_step(patch, wait)
        return error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=40, **QUIET))


def call_within_a_stream(name: str) -> Any:
    """It is refused, that of another generator as well, and the stream goes on."""
    with BatchGenerator(sharded(name)) as gen, BatchGenerator(sharded(name)) as other:
        stream = gen.stream([[1, 2, 3], [4, 5]], max_new_tokens=5)
        read = [next(stream)]
        found = [
            error_of(lambda: gen.generate([[1, 2]], max_new_tokens=2, **QUIET)),
            error_of(lambda: gen.stream([[1, 2]], max_new_tokens=2)),
            error_of(lambda: other.generate([[1, 2]], max_new_tokens=2, **QUIET)),
        ]
        read += stream

        def calls(input_ids: Any, scores: Any) -> Any:
            other.generate([[1, 2]], max_new_tokens=2, **QUIET)
            return scores

        within = {"logits_processor": [calls], "max_new_tokens": 2, **QUIET}
        found.append(error_of(lambda: gen.generate([[1, 2]], **within)))
        return found, [each.token_ids for each in sorted(read, key=lambda each: each.index)]


def ended_alike(name: str) -> Any:
    """Errors of the library, streamers, prefixes that are forgotten, and results that cannot be sent."""
    read: list[str] = []

    class Reader(BaseStreamer):
        def put(self, value: Any) -> None:
            """The first rank's tokens."""

        def end(self) -> None:
            read.append("end")

    def cannot_be_sent(results: Any) -> bytes:
        raise TypeError("it cannot be sent")

    prompts: list[Any] = [[*range(40)], [*range(40), 2]]
    with BatchGenerator(sharded(name), kv_memory="64KiB", page_size=16, keep_prefixes=3) as gen:
        asked: dict[str, Any] = {"max_new_tokens": 3, **QUIET}
        errors = [error_of(lambda: gen.generate([[1] * 6000], **asked))]
        first = gen.generate(prompts, **asked).token_ids
        gen.forget_prefixes()
        again = gen.generate(prompts, **asked).token_ids
        gen.generate([[1, 2, 3]], streamer=Reader(), **asked)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leader, "packed", cannot_be_sent)
            errors.append(error_of(lambda: gen.generate([[1, 2, 3]], **asked)))
        assert first == again == gen.generate(prompts, **asked).token_ids
    return errors, read


def one_fails_before_its_device(name: str) -> Any:
    """It has launched less of a step than the others, which hear of it by themselves."""
    model = sharded(name)
    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        group = group_of(gen)

        def others() -> None:
            """Of what was to be exchanged, the device waits for the first. On a CPU the host itself would wait."""
            while RANK == 0 and not group._connections[1].poll():
                time.sleep(0.01)
            patch.setattr(group, "_exchanged", lambda: 1000)

        failing_fourth_step(patch, others)
        first = error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=40, **QUIET))
        patch.undo()
        own, looked = group.check, []

        def late() -> None:
            """That the group has ended is heard once the next call has begun, which the first one does not make."""
            looked.append(1)
            if RANK == 0 or len(looked) > 1:
                own()

        patch.setattr(group, "check", late)
        return first, error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **QUIET))


def looked_at_alike(name: str) -> Any:
    """One cannot make its generator, or a stream: the other hears of it in its first call, or at the first result.

    An error of the user's that comes again is told again.
    """
    model, error = sharded(name), ValueError("no more of this")

    def failing(ids: Any, scores: Any) -> Any:
        if RANK == 0:
            raise error
        return scores

    own = architecture._noted_pass

    def looked(*given: Any) -> Any:
        noted = own(*given)
        return 1 / 0 if RANK and given[0] is model else noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "_noted_pass", looked)
        found = [error_of(lambda: BatchGenerator(model).generate([[1, 2, 3]], max_new_tokens=4, **QUIET))]
    with BatchGenerator(model) as gen:
        found.append(error_of(lambda: [*gen.stream([[1, 2, 3], [4] * RANK], max_new_tokens=4)]))
        asked: dict[str, Any] = {"max_new_tokens": 4, "logits_processor": [failing], **QUIET}
        return found + [error_of(lambda: gen.generate([[1, 2, 3]], **asked)) for _ in range(2)]
