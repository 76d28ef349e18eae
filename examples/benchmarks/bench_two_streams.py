"""Whether the two halves of a step of prompts take less time on two streams than the whole step on one.

    python examples/benchmarks/bench_two_streams.py                      # Llama-8B, 8,192 tokens
    python examples/benchmarks/bench_two_streams.py --shape qwen3-0.6b --tokens 16384

The products of one half could hide the attention, norms, activations and ends of launches of the other. Three functions
take turns for some seconds, as in bench_prompt_step.py: the whole step; its halves one after the other; its halves on
two streams. All of them run the fused layers as the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence

import common
import numpy as np
import torch
from bench_prompt_step import Forward, kernels_here

from hf_batchllm.patches.fusion import Fusion


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {"--shape": {"default": "llama-8b", "choices": common.DENSE}}
    chosen = common.read(
        __doc__, arguments, flags, on="gpu", tokens=(8192, "of the whole step"), length=(2048, "tokens of each prompt"),
        seconds=(10, "in all"), layers=(0, "fewer than the shape has; 0: all"),
    )  # fmt: skip
    model, kernels = common.random_shape(chosen.shape, chosen.layers), kernels_here()
    fusion = Fusion(model)
    whole = Forward(model, fusion, kernels, chosen.tokens, chosen.length)
    halves = [Forward(model, fusion, kernels, chosen.tokens // 2, chosen.length) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def one_by_one() -> None:
        for half in halves:
            half.fused()

    def side_by_side() -> None:
        now = torch.cuda.current_stream()
        for half, stream in zip(halves, streams, strict=True):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                half.fused()
        for stream in streams:
            now.wait_stream(stream)

    watch = common.Watch()
    times = common.turns({"whole": whole.fused, "one by one": one_by_one, "side by side": side_by_side}, chosen.seconds)
    print(f"{torch.cuda.get_device_name()}, {chosen.shape}, {chosen.tokens:,} tokens, {watch.end()}")
    table = common.Table({"": "<14", "ms": "9.2f", "of the whole": "12.3f", "times": "6"})
    ms = {name: float(np.median(each)) for name, each in times.items()}
    for name, each in times.items():
        table.add({"": name, "ms": ms[name], "of the whole": ms[name] / ms["whole"], "times": len(each)})


if __name__ == "__main__":
    main()
