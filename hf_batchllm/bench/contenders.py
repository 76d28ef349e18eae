"""The contenders: this library, ``model.generate`` at its best batch size, and ``model.generate_batch``; their runs."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..generator import BatchGenerator
from .floor import Floor, free_memory, timed
from .workload import Tokens, Workload, words_of

Run = Callable[[Tokens, Sequence[int]], Tokens]  # prompts, and how many new tokens each gets -> new tokens


@dataclass
class Ours:
    """This library, with a new generator for each run, as a user who makes one call would pay."""

    model: Any
    fields: dict[str, Any] = field(default_factory=dict)  # of BatchConfig
    report: Any = None  # RunReport of the last run

    def __call__(self, prompts: Tokens, answers: Sequence[int]) -> Tokens:
        limits = {count: GenerationConfig(max_new_tokens=count) for count in set(answers)}
        given = limits[answers[0]] if len(limits) == 1 else [limits[count] for count in answers]
        result = BatchGenerator(self.model, **self.fields).generate(prompts, given, progress=False)
        self.report = result.report
        return result.token_ids


def padded(rows: Tokens, device: torch.device, side: str = "left") -> list[torch.Tensor]:
    """Token ids, and their mask: each [rows, the longest of them]."""
    ids = [torch.tensor(row) for row in rows]
    each = (ids, [torch.ones_like(row) for row in ids])
    return [pad_sequence(some, batch_first=True, padding_side=side).to(device) for some in each]


def by_generate(model: Any, size: int, prompts: Tokens, answers: Sequence[int]) -> Tokens:
    """``model.generate`` over batches of prompts sorted by length, each as long as its longest prompt and answer."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    tokens: Tokens = [[] for _ in prompts]
    for begin in range(0, len(order), size):
        places = order[begin : begin + size]
        ids, mask = padded([prompts[place] for place in places], model.device)
        most = max(answers[place] for place in places)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most)
        for place, row in zip(places, out[:, ids.shape[1] :].tolist(), strict=True):
            tokens[place] = row[: answers[place]]
    return tokens


