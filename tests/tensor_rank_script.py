"""What each rank runs in the tests of models that ranks have together: the cases named on the command line.

torchrun --nproc-per-node 2 tensor_rank_script.py FOLDER CASE ...

A case has a name, and what it is given after a colon: ``family:llama``.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
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
import torch.distributed as dist
import transformers
from packaging import version
from support_device_loop import run_over_twins
from support_families import build, random_prompts, reference_generate
from transformers import AutoModelForCausalLM, LogitsProcessor, MaxTimeCriteria, StoppingCriteria
from transformers.distributed.configuration_utils import DistributedConfig

from hf_batchllm import BatchGenerator, RankGenerator, accelerated, run_file
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows
from hf_batchllm.engine.device_loop.graph_launcher import GraphLauncher
from hf_batchllm.model import architecture, device_memory, tensor_ranks
from hf_batchllm.model.runner import ModelRunner

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PROMPTS = {kind: random_prompts(random.Random(4), 97, kind, 24)[:10] for kind in ("nested", "distinct")}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20, "seed": 5}
QUIET: dict[str, Any] = {"progress": False}
FOLDER = Path(sys.argv[1])
DEVICE = os.environ.get("TENSOR_RANKS_ON", "cpu")
FOUND: dict[str, Any] = {}
OLDER = version.parse(transformers.__version__) < version.parse("5.20")


@cache
def sharded(family: str) -> Any:
    """The model of a family, of which this rank has a part."""
    saved = FOLDER / family
    if RANK == 0:
        build(family).save_pretrained(saved)
    dist.barrier()
    auto: Any = AutoModelForCausalLM
    with pytest.MonkeyPatch.context() as patch:
        if len(build(family).get_output_embeddings().weight) % RANKS and OLDER:
            patch.setattr(type(build(family)), "_tp_plan", {})  # whole heads: 5.17 does not spread such a vocabulary
        return auto.from_pretrained(
            saved, distributed_config=DistributedConfig(tp_size=RANKS), dtype=torch.float32
        ).eval()


@cache
def whole_model(family: str) -> Any:
    return copy.deepcopy(build(family)).to(DEVICE)


def over_twins(case: Callable[..., Any]) -> Callable[..., Any]:
    """On the GPU's loop; on a CPU over the kernels' twins."""

    def run(*given: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if DEVICE == "cpu":
                run_over_twins(patch)
            return case(*given)

    return run


# -- the same answers ----------------------------------------------------------------------------------------------


@over_twins
def family(name: str) -> Any:
    """Greedy as ``generate``, one prompt at a time; sampled as one process; on the plain backend as well."""
    model, whole = sharded(name), whole_model(name)
    wanted = [reference_generate(whole, prompt, max_new_tokens=6) for prompt in PROMPTS["nested"]]
    with BatchGenerator(model, page_size=16) as gen, BatchGenerator(whole, page_size=16) as one:
        result = gen.generate(PROMPTS["nested"], max_new_tokens=6, **QUIET)
        assert result.token_ids == wanted
        drawn, as_one = (each.generate(PROMPTS["nested"], max_new_tokens=6, **SAMPLED, **QUIET) for each in (gen, one))
        assert drawn.token_ids == as_one.token_ids
    with BatchGenerator(model, backend="torch") as plain:
        assert plain.generate(PROMPTS["nested"], max_new_tokens=6, **QUIET).token_ids == wanted
    return str(result.report)


@over_twins
def options(name: str) -> Any:
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["nested"]
    given: dict[str, dict[str, Any]] = {
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "sampled beams": {"num_beams": 2, "do_sample": True, "seed": 3},
        "samples": {**SAMPLED, "num_return_sequences": 3},
        "seeds": {**SAMPLED, "seed": list(range(len(prompts)))},
        "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
        "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        "own processor": {"logits_processor": [Shifted(RANK)]},
        "own criterion": {"stopping_criteria": [EndsAfterEven(RANK)]},
        "own processor of beams": {"num_beams": 3, "logits_processor": [Shifted(RANK)]},
        "own criterion of beams": {"num_beams": 3, "stopping_criteria": [EndsAfterEven(RANK)]},
        "long": {"max_new_tokens": 30},
    }
    with BatchGenerator(model, page_size=16) as gen, BatchGenerator(whole, page_size=16) as one:
        for kind, some in given.items():
            asked: dict[str, Any] = {"max_new_tokens": 6, **QUIET, **some}
            ours = gen.generate(prompts, **asked)
            if kind.startswith("own processor"):  # what the first rank's say counts
                asked["logits_processor"] = [Shifted(0)]
            if kind.startswith("own criterion"):
                asked["stopping_criteria"] = [EndsAfterEven(0)]
            wanted = one.generate(prompts, **asked)
            assert ours.token_ids == wanted.token_ids, kind
            for mine, other in zip(ours, wanted, strict=True):
                for place, at in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                    assert place == pytest.approx(at, abs=1e-4), kind
        rows = torch.tensor([prompt[:5] for prompt in prompts if len(prompt) >= 5], device=DEVICE)
        ours, wanted = (each.generate(input_ids=rows, max_new_tokens=5, **QUIET) for each in (gen, one))
        assert torch.equal(ours, wanted)
        long = gen.generate(prompts, max_new_tokens=60, **QUIET)
        assert long.token_ids == one.generate(prompts, max_new_tokens=60, **QUIET).token_ids
        with BatchGenerator(model, page_size=16, cuda_graphs=False) as eager:
            assert eager.generate(prompts, max_new_tokens=30, **QUIET).token_ids == [
                each[:30] for each in long.token_ids
            ]
        streamed = {each.index: each.token_ids for each in gen.stream(prompts, max_new_tokens=6)}
        assert [streamed[index] for index in range(len(prompts))] == one.generate(
            prompts, max_new_tokens=6, **QUIET
        ).token_ids
    return str(long.report)


@over_twins
def scores(name: str) -> Any:
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["nested"]
    continuations = [[[3, 4], [5]] for _ in prompts]
    with BatchGenerator(model, page_size=16) as gen, BatchGenerator(whole, page_size=16) as one:
        ours, wanted = (each.score(prompts, continuations, **QUIET) for each in (gen, one))
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert mine.is_greedy == other.is_greedy
    return True


@over_twins
def kept_prefixes(name: str) -> Any:
    """And preemption, in a cache for a few of the sequences."""
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["nested"]
    wanted = [reference_generate(whole, prompt, max_new_tokens=12) for prompt in prompts]
    with BatchGenerator(model, page_size=16, keep_prefixes=3) as gen:
        for _ in range(2):
            result = gen.generate(prompts, max_new_tokens=12, **QUIET)
            assert result.token_ids == wanted
        assert result.report is not None and result.report.cached_tokens > 0
    with BatchGenerator(model, page_size=16) as gen:
        page = gen.generate([[1]], max_new_tokens=2, **QUIET).report.kv_memory
    # With an end that may come at any time, more is let in than fits in the end.
    long: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": 96, **QUIET}
    with BatchGenerator(model, page_size=16, kv_memory=12 * page) as gen, BatchGenerator(whole, page_size=16) as one:
        result = gen.generate(prompts, **long)
        assert result.token_ids == one.generate(prompts, **long).token_ids
        assert result.report.preemptions > 0
    return True


class Shifted(LogitsProcessor):
    """Says something else on each rank."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.roll(1 + self.by, dims=-1)


