"""What each option of ``generate`` costs beside greedy decoding: new tokens a second, and the share of greedy's.

    python examples/benchmarks/bench_options.py --config qwen3-0.6b
    python examples/benchmarks/bench_options.py --config llama-8b --only greedy logprobs "own processor"

All prompts differ, and no token ends an answer, unless a JSON schema does: random weights write long texts. The
tokenizer is made up, and schemas need the extra `json`. Each option runs once to compile its kernels, then --runs
times: the median counts. "by" says who picked the tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
import torch
from bench_grammar_masks import made_up, schema
from transformers import GenerationConfig, LogitsProcessor

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.models import load_model
from hf_batchllm.bench.workload import Workload
from hf_batchllm.sampling.host_sampler import HostSampler

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 0}


class NoBreaks(LogitsProcessor):
    """As a user writes one."""

    def __init__(self, tokens: list[int], device: torch.device) -> None:
        self.tokens = torch.tensor(tokens, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, self.tokens, -torch.inf)


class NoBreaksAnywhere(NoBreaks):
    """As one that says that it takes all rows at once."""

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
        "one JSON schema": {"schema": schema(None, bounded=False)} | ends,
        "a schema each": {"schema": [schema(number, bounded=False) for number in range(requests)]} | ends,
        "4 beams": {"num_beams": 4},
    }


class Picks:
    """Counts the steps whose tokens the host picks."""

    def __init__(self) -> None:
        self.steps = 0
        self._pick = HostSampler.without_waiting

    def __enter__(self) -> Picks:
        picks = self

        def counted(self: HostSampler, *given: Any) -> torch.Tensor:
            picks.steps += 1
            return picks._pick(self, *given)

        HostSampler.without_waiting = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        HostSampler.without_waiting = self._pick  # type: ignore[method-assign]


def seconds_of(run: Callable[[], Any], runs: int) -> float:
    run()
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="a shape with random weights (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=256, metavar="N")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="new tokens of each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="options whose name begins like this")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    model = load_model(None, asked.config, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    vocabulary = model.config.get_text_config().vocab_size
    workload = Workload(asked.requests, shared=0, own=asked.prompt, new=asked.new, degree=1)
    prompts = workload.prompts(vocabulary)
    tokenizer = made_up(vocabulary)
    ends = {"eos_token_id": int(tokenizer.eos_token_id), "pad_token_id": 0}
    every = options_of(vocabulary, asked.requests, device, ends)
    chosen = [name for name in every if asked.only is None or any(name.startswith(each) for each in asked.only)]
    print(f"{asked.config} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}, {workload}\n")
    print(f"{'':<22}{'seconds':>9}{'tokens/s':>10}{'of greedy':>11}   by", flush=True)
    greedy = None
    with BatchGenerator(model, tokenizer) as generator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in chosen:
            given = dict(every[name])
            configs = given.pop("configs", None)
            length, made = {"max_new_tokens": asked.new}, [0]
            shape: dict[str, Any] = {"progress": False}
            if "output_scores" in given:  # a list cannot hold them
                shape = {"input_ids": torch.tensor(prompts, device=device)}
            first = (
                None if configs is None else [GenerationConfig(**length, pad_token_id=0, **each) for each in configs]
            )

            def run(
                first: Any = first, given: Any = given, length: Any = length, made: Any = made, shape: Any = shape
            ) -> None:
                some = None if "input_ids" in shape else prompts
                generator.generate(some, first, **shape, **given, **({} if first else length))
                made[0] = generator.last_report.new_tokens

            try:
                with Picks() as picks:
                    seconds = seconds_of(run, asked.runs)
            except Exception as error:
                print(f"{name:<22}   {type(error).__name__}: {str(error)[:90]}", flush=True)
                continue
            rate = made[0] / seconds
            greedy = rate if greedy is None else greedy
            who = "the host" if picks.steps or "beams" in name else "the device"
            print(f"{name:<22}{seconds:>9.3f}{rate:>10,.0f}{rate / greedy:>11.0%}   {who}", flush=True)


if __name__ == "__main__":
    main()
