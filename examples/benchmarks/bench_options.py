"""What each option of ``generate`` costs beside greedy decoding: new tokens a second, and the share of greedy's.

    python examples/benchmarks/bench_options.py --config qwen3-0.6b
    python examples/benchmarks/bench_options.py --config llama-8b --only greedy logprobs "own processor"

All prompts differ, and no token ends an answer, unless a JSON schema does: random weights write long texts. The
tokenizer is made up, and schemas need the extra `json`. Each option runs once to compile its kernels, then --runs
times: the median counts. "by" says who picked the tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import common
import torch
from transformers import GenerationConfig, LogitsProcessor

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.workload import Workload, words_of
from hf_batchllm.sampling.host_sampler import HostSampler

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 0}


class NoBreaks(LogitsProcessor):
    """A processor as a user writes one."""

    def __init__(self, tokens: list[int], device: torch.device) -> None:
        self.tokens = torch.tensor(tokens, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, self.tokens, -torch.inf)


class NoBreaksAnywhere(NoBreaks):
    """A processor that says that it takes all rows at once."""

    supports_continuous_batching = True


def options_of(vocabulary: int, requests: int, device: torch.device, ends: dict[str, Any]) -> dict[str, dict[str, Any]]:
    words = [
        [1 + (7919 * word + 31 * token) % (vocabulary - 1) for token in range(1 + word % 3)] for word in range(200)
    ]
    few = list(range(100, 400, 3))
    mixed: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_k": 40},
        {"do_sample": True, "top_p": 0.9, "top_k": 0},
        {"do_sample": True, "min_p": 0.05, "top_k": 0},
        {"do_sample": False, "repetition_penalty": 1.2},
        {"do_sample": False, "no_repeat_ngram_size": 3},
        {"do_sample": False, "suppress_tokens": few},
        {"do_sample": False, "bad_words_ids": words},
    ]
    return {
        "greedy": {},
        "sampled": SAMPLED,
        "top-k 50, top-p 0.9": SAMPLED | {"top_k": 50, "top_p": 0.9},
        "logprobs 0": {"logprobs": 0},
        "logprobs 5": {"logprobs": 5},
        "logprobs 20": {"logprobs": 20},
        "prompt_logprobs 0": {"prompt_logprobs": 0},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "suppress_tokens": {"suppress_tokens": few},
        "bad_words_ids": {"bad_words_ids": words},
        "sequence_bias": {"sequence_bias": [[word, -2.5] for word in words]},
        "no_repeat_ngram 3": {"no_repeat_ngram_size": 3},
        "encoder_no_repeat 3": {"encoder_no_repeat_ngram_size": 3},
        "encoder_penalty": {"encoder_repetition_penalty": 1.2},
        "exponential decay": {"exponential_decay_length_penalty": (10, 1.0001), "eos_token_id": 5},
        "typical_p 0.9": SAMPLED | {"typical_p": 0.9},
        "epsilon 1e-5": SAMPLED | {"epsilon_cutoff": 1e-5},
        "eta 1e-5": SAMPLED | {"eta_cutoff": 1e-5},
        "top_h 0.4": SAMPLED | {"top_h": 0.4},
        "output_scores": SAMPLED | {"output_scores": True, "return_dict_in_generate": True},
        "eight settings": {"configs": [mixed[number % len(mixed)] for number in range(requests)]},
        "own processor": {"logits_processor": [NoBreaks(few, device)]},
        "own, all rows": {"logits_processor": [NoBreaksAnywhere(few, device)]},
        "allowed tokens": {"prefix_allowed_tokens_fn": lambda batch, ids: few},
        "one JSON schema": {"schema": common.schema(None)} | ends,
        "a schema each": {"schema": [common.schema(number) for number in range(requests)]} | ends,
        "4 beams": {"num_beams": 4},
    }


@contextmanager
def host_picks() -> Iterator[list[int]]:
    """A list that grows with each step whose tokens the host picks."""
    own, steps = HostSampler.without_waiting, list[int]()

    def counted(self: HostSampler, *given: Any) -> torch.Tensor:
        steps.append(1)
        return own(self, *given)

    with mock.patch.object(HostSampler, "without_waiting", counted):
        yield steps


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {
        "--only": {"nargs": "+", "metavar": "NAME", "default": [""], "help": "options whose name begins like this"}
    }
    asked = common.read(
        __doc__, arguments, flags, model="", requests=(256, "prompts"), prompt=(128, "tokens of each"),
        new=(128, "new tokens of each"), runs=common.RUNS,
    )  # fmt: skip
    model = common.model_of(asked)
    workload = Workload(asked.requests, 0, asked.prompt, asked.new, 1)
    prompts, length = workload.prompts(words_of(model)), {"max_new_tokens": asked.new}
    tokenizer = common.made_up_tokenizer(words_of(model))
    ends = {"eos_token_id": int(tokenizer.eos_token_id), "pad_token_id": 0}
    every = options_of(words_of(model), asked.requests, model.device, ends)
    print(f"{workload}\n")
    table = common.Table({"": "<22", "seconds": "8.3f", "tokens/s": "9,.0f", "of greedy": "9.0%", "by": "<10"})
    with BatchGenerator(model, tokenizer) as generator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (name for name in every if name.startswith(tuple(asked.only))):
            given = dict(every[name])
            configs = given.pop("configs", None)
            first: dict[str, Any] = length
            if configs:
                first = {"generation_config": [GenerationConfig(**length, pad_token_id=0, **each) for each in configs]}
            # A list cannot hold scores.
            where = {"input_ids": torch.tensor(prompts, device=model.device)} if "output_scores" in given else {}
            run = partial(generator.generate, None if where else prompts, **first, **where, **given, progress=False)
            try:
                with host_picks() as picks:
                    seconds = common.median_seconds(asked.runs, run)
            except Exception as error:
                print(f"{name:<22} {type(error).__name__}: {str(error)[:90]}", flush=True)
                continue
            rate = generator.last_report.new_tokens / seconds
            who = "the host" if picks or "beams" in name else "the device"
            share = rate / table.rows[0]["tokens/s"] if table.rows else 1.0
            table.add({"": name, "seconds": seconds, "tokens/s": rate, "of greedy": share, "by": who})


if __name__ == "__main__":
    main()