class EndsAfterEven(StoppingCriteria):
    """On the first rank, and after an odd one on the second."""

    def __init__(self, odd: int) -> None:
        self.odd = odd

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 2 == self.odd


# -- ranks that see different things -------------------------------------------------------------------------------


@over_twins
def lied_to(name: str) -> Any:
    """About free memory, the clock, whether the device is at work, and captures that fail."""
    model, whole, prompts = sharded(name), whole_model(name), PROMPTS["distinct"]
    wanted = [reference_generate(whole, prompt, max_new_tokens=14) for prompt in prompts]
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        own = device_memory.HostMemory.free
        patch.setattr(device_memory.HostMemory, "free", lambda self: own(self) // (1 + 50_000 * RANK))
        patch.setattr(device_memory.HostMemory, "taken_at_once", True)
        with BatchGenerator(model, page_size=16) as gen:
            result = gen.generate(prompts, max_new_tokens=14, **QUIET)
        assert result.token_ids == wanted
        found["memory"] = result.report.kv_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLauncher, "_is_behind", lambda _: random.Random(time.time_ns()).random() < 0.5)
        with BatchGenerator(model, page_size=16) as gen:
            assert gen.generate(prompts, max_new_tokens=14, **QUIET).token_ids == wanted
    with pytest.MonkeyPatch.context() as patch:

        def capture(rows: DecodeRows, pool: Any) -> None:
            if RANK == RANKS - 1:
                raise RuntimeError("cannot be captured")

        def captured(graphs: DecodeGraphs, rows: DecodeRows) -> None:
            try:
                graphs._on_all_ranks(rows)
            except RuntimeError as error:
                graphs._give_up(str(error))

        patch.setattr(DecodeRows, "capture", capture)
        patch.setattr(DecodeGraphs, "_capture", captured)
        with BatchGenerator(model, page_size=16) as gen, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = gen.generate(prompts, max_new_tokens=14, **QUIET)
        assert result.token_ids == wanted
        found["capture"] = [str(each.message) for each in told]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLauncher, "_is_behind", lambda _: True)
        patch.setattr(DecodeRows, "capture", lambda rows, pool: None)
        patch.setattr(DecodeGraphs, "_capture", DecodeGraphs._on_all_ranks)
        own_rows = DecodeGraphs._make

        def make(graphs: DecodeGraphs, size: int) -> DecodeRows:
            if RANK and graphs._preparing:
                raise torch.OutOfMemoryError("no room for a graph")
            return own_rows(graphs, size)

        patch.setattr(DecodeGraphs, "_make", make)
        with BatchGenerator(model, page_size=16) as gen:
            assert gen.generate(prompts, max_new_tokens=14, **QUIET).token_ids == wanted
    if DEVICE == "cpu":  # on a GPU the other's device would wait in the midst of the step, and the group would end
        found["rehearsal"] = rehearsed_in_little_memory(model)
    with pytest.MonkeyPatch.context() as patch:
        now = time.time
        patch.setattr(time, "time", lambda: now() + 1000 * RANK)  # the call begins late for all of them
        with BatchGenerator(model, page_size=16) as gen:
            result = gen.generate(prompts, max_new_tokens=4, max_time=60.0, **QUIET)
            assert [each.finish_reason for each in result] == ["length"] * len(prompts)
            began = now()
            result = gen.generate(prompts, max_new_tokens=2000, max_time=0.5, **QUIET)
            found["time"] = [each.token_ids for each in result], now() - began
    time.sleep(0.2 * RANK)
    criterion = MaxTimeCriteria(max_time=1.0)  # which is older on the first rank
    with BatchGenerator(model, page_size=16) as gen:
        result = gen.generate(prompts, max_new_tokens=2000, stopping_criteria=[criterion], **QUIET)
        found["since"] = [each.token_ids for each in result]
    return found


