"""Whether the two halves of a step of prompts take less time on two streams than the whole step on one.

    python examples/benchmarks/bench_two_streams.py                      # Llama-8B, 8,192 tokens
    python examples/benchmarks/bench_two_streams.py --shape qwen3-0.6b --tokens 16384

The products of one half could hide the attention, norms, activations and ends of launches of the other. Three functions
take turns for some seconds, as in bench_prompt_step.py: the whole step; its halves one after the other; its halves on
two streams. All of them run the fused layers as the engine does.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from bench_prompt_step import DENSE, DEVICE, PAGE, Forward, Watch, build, turns
from bench_support.gpu_timing import need_gpu

from hf_batchllm import BatchConfig
from hf_batchllm.model.choose_backend import fused_kernels
from hf_batchllm.patches.fusion import Fusion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=DENSE)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=2048, help="of each prompt")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    chosen = parser.parse_args()
    need_gpu()
    model = build(chosen.shape, chosen.layers)
    fusion = Fusion(model)
    kernels = fused_kernels(BatchConfig(page_size=PAGE), DEVICE)
    assert kernels is not None
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

    watch = Watch()
    watch.start()
    times = turns({"whole": whole.fused, "one by one": one_by_one, "side by side": side_by_side}, chosen.seconds)
    state = watch.end()
    print(f"{torch.cuda.get_device_name()}, {chosen.shape}, {chosen.tokens:,} tokens, {state}")
    for name, each in times.items():
        median = float(np.median(each))
        print(f"{name:>14} {median:9.2f} ms  {median / float(np.median(times['whole'])):6.3f}  ({len(each)} times)")


if __name__ == "__main__":
    main()
