"""How much longer a packed step of prompts takes than its matrix products and its attention alone.

    python examples/benchmarks/bench_prompt_step.py                                  # shapes of Llama-8B and Qwen3-8B
    python examples/benchmarks/bench_prompt_step.py --shapes gemma3-4b --tokens 8192 --seconds 10
    python examples/benchmarks/bench_prompt_step.py --layers 4 --json figures.json   # fewer layers, to try it out

Four functions take turns, launched one behind the other without a gap. The first half of the time is warm-up, so that
power sets the same clock for all; each figure is the median of the second half (CUDA events):

    fused      one step with fused layers, as the engine runs it (`ModelRunner.step`: all tokens through all layers, the
               LM head on each prompt's last token)
    own        the same with the model's own layers, over the same attention
    products   the same layers' matrix products alone: q+k+v, o, gate+up, down, with the same weights
    attention  the same layers' prefill attention kernels alone, over the K and V that the step wrote

ratio = fused / (products + attention). `--no-own` leaves `own` out, which makes the run shorter.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import transformers
from bench_support.gpu_timing import need_gpu
from bench_support.options import add_json_option, write_json
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from hf_batchllm import BatchConfig
from hf_batchllm.bench.shapes import SHAPES, has_experts, is_hybrid
from hf_batchllm.model.architecture import inspect_model
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.model.choose_backend import fused_kernels, make_backend
from hf_batchllm.model.kv_storage import KVStorage
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.notices import Notices
from hf_batchllm.patches.attention_interface import AttentionCall
from hf_batchllm.patches.fused_forwards import FusedKernels
from hf_batchllm.patches.fusion import Fusion
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Chunk, Step

DEVICE = torch.device("cuda")
DENSE = tuple(
    name for name in SHAPES if not (has_experts(name) or is_hybrid(name))
)  # a layer's products are the same for all tokens
PAGE = 64


def build(shape: str, layers: int | None) -> Any:
    fields = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16).eval()


class Forward:
    """One model, one step of prompts over a cache of its own, and the parts of that step."""

    def __init__(self, model: Any, fusion: Fusion, kernels: FusedKernels, tokens: int, length: int) -> None:
        self.model = model
        self.architecture = inspect_model(model)
        rng, pages = np.random.default_rng(5), 0
        requests = []
        for _ in range(tokens // length):
            request = Request(0, rng.integers(0, self.architecture.vocab_size, length).astype(np.int32), 1)
            taken = -(-length // PAGE)
            request.pages = list(range(pages, pages + taken))
            pages += taken
            requests.append(request)
        self.storage = KVStorage(pages, PAGE)
        self.backend = make_backend(BatchConfig(page_size=PAGE), DEVICE, self.storage, Notices())
        builder = BatchBuilder(PAGE, short_chunk=self.backend.short_chunk)
        self.batch = builder.build(Step([], [Chunk(request, 0, length) for request in requests]))
        self.fused_runner = ModelRunner(model, self.architecture, self.backend, fusion.merge(kernels))
        self.own_runner = ModelRunner(model, self.architecture, self.backend, None)
        self.calls: list[AttentionCall] = []
        self.product_inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._record_calls()
        self._record_products(fusion, tokens)

    def _record_calls(self) -> None:
        """Records the arguments of each layer's attention after K is rotated. The values of q do not matter."""
        prepare, calls = self.backend.prepare, self.calls

        def recording(batch: Any) -> Any:
            context = prepare(batch)
            attend = context.attend

            def recorded(call: AttentionCall) -> torch.Tensor:
                q = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device).copy_(call.q)
                calls.append(dataclasses.replace(call, q=q, rotation=None))
                return attend(call)

            context.attend = recorded
            return context

        self.backend.prepare = recording
        try:
            self.fused()
        finally:
            self.backend.prepare = prepare
        batch = self.batch.to(DEVICE)
        if hasattr(self.backend, "kernels"):
            kernels = self.backend.kernels
            other = make_backend(BatchConfig(page_size=PAGE), DEVICE, self.storage, Notices())
            other.kernels = dataclasses.replace(kernels, write=lambda *args, **kwargs: None)
            self.context = other.prepare(batch.attention)
        else:
            self.context = self.backend.prepare(batch.attention)
        # All layers get the same K and V: nothing reads them, as the cache holds the real ones.
        first = self.calls[0]
        self.calls[:] = [dataclasses.replace(call, k=first.k, v=first.v) for call in self.calls]

    def _record_products(self, fusion: Fusion, tokens: int) -> None:
        inputs: dict[int, torch.Tensor] = {}

        def add(weight: torch.Tensor) -> None:
            width = weight.shape[1]
            if width not in inputs:
                inputs[width] = torch.randn(tokens, width, dtype=torch.bfloat16, device=DEVICE)
            self.product_inputs.append((inputs[width], weight))

        for stack, weights in fusion.lay_out():
            for index, layer in enumerate(stack.layers):
                add(weights[index, "attention"][0][0])
                add(layer.module.self_attn.o_proj.weight.data)
                add(weights[index, "MLP"][0][0])
                add(layer.module.mlp.down_proj.weight.data)

    def fused(self) -> None:
        self.fused_runner.step(self.batch)

    def own(self) -> None:
        self.own_runner.step(self.batch)

    @torch.no_grad()
    def products(self) -> None:
        for x, weight in self.product_inputs:
            functional.linear(x, weight)

    @torch.no_grad()
    def attention(self) -> None:
        for call in self.calls:
            self.context.attend(call)