def rehearsed_in_little_memory(model: Any) -> Any:
    """One of them runs out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory.HostMemory, "free", lambda self: 60_000_000)
        patch.setattr(device_memory.HostMemory, "taken_at_once", True)
        own_step, steps = ModelRunner.step, []

        def step(runner: ModelRunner, *given: Any) -> Any:
            logits = own_step(runner, *given)
            steps.append(1)
            if RANK and len(steps) == 1:
                raise torch.OutOfMemoryError("no memory for the step that is tried")
            return logits

        patch.setattr(ModelRunner, "step", step)
        with BatchGenerator(model, page_size=16) as gen, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tight = gen.generate([[1, 2, each % 90] for each in range(6000)], max_new_tokens=2, **QUIET)
        return tight.report.kv_memory, [str(each.message) for each in told]


def disagreeing(name: str) -> Any:
    """Other prompts, options or seeds on one of the ranks."""
    with BatchGenerator(sharded(name)) as gen:
        found = [
            error_of(lambda: gen.generate([[1, 2, 3 + RANK]], max_new_tokens=4, **QUIET)),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4 + RANK, **QUIET)),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, do_sample=True, seed=RANK, **QUIET)),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, repetition_penalty=1.0 + RANK, **QUIET)),
            error_of(
                lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **[{}, {"prompt_logprobs": 1}][RANK], **QUIET)
            ),
            error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **[{}, {"max_time": 9.0}][RANK], **QUIET)),
        ]
        drawn = gen.generate([[1, 2, 3]] * 4, max_new_tokens=6, do_sample=True, **QUIET).token_ids
    with BatchGenerator(sharded(name), max_batch_tokens=16 + RANK) as gen:
        found.append(error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **QUIET)))
    return found, drawn


def different_ways(name: str) -> Any:
    """What ranks exchange at the same time is not the same thing."""
    sampled: dict[str, Any] = {"do_sample": True} if RANK else {}
    with BatchGenerator(sharded(name)) as gen:
        found = error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **sampled, **QUIET))
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def interrupted_while_waiting(name: str) -> Any:
    """By a terminal, all of them: one plans for long, and the others wait for what it will say."""

    def prompts() -> Any:
        if RANK == RANKS - 1:
            time.sleep(1.0)
        yield [1, 2, 3]

    with BatchGenerator(sharded(name)) as gen:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        found = error_of(lambda: gen.generate(prompts(), max_new_tokens=4, **QUIET))
        return found, gen.generate([[1, 2]], max_new_tokens=2, **QUIET).token_ids


def streams(name: str) -> Any:
    """Left before anything ran, and by one while another takes its time; Ctrl-C is the owner's between results."""
    model = sharded(name)

    def left(given: Any, *, slow: float, **options: Any) -> list[int]:
        read = []
        for result in gen.stream(given, max_new_tokens=5, **options):
            read.append(result.index)
            if RANK:
                break
            time.sleep(slow)
        return read

    with BatchGenerator(model) as gen, BatchGenerator(model) as other, pytest.MonkeyPatch.context() as patch:
        errors = [error_of(lambda: left([[], [1, 2, 3]], slow=0, on_error="record"))]
        patch.setattr(gen.architecture.ranks._watch, "_grace", 0.3)
        errors.append(error_of(lambda: left([[1, 2, 3]] * 4, slow=1.0)))
        before = signal.getsignal(signal.SIGINT)
        first, second = (each.stream([[1, 2, 3]] * 4, max_new_tokens=5) for each in (gen, other))
        next(first), next(second)
        handlers = [signal.getsignal(signal.SIGINT)]
        first.close()
        second.close()
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
    """By a bad prompt, in a processor, in a bar's place between steps, and while it streams."""

    def failing(ids: Any, scores: Any) -> Any:
        if RANK == 1 and ids.shape[1] > 5:
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

    def dying(ids: Any, scores: Any) -> Any:
        """Between two steps: gloo itself may wait for ever where one is killed while numbers are on their way."""
        if RANK == 1 and ids.shape[1] > 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores

    given = {"logits_processor": [dying]} if DEVICE == "cpu" else {}
    with BatchGenerator(sharded(name or "llama")) as gen:
        if RANK == 1 and DEVICE != "cpu":
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.monotonic()
        error = error_of(lambda: gen.generate([[1, 2]] * 8, max_new_tokens=100_000, **given, **QUIET))
        took = time.monotonic() - began
    (FOLDER / str(RANK)).write_bytes(pickle.dumps({**FOUND, "one_is_gone": (error, took)}))
    os._exit(0)


