"""What a step of GRPO takes, by what makes its rollouts: needs the extra `trl`.

    python examples/benchmarks/bench_rollouts.py --config qwen3-0.6b

Each way trains the same weights with the same settings of TRL's GRPOTrainer, one after the other in one process:

    generate      TRL as it is, with `model.generate`
    continuous    TRL with transformers' continuous batching, `use_transformers_continuous_batching=True`
    accelerated   TRL as it is, under `accelerated(trainer.model)`
    hook          `rollout_func=Rollouts()`, with log-probabilities

The reward is the share of words with an even number. Columns: seconds of a step and of its rollouts (medians without
the first step), new tokens a second during rollouts, the mean reward and the mean loss of all steps, and on a GPU what
PyTorch had reserved after the second step and after the last one: with --steps 50 they tell of fragmentation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL calls its hook experimental

import common
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hf_batchllm import accelerated
from hf_batchllm.bench.floor import free_memory
from hf_batchllm.bench.workload import Workload, words_of
from hf_batchllm.rollouts import Rollouts

WAYS = ("generate", "continuous", "accelerated", "hook")


@dataclass
class Taken:
    """What the steps of a way have taken."""

    steps: list[float] = field(default_factory=list)  # seconds
    rollouts: list[float] = field(default_factory=list)  # seconds
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)  # bytes


def share_of_even(completions: list[str], **columns: Any) -> list[float]:
    every = [[int(word) for word in text.split()] for text in completions]
    return [sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1) for numbers in every]


class Watch(TrainerCallback):
    def __init__(self, taken: Taken, cuda: bool) -> None:
        self._taken = taken
        self._cuda = cuda
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = _now(self._cuda)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._taken.steps.append(_now(self._cuda) - self._began)
        if self._cuda:
            self._taken.reserved.append(torch.cuda.memory_reserved())

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self._taken.losses.append(float(logs["loss"]))
            self._taken.rewards.append(float(logs["reward"]))


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def run(way: str, model: Any, prompts: list[str], asked: argparse.Namespace, folder: str) -> Taken:
    taken, cuda = Taken(), asked.device.startswith("cuda")
    config = GRPOConfig(
        output_dir=folder,
        max_steps=asked.steps,
        num_generations=asked.samples,
        per_device_train_batch_size=asked.rows,
        gradient_accumulation_steps=max(1, asked.prompts * asked.samples // asked.rows),
        max_completion_length=asked.new,
        learning_rate=1e-6,
        temperature=asked.temperature,
        gradient_checkpointing=False,
        use_cpu=not cuda,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
        use_transformers_continuous_batching=way == "continuous",
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=share_of_even,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=common.tokenizer_of_words(list(map(str, range(words_of(model))))),
        rollout_func=Rollouts() if way == "hook" else None,
        callbacks=[Watch(taken, cuda)],
    )
    trainer.remove_callback(PrinterCallback)
    make: Callable[..., Any] = trainer._generate

    def timed(*given: Any, **named: Any) -> Any:
        """Takes the time of a call that makes completions."""
        began = _now(cuda)
        made = make(*given, **named)
        taken.rollouts.append(_now(cuda) - began)
        taken.tokens = sum(map(len, made[1]))
        return made

    trainer._generate = timed
    around: AbstractContextManager[Any] = accelerated(trainer.model) if way == "accelerated" else nullcontext()
    with around:
        trainer.train()
    return taken


def figures_of(taken: Taken) -> dict[str, Any]:
    step, rollout = (statistics.median(each[1:] or each) for each in (taken.steps, taken.rollouts))
    reserved = ", ".join(f"{each / 2**30:.1f} GiB" for each in (taken.reserved[1:2] + taken.reserved[-1:]))
    found: dict[str, Any] = {"a step, s": step, "rollouts, s": rollout, "tokens/s": taken.tokens / rollout}
    means = {"reward": statistics.mean(taken.rewards), "loss": statistics.mean(taken.losses)}
    return {**found, **means, "reserved": reserved}


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--temperature": {"type": float, "default": 1.0},
        "--ways": {"nargs": "+", "default": list(WAYS), "choices": WAYS},
    }
    asked = common.read(
        __doc__, arguments, flags, model="bfloat16", steps=(5, "of each way"), prompts=(16, "of a step"),
        samples=(8, "of each prompt"), rows=(8, "that are trained on at a time"),
        shared=(256, "tokens that all begin with"), own=(64, "further tokens of each"),
        new=(256, "new tokens of each answer, at most"),
    )  # fmt: skip
    every = 4 * asked.prompts
    workload = Workload(every, asked.shared, asked.own, asked.new, every)
    print(f"{asked.steps} steps of {asked.prompts} prompts, {asked.samples} samples of each; {asked.shared} +", end=" ")
    print(f"{asked.own} tokens in, {asked.new} out, temperature {asked.temperature}\n")
    columns = {"rollouts by": "<13", "a step, s": "9.2f", "rollouts, s": "11.2f", "tokens/s": "9,.0f"}
    table = common.Table({**columns, "reward": "9.4f", "loss": "+10.5f", "reserved": "<20"})
    for way in asked.ways:
        model = common.model_of(asked)  # the same weights each time
        prompts = [" ".join(map(str, each)) for each in workload.prompts(words_of(model))]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names that TRL uses, and transformers has new ones for
            try:
                table.add({"rollouts by": way, **figures_of(run(way, model, prompts, asked, folder))})
            except Exception as error:
                print(f"{way:<13} {type(error).__name__}: {str(error)[:120]}", flush=True)
        device = model.device
        del model
        free_memory(device)


if __name__ == "__main__":
    main()
