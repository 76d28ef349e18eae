"""How long the host takes for each prompt and each step of a call, where the device takes no time.

    python examples/benchmarks/bench_host_time.py                              20,000 prompts of one prefix, as ids
    python examples/benchmarks/bench_host_time.py --prompts 100000 --texts     texts, through a tokenizer
    python examples/benchmarks/bench_host_time.py --cpu                        steps as a CPU runs them
    python examples/benchmarks/bench_host_time.py --profile 40                 and the 40 dearest functions

The whole call runs: checks, plan, line-up, schedule, batches, work lists, tokens, results. The model's forward and
the sampler are replaced by functions that give the same for all rows, and the kernels by functions that do nothing.
Steps are as large as a GPU's, and are launched ahead as there. No GPU is needed. The table has the host's time by
phase: in all, for each prompt and for each step, of the median of --repeats runs. It is the time of the thread, so
others on the same machine disturb it little. "garbage" is Python's garbage collector, wherever it ran.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import common
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.workload import shape
from hf_batchllm.engine import step_size
from hf_batchllm.engine.call import Call
from hf_batchllm.engine.checks import JobChecks
from hf_batchllm.engine.collector import TokenCollector
from hf_batchllm.engine.extra_outputs import ExtraOutputs
from hf_batchllm.engine.loop import Engine
from hf_batchllm.inputs.tokenizer import TokenizerLoader
from hf_batchllm.model import model_in_use
from hf_batchllm.model.attention.torch_attention import CascadeAttention
from hf_batchllm.model.attention.triton_attention import AttentionKernels, KernelAttention, TritonBackend
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.call_plan import CallPlan
from hf_batchllm.planning.scheduler import GroupScheduler
from hf_batchllm.sampling.seated_sampler import SeatedSampler

_VOCABULARY = 1024  # most ids are objects of their own, as those of a real vocabulary: Python keeps 0 to 256 ready
_TOKEN = 700  # that all rows are given
_TOKEN_BYTES = 4096  # of K and V of a layer
_HEADS, _KV_HEADS = 16, 8  # as Qwen3-0.6B has them; work lists are cut by them


def _nothing(*_: Any, **__: Any) -> None:
    pass


_NO_KERNELS = AttentionKernels(
    write=_nothing,
    attend_items=_nothing,
    merge_parts=_nothing,
    attend_chunks=_nothing,
    by_page=lambda pages: pages,
    launch_options=lambda *shape: {"tile": 64},
    unsupported=lambda *shape: None,
)


class Phases:
    """Seconds by phase. Of phases inside each other, the inner one counts its time alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0
        self._open: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.thread_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def garbage(self, phase: str, _: Any) -> None:
        """To be told of Python's collections."""
        self._switch()
        if phase == "start":
            self._open.append("garbage")
        else:
            self._open.pop()

    def around(self, owner: type, method: str, phase: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **named: Any) -> Any:
            self._switch()
            self._open.append(phase)
            self.steps += phase == "batches"
            try:
                return inner(*args, **named)
            finally:
                self._switch()
                self._open.pop()

        setattr(owner, method, timed)