def comes_late(name: str) -> Any:
    """To a call that the first rank waits for."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(tensor_ranks, "_PATIENCE", 0.3)
        with BatchGenerator(sharded(name)) as gen:
            for _ in range(2):
                time.sleep(0.9 * RANK)
                gen.generate([[1, 2, 3]], max_new_tokens=2, **QUIET)
    return [str(each.message) for each in told]


def elsewhere(name: str) -> Any:
    """Ways in that would give each rank a part of the work, or have each of them write."""
    model = sharded(name)
    with BatchGenerator(model) as gen:
        return [
            error_of(lambda: RankGenerator(model)),
            error_of(lambda: run_file(gen, FOLDER / "in.jsonl", FOLDER / "out.jsonl", max_new_tokens=3)),
        ]


def accelerates(name: str) -> Any:
    """``model.generate`` of a sharded model, its own and accelerated."""
    model, rows = sharded(name), torch.tensor([prompt[:5] for prompt in PROMPTS["nested"]], device=DEVICE)
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = model.generate(rows, **asked)
    with accelerated(model):
        ours = model.generate(rows, **asked)
    assert own.tolist() == ours.tolist()
    return model.last_report is None or model.last_report.steps


def one_fails_in_a_step(name: str) -> Any:
    """The others wait for it on a device, from which nothing comes: here an event that the watch's thread sets."""
    model, released = sharded(name), threading.Event()
    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        watch = gen.architecture.ranks._watch
        assert watch is not None
        patch.setattr(watch, "_release", released.set)
        patch.setattr(watch, "_grace", 0.5)
        own, steps = ModelRunner.step, []

        def step(self: ModelRunner, *given: Any) -> Any:
            steps.append(1)
            if len(steps) == 4 and RANK == 1:
                raise MemoryError("no memory in the middle of a step")
            if len(steps) == 4:
                assert released.wait(60)
                return torch.zeros(1, 101)
            return own(self, *given)

        patch.setattr(ModelRunner, "step", step)
        began = time.monotonic()
        first = error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=40, **QUIET))
        took = time.monotonic() - began
        patch.undo()
        return first, took, error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **QUIET))


