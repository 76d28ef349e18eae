"""A packed step of prompts with fused layers, against what its products and its attention take alone.

    python examples/benchmarks/bench_forward.py                                  # shapes of Llama-8B and Qwen3-8B
    python examples/benchmarks/bench_forward.py --shapes gemma3-4b --tokens 8192 --seconds 10
    python examples/benchmarks/bench_forward.py --layers 4 --json figures.json   # fewer layers, to try it out

Four things take turns, launched one behind the other without a gap, for so many seconds; the first half is warm-up, so
that power sets the clock alike for all, and each figure is the median of the second half (CUDA events):

    fused      one step as the engine runs it (`ModelRunner.step`: all tokens through all layers; the LM head on each
               prompt's last token), with fused layers
    own        the same with the model's own layers, over the same attention
    products   the same layers' matrix products alone: q+k+v, o, gate+up, down, with the same weights
    attention  the same layers' prefill attention kernels alone, over the K and V that the step wrote

ratio = fused / (products + attention). Without `own` in the turns (`--no-own`) the run is shorter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gpu_timing import need_gpu  # beside this file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a source checkout needs no installation

from hf_batchllm import BatchConfig
from hf_batchllm.kernels import layer_ops_torch
from hf_batchllm.model.architecture import inspect_model
from hf_batchllm.model.batch import BatchBuilder
from hf_batchllm.model.choose_backend import fused_kernels, make_backend
from hf_batchllm.model.kv_storage import KVStorage
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.notices import Notices
from hf_batchllm.patches.attention_interface import AttentionCall
from hf_batchllm.patches.fused_forwards import FusedKernels
from hf_batchllm.patches.fusion import Fusion
from hf_batchllm.planning.units import Chunk, Request, Step

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
PAGE = 64
COMMON = {"max_position_embeddings": 32768, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "query_pre_attn_scalar": 256, "sliding_window": 1024,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY |= {"num_hidden_layers": 2, "vocab_size": 500}


def build(shape: str, layers: int | None) -> Any:
    fields = COMMON | SHAPES[shape] | ({} if GPU else TINY)
    if layers:
        fields["num_hidden_layers"] = layers
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


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
        self.backend = make_backend(BatchConfig(page_size=PAGE), torch.device(DEVICE), self.storage, Notices())
        builder = BatchBuilder(PAGE, short_chunk=self.backend.short_chunk)
        self.batch = builder.build(Step([], [Chunk(request, 0, length) for request in requests]))
        self.fused_runner = ModelRunner(model, self.architecture, self.backend, fusion.merge(kernels))
        self.own_runner = ModelRunner(model, self.architecture, self.backend, None)
        self.calls: list[AttentionCall] = []
        self.products_of: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._note_calls()
        self._note_products(fusion, tokens)

    def _note_calls(self) -> None:
        """What each layer's attention gets, as it is once K is turned: any numbers do for q."""
        prepare, calls = self.backend.prepare, self.calls

        def noting(batch: Any) -> Any:
            context = prepare(batch)
            attend = context.attend

            def noted(call: AttentionCall) -> torch.Tensor:
                q = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device).copy_(call.q)
                calls.append(dataclasses.replace(call, q=q, rotation=None))
                return attend(call)

            context.attend = noted
            return context

        self.backend.prepare = noting
        try:
            self.fused()
        finally:
            self.backend.prepare = prepare
        batch = self.batch.to(torch.device(DEVICE))
        if hasattr(self.backend, "kernels"):
            kernels = self.backend.kernels
            other = make_backend(BatchConfig(page_size=PAGE), torch.device(DEVICE), self.storage, Notices())
            other.kernels = dataclasses.replace(kernels, write=lambda *args, **kwargs: None)
            self.context = other.prepare(batch.attention)
        else:
            self.context = self.backend.prepare(batch.attention)
        # K and V as views of one tensor for all layers: nothing reads them, they lie in the cache.
        first = self.calls[0]
        self.calls[:] = [dataclasses.replace(call, k=first.k, v=first.v) for call in self.calls]

    def _note_products(self, fusion: Fusion, tokens: int) -> None:
        inputs: dict[int, torch.Tensor] = {}

        def add(weight: torch.Tensor) -> None:
            width = weight.shape[1]
            if width not in inputs:
                inputs[width] = torch.randn(tokens, width, dtype=torch.bfloat16, device=DEVICE)
            self.products_of.append((inputs[width], weight))

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
        for x, weight in self.products_of:
            functional.linear(x, weight)

    @torch.no_grad()
    def attention(self) -> None:
        for call in self.calls:
            self.context.attend(call)


