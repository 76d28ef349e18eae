"""What the tests of TRL's trainers share: tiny models, prompts, and trainers of a few steps. Skipped without TRL."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support_accelerated import word_tokenizer
from support_families import FAMILIES
from transformers import GenerationMixin, PreTrainedTokenizerFast, TrainerCallback

trl = pytest.importorskip("trl", reason="needs TRL: pip install 'hf-batchllm[trl]'")
datasets = pytest.importorskip("datasets")

BEGINNING = "w5 w6 w7 w8 w9 w10 w11 w12"
PROMPTS = [f"{BEGINNING} w{index}" for index in range(20, 28)]
STEPS, COMPLETIONS, LENGTH = 2, 2, 6

Reward = Callable[..., list[float]]


def tokenizer() -> PreTrainedTokenizerFast:
    made = word_tokenizer()
    made.model_input_names = ["input_ids", "attention_mask"]
    return made


def odd(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """A reward that differs between the samples of a prompt, so that there is always something to learn."""
    return [sum(token % 2 for token in ids) + place % COMPLETIONS / 4 for place, ids in enumerate(completion_ids)]


def arguments(kind: str, folder: Path, **options: Any) -> Any:
    given = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 7,
    }
    if kind == "OnlineDPO":
        from trl.experimental.online_dpo import OnlineDPOConfig

        return OnlineDPOConfig(**{**given, "max_new_tokens": LENGTH, "missing_eos_penalty": None, **options})
    given |= {"num_generations": COMPLETIONS, "max_completion_length": LENGTH, "beta": 0.0}  # no second model
    return getattr(trl, f"{kind}Config")(**{**given, **options})


def trainer(kind: str, folder: Path, reward: Reward = odd, model: Any = None, **options: Any) -> Any:
    """``options``: those of the trainer by name in ``OF_TRAINERS``, the rest of its config."""
    own = {name: options.pop(name) for name in _OF_TRAINERS if name in options}
    if kind == "OnlineDPO":
        from trl.experimental.online_dpo import OnlineDPOTrainer as made
    else:
        made = getattr(trl, f"{kind}Trainer")
    made = own.pop("made", made)
    prompts = own.pop("prompts", PROMPTS)
    with _quiet():
        return made(
            model=FAMILIES["llama"]() if model is None else model,
            reward_funcs=reward,
            args=arguments(kind, folder, **options),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=own.pop("processing_class", None) or tokenizer(),
            **own,
        )


_OF_TRAINERS = (
    "made",
    "prompts",
    "peft_config",
    "rollout_func",
    "tools",
    "environment_factory",
    "processing_class",
    "callbacks",
)


def train(made: Any) -> list[dict[str, float]]:
    """Trains, and gives what was logged of each step."""
    with _quiet():
        made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices of other packages; a call that is not accelerated is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="not accelerated")
        yield


@torch.no_grad()
def greedy(model: Any, text: str, own: bool) -> list[int]:
    """What the model says now. ``own``: by transformers' own ``generate``."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = tokenizer()(text, return_tensors="pt").input_ids
    options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0, "eos_token_id": 100}
    training = inner.training
    inner.eval()
    made = GenerationMixin.generate(inner, ids, **options) if own else model.generate(input_ids=ids, **options)
    inner.train(training)
    return made[0, ids.shape[1] :].tolist()


class EachStep(TrainerCallback):
    """Calls a function at the end of each step of the optimizer."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_step_end(self, *given: Any, **named: Any) -> None:
        self._function()