def one_fails_before_its_device(name: str) -> Any:
    """It has launched less of a step than the others, which hear of it by themselves."""
    model = sharded(name)
    with BatchGenerator(model) as gen, pytest.MonkeyPatch.context() as patch:
        ranks = gen.architecture.ranks
        own, steps = ModelRunner.step, []

        def step(self: ModelRunner, *given: Any) -> Any:
            steps.append(1)
            if len(steps) == 4 and RANK == 1:
                raise MemoryError("no memory in the middle of a step")
            if len(steps) == 4:
                patch.setattr(ranks, "_exchanged", lambda: 1000)  # of them, the device waits for the first
                return torch.zeros(1, 101)
            return own(self, *given)

        patch.setattr(ModelRunner, "step", step)
        first = error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=40, **QUIET))
        patch.undo()
        return first, error_of(lambda: gen.generate([[1, 2, 3]], max_new_tokens=4, **QUIET))


def refused(name: str) -> Any:
    return error_of(lambda: BatchGenerator(sharded(name)))


def with_adapters(name: str) -> Any:
    """Put beside its spread weights."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(copy.copy(sharded(name)), LoraConfig(r=2, target_modules=["q_proj"]))
    return error_of(lambda: BatchGenerator(adapted))


def looked_at_alike(name: str) -> Any:
    """A generator is made by all ranks, or by none; an error of the owner's that comes again is told again."""
    model, error = sharded(name), ValueError("no more of this")

    def failing(ids: Any, scores: Any) -> Any:
        if RANK:
            raise error
        return scores

    own = architecture._noted_pass

    def looked(*given: Any) -> Any:
        noted = own(*given)
        return 1 / 0 if RANK and given[0] is model else noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "_noted_pass", looked)
        found = [error_of(lambda: BatchGenerator(model))]
    with BatchGenerator(model) as gen:
        asked: dict[str, Any] = {"max_new_tokens": 4, "logits_processor": [failing], **QUIET}
        return found + [error_of(lambda: gen.generate([[1, 2, 3]], **asked)) for _ in range(2)]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background process ignores
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl")
    found = FOUND
    for case in cases:
        name, _, given = case.partition(":")
        try:
            found[case] = globals()[name](given)
        except BaseException as error:
            found[case] = f"FAILED {type(error).__name__}: {error}"
            if isinstance(error, AssertionError):
                import traceback

                found[case] += "".join(traceback.format_exception(error)[-2:])
        (FOLDER / str(RANK)).write_bytes(pickle.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2:])