def _forward(
    runner: ModelRunner,
    ids: torch.Tensor,
    positions: torch.Tensor,
    context: Any,
    rows: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """In place of the model: work lists are made, as its first layer has them made, and logits are nothing."""
    context.calls = runner.architecture.layers
    _make_lists(context)
    return torch.zeros(1, 1).expand(len(ids if rows is None else rows), _VOCABULARY)


def _pick(_: SeatedSampler, logits: torch.Tensor, seats: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return torch.full((len(seats),), _TOKEN)


def _make_lists(context: KernelAttention | CascadeAttention) -> None:
    if isinstance(context, CascadeAttention):
        context.plan.parts(None, _TOKEN_BYTES)
        return
    if context.work.rows:
        context.work.lists(None, _HEADS, _KV_HEADS, False)
    if context.work.has_chunks:
        context.work.chunk_lists(None, _HEADS // _KV_HEADS, 64, None, _KV_HEADS)


def take_the_device_out(phases: Phases | None, cpu: bool) -> None:
    """From here on calls run without a model's or a kernel's time, and, unless for a ``cpu``, as on a GPU otherwise."""
    if not cpu:
        patched: Any = model_in_use
        patched.make_backend = lambda config, device, storage, notices: TritonBackend(
            _NO_KERNELS, storage, device, notices
        )
        step_size._GATHER_ROWS.clear()
    runner: Any = ModelRunner
    runner.forward = _forward
    sampler: Any = SeatedSampler
    sampler.__call__ = _pick
    if phases is None:
        return
    gc.callbacks.append(phases.garbage)
    phases.around(BatchGenerator, "generate", "the rest")
    phases.around(JobChecks, "job", "checks")
    phases.around(CallPlan, "__init__", "plan")
    phases.around(Call, "_open", "memory")
    phases.around(Call, "_line_up", "line-up")
    phases.around(Call, "_wire", "wiring")
    for method in ("start", "next", "repeat", "must_know"):
        phases.around(GroupScheduler, method, "scheduling")
    phases.around(BatchBuilder, "build", "batches")
    phases.around(Engine, "_launch", "launching")
    phases.around(ModelRunner, "_step", "launching")
    globals()["_make_lists"] = _timed(phases, _make_lists, "work lists")
    phases.around(TokenCollector, "collect", "collecting")
    phases.around(GroupScheduler, "finish", "finishing")
    phases.around(TokenizerLoader, "decode", "decoding")
    phases.around(ExtraOutputs, "generation", "results")


def _timed(phases: Phases, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    holder = type("Holder", (), {"call": staticmethod(function)})
    phases.around(holder, "call", phase)
    timed: Any = holder.__dict__["call"]
    return lambda *args: timed(*args)  # type: ignore[no-any-return]


def model() -> Any:
    sizes = shape("llama", _VOCABULARY, _HEADS, 16, 1, _HEADS, _KV_HEADS, 1 << 15, head_dim=16)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, eos_token_id=2, pad_token_id=0)).eval()


def tokenizer() -> Any:
    """Words as tokens, by the code that fast tokenizers have."""
    return common.tokenizer_of_words(["<pad>", "<unk>", "</s>", *(f"w{number}" for number in range(3, _VOCABULARY))])


def prompts_of(options: argparse.Namespace) -> list[Any]:
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, _VOCABULARY, options.prefix).tolist()
    own = rng.integers(3, _VOCABULARY, (options.prompts, options.own)).tolist()
    prompts = [prefix + ids for ids in own]
    return [" ".join(f"w{token}" for token in ids) for ids in prompts] if options.texts else prompts


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--texts": {"action": "store_true", "help": "prompts are texts, and results have texts"},
        "--cpu": {"action": "store_true", "help": "steps and attention as on a CPU, instead of a GPU"},
        "--kv-memory": {"default": "4GB", "help": "of the cache"},
    }
    options = common.read(
        __doc__, arguments, flags, on="host", prompts=(20_000, "prompts"), prefix=(500, "tokens that all begin with"),
        own=(30, "further tokens of each"), new=(8, "new tokens of each"), repeats=(3, "runs"),
        step_tokens=(0, "the most tokens of a step; 0: 16,384, or 512 with --cpu"),
        profile=(0, "print so many functions of a profile, and no table"),
    )  # fmt: skip
    torch.set_num_threads(1)
    phases = None if options.profile else Phases()
    take_the_device_out(phases, options.cpu)
    prompts = prompts_of(options)
    generator = BatchGenerator(
        model(),
        tokenizer() if options.texts else None,
        max_batch_tokens=options.step_tokens or (512 if options.cpu else 16_384),
        kv_memory=options.kv_memory,
        steps_per_sync=None if options.cpu else 2,
        page_size=64,
    )
    chosen = {"max_new_tokens": options.new, "do_sample": False, "progress": False}
    generator.generate(prompts[:100], **chosen)
    if phases is None:
        profile = cProfile.Profile()
        profile.runcall(generator.generate, prompts, **chosen)
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
        return
    runs = []
    for _ in range(options.repeats):
        phases.steps = 0
        gc.collect()
        phases.seconds.clear()
        result = generator.generate(prompts, **chosen)
        assert len(result) == len(prompts)
        runs.append((sum(phases.seconds.values()), dict(phases.seconds), phases.steps))
        del result
    seconds, by_phase, steps = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    print(f"{len(prompts):,} prompts of {options.prefix} + {options.own} tokens, {options.new} new, in {steps:,} steps")
    table = common.Table({"phase": "12", "ms": "9.1f", "us a prompt": "11.2f", "us a step": "9.1f"})
    for name, taken in [*by_phase.items(), ("in all", seconds)]:
        each = {"us a prompt": taken / len(prompts) * 1e6, "us a step": taken / steps * 1e6}
        table.add({"phase": name, "ms": taken * 1e3, **each})


if __name__ == "__main__":
    main()
