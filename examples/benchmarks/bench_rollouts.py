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
import gc
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

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hf_batchllm import accelerated
from hf_batchllm.bench.models import load_model
from hf_batchllm.bench.workload import Workload
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


def numbered_words(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the numbers of the tokens."""
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0", pad_token="1", unk_token="2")


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
        processing_class=numbered_words(model.config.get_text_config().vocab_size),
        rollout_func=Rollouts() if way == "hook" else None,
        callbacks=[Watch(taken, cuda)],
    )
    trainer.remove_callback(PrinterCallback)
    _timed(trainer, taken, cuda)
    around: AbstractContextManager[Any] = accelerated(trainer.model) if way == "accelerated" else nullcontext()
    with around:
        trainer.train()
    return taken


def _timed(trainer: Any, taken: Taken, cuda: bool) -> None:
    """Take the time of each call that makes completions."""
    make: Callable[..., Any] = trainer._generate

    def timed(*given: Any, **named: Any) -> Any:
        began = _now(cuda)
        made = make(*given, **named)
        taken.rollouts.append(_now(cuda) - began)
        taken.tokens = sum(map(len, made[1]))
        return made

    trainer._generate = timed


def row_of(way: str, taken: Taken) -> str:
    step, rollout = (statistics.median(each[1:] or each) for each in (taken.steps, taken.rollouts))
    reserved = [f"{each / 2**30:.1f} GiB" for each in (taken.reserved[1:2] + taken.reserved[-1:])]
    return (
        f"{way:<13}{step:>9.2f} s{rollout:>11.2f} s{taken.tokens / rollout:>13,.0f}"
        f"{statistics.mean(taken.rewards):>10.4f}{statistics.mean(taken.losses):>+11.5f}   {', '.join(reserved)}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="a shape with random weights (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="of each way (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="of a step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="of each prompt (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="that are trained on at a time")
    parser.add_argument("--shared", type=int, default=256, metavar="N", help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=64, metavar="N", help="further tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, metavar="N", help="new tokens of each answer, at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    asked = parser.parse_args(argv)
    device = torch.device(asked.device)
    workload = Workload(4 * asked.prompts, shared=asked.shared, own=asked.own, new=asked.new, degree=4 * asked.prompts)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    print(
        f"{asked.config} in {asked.dtype} on {where}: {asked.steps} steps of {asked.prompts} prompts, {asked.samples}"
    )
    print(
        f"samples of each; {asked.shared} + {asked.own} tokens in, {asked.new} out, temperature {asked.temperature}\n"
    )
    print(f"{'rollouts by':<13}{'a step':>11}{'rollouts':>13}{'tokens/s':>13}{'reward':>10}{'loss':>11}   reserved")
    for way in asked.ways:
        model = load_model(None, asked.config, device, getattr(torch, asked.dtype))  # the same weights each time
        ids = workload.prompts(model.config.get_text_config().vocab_size)
        prompts = [" ".join(map(str, each)) for each in ids]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names that TRL uses, and transformers has new ones for
            try:
                print(row_of(way, run(way, model, prompts, asked, folder)), flush=True)
            except Exception as error:
                print(f"{way:<13}   {type(error).__name__}: {str(error)[:120]}", flush=True)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
