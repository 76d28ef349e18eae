"""What ``invariant=True`` costs: seconds for lists of prompts, without and with it, on a CPU.

python examples/benchmarks/bench_invariant.py [--model .models/gemma-3-270m] [--threads 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.models import load_model


def lists() -> dict[str, tuple[list[list[int]], int]]:
    """Prompts, and how many new tokens each gets."""
    dice = random.Random(0)

    def draw(length: int) -> list[int]:
        return [dice.randrange(4000) for _ in range(length)]

    document = draw(256)
    return {
        "32 prompts of 8 tokens, 48 new tokens each": ([draw(8) for _ in range(32)], 48),
        "24 prompts of 200 tokens, one new token each": ([draw(200) for _ in range(24)], 1),
        "32 prompts that share 256 tokens of 276, 16 new tokens each": ([document + draw(20) for _ in range(32)], 16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name; left out: a tiny Llama with random weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--times", type=int, default=3, help="calls after a first one, of which the median is shown")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model = load_model(asked.model, None if asked.model else "tiny", torch.device("cpu"), torch.float32)
    for name, (prompts, new_tokens) in lists().items():
        shown = []
        for invariant in (False, True):
            with BatchGenerator(model, invariant=invariant) as generator:
                seconds = []
                for _ in range(1 + asked.times):
                    begun = time.perf_counter()
                    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "progress": False}
                    generator.generate(prompts, do_sample=False, **options)
                    seconds.append(time.perf_counter() - begun)
            shown.append(statistics.median(seconds[1:]))
        print(f"{name}: {shown[0]:.2f} s, invariant {shown[1]:.2f} s", flush=True)


if __name__ == "__main__":
    main()