class Watch(threading.Thread):
    """What clock and power were, while others measure."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, float]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-i", "0"]
        while GPU and not self.ended.wait(0.5):
            try:
                clock, power = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.split(",")
                self.seen.append((float(clock), float(power)))
            except Exception:  # it is said for information alone
                return

    def end(self) -> dict[str, float]:
        self.ended.set()
        half = self.seen[len(self.seen) // 2 :]
        medians = [float(np.median(each)) for each in zip(*half, strict=True)]
        return dict(zip(("mhz", "watt"), medians, strict=True)) if half else {}


def turns(functions: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each, one launched behind the other; those of the second half."""
    times: dict[str, list[float]] = defaultdict(list)
    waiting: list[dict[str, Any]] = []

    def collect(keep: bool) -> None:
        for name, measured in waiting.pop(0).items():
            if GPU:
                measured[1].synchronize()
                measured = measured[0].elapsed_time(measured[1])
            if keep:
                times[name].append(measured)

    for function in functions.values():  # kernels are compiled
        function()
        function()
    if GPU:
        torch.cuda.synchronize()
    begin, rounds = time.perf_counter(), 0
    while rounds < 6 or time.perf_counter() < begin + seconds:
        now = {}
        for name, function in functions.items():
            if GPU:
                pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                pair[0].record()
                function()
                pair[1].record()
                now[name] = pair
            else:
                start = time.perf_counter()
                function()
                now[name] = 1e3 * (time.perf_counter() - start)
        waiting.append(now)
        rounds += 1
        if len(waiting) > 2:  # the host is ahead by two rounds, no more
            collect(time.perf_counter() > begin + seconds / 2)
    while waiting:
        collect(True)
    return times


def profile_of(forward: Forward, what: str, count: int = 3) -> str:
    kinds = torch.profiler.ProfilerActivity
    function = getattr(forward, what)
    with torch.profiler.profile(activities=[kinds.CUDA] if GPU else [kinds.CPU]) as profile:
        for _ in range(count):
            function()
        if GPU:
            torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA if GPU else torch.autograd.DeviceType.CPU
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profile.events():
        if event.device_type == device:
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
    parser.add_argument("--shapes", default="llama-8b,qwen3-8b", help=", ".join(SHAPES))
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--length", type=int, default=2048, help="of each prompt")
    parser.add_argument("--seconds", type=float, default=14.0, help="for each shape and number of tokens")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--no-own", action="store_true", help="leave the model's own layers out")
    parser.add_argument("--profile", default="", help="the shape that is profiled: by default the first")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    need_gpu()
    figures: list[dict[str, Any]] = []
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}; torch {torch.__version__}, transformers {transformers.__version__}, python {sys.version.split()[0]}")
    shapes, length = chosen.shapes.split(","), chosen.length if GPU else 16
    counts = [int(each) for each in chosen.tokens.split(",")] if GPU else [32, 64]
    kernels = fused_kernels(BatchConfig(page_size=PAGE), torch.device(DEVICE))
    kernels = kernels or FusedKernels(layer_ops_torch.add_rms_norm, layer_ops_torch.act_and_mul)
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
            times = turns({name: getattr(forward, name) for name in names}, chosen.seconds if GPU else 0.5)
            state = watch.end()
            ms = {name: float(np.median(each)) for name, each in times.items()}
            floor = ms["products"] + ms["attention"]
            flops = sum(2 * tokens * weight.numel() for _, weight in forward.products_of)
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
            if GPU:
                torch.cuda.empty_cache()
        print(f"{'':12s} {fusion.summary} fused")
        fusion.unmerge()
        del model, fusion
        if GPU:
            torch.cuda.empty_cache()
    for profile in profiles[:1]:
        print(f"\n{profile}")
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