class Watch(threading.Thread):
    """Watches clock and power during a measurement."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, float]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-i", "0"]
        while not self.ended.wait(0.5):
            try:
                clock, power = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.split(",")
                self.seen.append((float(clock), float(power)))
            except Exception:  # for information only
                return

    def end(self) -> dict[str, float]:
        self.ended.set()
        half = self.seen[len(self.seen) // 2 :]
        medians = [float(np.median(each)) for each in zip(*half, strict=True)]
        return dict(zip(("mhz", "watt"), medians, strict=True)) if half else {}


def turns(functions: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """The milliseconds of each function in the second half of the time, launched one behind the other."""
    times: dict[str, list[float]] = defaultdict(list)
    waiting: list[dict[str, Any]] = []

    def collect(keep: bool) -> None:
        for name, measured in waiting.pop(0).items():
            measured[1].synchronize()
            if keep:
                times[name].append(measured[0].elapsed_time(measured[1]))

    for function in functions.values():  # kernels are compiled
        function()
        function()
    torch.cuda.synchronize()
    begin, rounds = time.perf_counter(), 0
    while rounds < 6 or time.perf_counter() < begin + seconds:
        now = {}
        for name, function in functions.items():
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            function()
            pair[1].record()
            now[name] = pair
        waiting.append(now)
        rounds += 1
        if len(waiting) > 2:  # the host is at most two rounds ahead
            collect(time.perf_counter() > begin + seconds / 2)
    while waiting:
        collect(True)
    return times


def profile_of(forward: Forward, what: str, count: int = 3) -> str:
    function = getattr(forward, what)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            function()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us() / 1e3)
            spans.append((event.time_range.start, event.time_range.end))
    busy = sum(map(sum, found.values()))
    wall = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e3 if spans else 0.0
    lines = [f"{what}: {count} steps, {wall / count:.2f} ms each from first to last kernel, {busy / count:.2f} ms busy"]
    lines.append(f"{'ms a step':>10s} {'share':>6s} {'count':>6s} {'us each':>9s}  kernel")
    for name, each in sorted(found.items(), key=lambda item: -sum(item[1]))[:40]:
        total = sum(each)
        lines.append(
            f"{total / count:10.3f} {100 * total / busy:5.1f}% {len(each) / count:6.0f} "
            f"{1e3 * total / len(each):9.1f}  {name[:110]}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-8b,qwen3-8b", help=f"of {', '.join(DENSE)} (default: %(default)s)")
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--length", type=int, default=2048, help="of each prompt")
    parser.add_argument("--seconds", type=float, default=14.0, help="for each shape and number of tokens")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--no-own", action="store_true", help="leave the model's own layers out")
    parser.add_argument("--profile", default="", help="the shape to profile (default: the first)")
    add_json_option(parser)
    chosen = parser.parse_args()
    need_gpu()
    figures: list[dict[str, Any]] = []
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}; torch {torch.__version__}, transformers {transformers.__version__}, python {sys.version.split()[0]}")
    shapes, length = chosen.shapes.split(","), chosen.length
    if unknown := [name for name in shapes if name not in DENSE]:
        parser.error(f"--shapes: {', '.join(unknown)} is none of {', '.join(DENSE)}")
    counts = [int(each) for each in chosen.tokens.split(",")]
    kernels = fused_kernels(BatchConfig(page_size=PAGE), DEVICE)
    assert kernels is not None
    print(
        f"{'shape':12s} {'tokens':>7s} {'fused ms':>9s} {'own ms':>8s} {'products':>9s} {'attention':>9s} "
        f"{'ratio':>6s} {'own ratio':>9s} {'TFLOP/s':>8s} {'MHz':>6s} {'W':>5s} {'n':>4s}"
    )
    profiles = []
    for shape in shapes:
        model = build(shape, chosen.layers)
        fusion = Fusion(model)
        for tokens in counts:
            forward = Forward(model, fusion, kernels, tokens, min(length, tokens))
            names = ["fused", "products", "attention"] + ([] if chosen.no_own else ["own"])
            watch = Watch()
            watch.start()
            times = turns({name: getattr(forward, name) for name in names}, chosen.seconds)
            state = watch.end()
            ms = {name: float(np.median(each)) for name, each in times.items()}
            floor = ms["products"] + ms["attention"]
            flops = sum(2 * tokens * weight.numel() for _, weight in forward.product_inputs)
            rate = flops / ms["products"] / 1e9
            ratio, own = ms["fused"] / floor, ms.get("own", float("nan"))
            figure = {"shape": shape, "tokens": tokens, "length": min(length, tokens), "ms": ms, "ratio": ratio}
            figure |= {"times": dict(times), "fused": fusion.summary, "tflops": rate, **state}
            figures.append(figure)
            print(
                f"{shape:12s} {tokens:7,d} {ms['fused']:9.2f} {own:8.2f} {ms['products']:9.2f} {ms['attention']:9.2f} "
                f"{ratio:6.3f} {own / floor:9.3f} {rate:8.0f} {state.get('mhz', 0):6.0f} {state.get('watt', 0):5.0f} "
                f"{len(times['fused']):4d}"
            )
            if tokens == counts[-1] and shape == (chosen.profile or shapes[0]):
                for what in names:
                    profiles.append(f"{shape}, {tokens:,} tokens; {profile_of(forward, what)}")
            del forward
            torch.cuda.empty_cache()
        print(f"{'':12s} {fusion.summary} fused")
        fusion.unmerge()
        del model, fusion
        torch.cuda.empty_cache()
    for profile in profiles[:1]:
        print(f"\n{profile}")
    write_json(chosen.json, figures)


if __name__ == "__main__":
    main()