def by_generate_batch(model: Any, prompts: Tokens, answers: Sequence[int]) -> Tokens:
    """``model.generate_batch`` with its prefix cache on, which is its default; or its manager, with several lengths."""
    config = GenerationConfig(max_new_tokens=max(answers), do_sample=False, eos_token_id=-1, pad_token_id=0)
    given: dict[str, Any] = {"generation_config": config}
    if model.device.type == "cpu":  # its own choice: most of the memory, and no prefix of less than 256 tokens
        names = {each.name for each in fields(ContinuousBatchingConfig)}
        page: dict[str, Any] = {"page_size" if "page_size" in names else "block_size": 64}  # up to transformers 5.22
        pages = 64 + sum(-(-(len(prompt) + max(answers)) // 64) for prompt in prompts)
        given["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=512, **page)
    if min(answers) == max(answers):
        made = model.generate_batch(prompts, **given)
    else:
        made = {}
        with model.continuous_batching_context_manager(**given, block=True, timeout=5) as running:
            pairs = zip(prompts, answers, strict=True)
            asked = [running.add_request(prompt, max_new_tokens=count) for prompt, count in pairs]
            while len(made) < len(asked) and running.is_running():
                result = running.get_result(timeout=1)
                if result is not None and result.is_finished():
                    made[result.request_id] = result
        made = {name: made[name] for name in asked if name in made}
    errors = {str(output.error) for output in made.values() if output.error}
    if errors or len(made) != len(prompts):
        raise RuntimeError("; ".join(sorted(errors)) or f"{len(prompts) - len(made)} prompts are missing")
    return [list(output.generated_tokens) for output in made.values()]


def fastest_batch_size(
    name: str, sizes: Sequence[int], most: int, speed_of: Callable[[int], float], slower: float = 1.02
) -> tuple[int, dict[int, float]]:
    """The fastest size, ``most`` at most, and the speed of each size tried, from small to large.

    The search ends once a size is slower than the best by the factor ``slower``, or fails, mostly for lack of memory.
    """
    speeds: dict[int, float] = {}
    for size in sorted({min(size, most) for size in sizes}):
        try:
            speeds[size] = speed_of(size)
        except Exception as error:
            if not speeds:
                raise
            print(f"{name}, batches of {size}: {type(error).__name__}")
            break
        print(f"{name}, batches of {size}: {speeds[size]:.2f}/s", flush=True)  # a long run may be cut off
        if speeds[size] * slower < max(speeds.values()):
            break
    return max(speeds, key=speeds.__getitem__), speeds


def best_batch_size(model: Any, workload: Workload, sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The size at which ``generate`` is fastest, from one batch of each; and the prompts/s of each size tried.

    If answers differ in length, a prompt counts by its share of the tokens, and every size is tried.
    """
    prompts, answers = workload.prompts(words_of(model)), workload.answers

    def speed_of(size: int) -> float:
        run, few = partial(by_generate, model, size, prompts[:size]), answers[:size]
        if model.device.type == "cuda":  # the first run of a size is always slow
            run([min(2, count) for count in few])
        return sum(few) / statistics.mean(answers) / timed(model.device, lambda: run(few))[0]

    slower = 1.02 if min(answers) == max(answers) else math.inf
    try:
        return fastest_batch_size("model.generate", sizes, len(prompts), speed_of, slower)
    except Exception:
        return min(sizes), {}  # it fails again in the runs, which report it


@dataclass
class Measurement:
    """The runs of a contender on a workload."""

    name: str
    workload: Workload
    runs: list[float] = field(default_factory=list)  # seconds of each run
    tokens: Tokens = field(default_factory=list)  # of the last run
    error: str = ""
    peak_bytes: int = 0  # of the device, weights included; 0 on a CPU, where PyTorch does not count
    floor: Floor | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.runs)

    @property
    def prompts_per_second(self) -> float:
        return self.workload.requests / self.seconds

    @property
    def new_tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def share_of_floor(self) -> float | None:
        return self.floor.seconds / self.seconds if self.floor else None

    def as_dict(self) -> dict[str, Any]:
        found = {"name": self.name, "requests": self.workload.requests, "workload": asdict(self.workload)}
        if self.error:
            return found | {"error": self.error}
        names = ("runs", "seconds", "prompts_per_second", "new_tokens_per_second", "share_of_floor", "peak_bytes")
        each = {name: getattr(self, name) for name in names}
        return found | each | {"floor": asdict(self.floor) if self.floor else None}

    def time(self, model: Any, run: Callable[[], Tokens]) -> None:
        """Adds a run."""
        torch.manual_seed(0)  # a contender that draws its tokens draws the same ones each time
        seconds, self.tokens = timed(model.device, run)
        self.runs.append(seconds)
        print(f"{self.name} {seconds:.2f} s", flush=True)

    def fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        print(f"{self.name} {self.error[:100]}", flush=True)


def measure(run: Run, model: Any, row: Measurement, runs: int, rival: bool = False) -> Measurement:
    """Adds several runs to ``row``, after one over a few prompts that compiles kernels. A rival may fail."""
    cuda, prompts, answers = model.device.type == "cuda", row.workload.prompts(words_of(model)), row.workload.answers
    few, new = (32, 32) if cuda and not rival else (2, 2)
    print(f"{row.name} ...", flush=True)
    free_memory(model.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    try:
        run(prompts[:few], [min(new, count) for count in answers[:few]])
        for _ in range(runs):
            row.time(model, partial(run, prompts, answers))
    except Exception as error:
        if not rival:
            raise
        row.fail(error)
    row.peak_bytes = torch.cuda.max_memory_allocated(model.device) if cuda else 0
    return row


def machine_name(device: torch.device) -> str:
    on_cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
