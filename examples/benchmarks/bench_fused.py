"""What fused layers bring: a step of decode rows and a step of prompts, with a model's own layers and with fused ones.

    python examples/benchmarks/bench_fused.py  # eight layers of Llama-8B's shape, random weights
    python examples/benchmarks/bench_fused.py --family gemma3_text --layers 4
    python examples/benchmarks/bench_fused.py --json figures.json
    python examples/benchmarks/bench_fused.py --family qwen3 --trials 8  # errors alone, eight models with other weights

A step is run as the engine runs it. "eager" is its time from call to call, "graph" that of the same forward replayed
from a CUDA graph, so without what launches cost the host; each is a median. "kernels" and "busy" count all of them, and
add up their times, in one forward. The errors are those of the logits against the same model in float32, largest and
root mean square: fused layers round where the model's own do, but a merged product may add up in another order.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_timing import need_gpu  # beside this file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a source checkout needs no installation

from hf_batchllm import BatchConfig
from hf_batchllm.kernels import layer_ops_torch
from hf_batchllm.model.architecture import inspect_model
from hf_batchllm.model.batch import BatchBuilder, ModelBatch
from hf_batchllm.model.choose_backend import fused_kernels, make_backend
from hf_batchllm.model.kv_storage import KVStorage
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.notices import Notices
from hf_batchllm.patches.attention_interface import ATTENTION_NAME, attention_context
from hf_batchllm.patches.attention_swap import AttentionSwap
from hf_batchllm.patches.fused_forwards import FusedKernels
from hf_batchllm.patches.fusion import FusedLayers, Fusion
from hf_batchllm.planning.units import Chunk, Request, Step

PAGE = 64
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE |= {"vocab_size": 128256, "head_dim": 128, "max_position_embeddings": 8192}
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 16, "vocab_size": 500, "pad_token_id": 0}


@dataclass
class Figures:
    step: str
    layers: str
    eager_ms: float
    graph_ms: float
    kernels: int
    busy_ms: float
    largest_error: float
    mean_error: float


class Bench:
    """One model with a cache of its own, and the two steps over it."""

    def __init__(self, model: Any, rows: int, context: int, prompts: int, length: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.architecture = inspect_model(model)
        rng = np.random.default_rng(5)
        self.pages = 0
        self.rows = [self._request(rng, context, answered=1) for _ in range(rows)]
        self.prompts = [self._request(rng, length) for _ in range(prompts)]
        self.backend = make_backend(BatchConfig(page_size=PAGE), self.device, KVStorage(self.pages, PAGE), Notices())
        self.builder = BatchBuilder(PAGE, short_chunk=self.backend.short_chunk)
        for begin in range(0, rows, 64):
            some = self.rows[begin : begin + 64]
            self.logits(self.builder.build(Step([], [Chunk(request, 0, context) for request in some])), None)
        self.steps = {
            f"{rows} decode rows": self.builder.build(Step(self.rows)),
            f"{prompts * length:,} prompt tokens": self.builder.build(
                Step([], [Chunk(request, 0, length) for request in self.prompts])
            ),
        }

    def _request(self, rng: np.random.Generator, length: int, answered: int = 0) -> Request:
        vocabulary = self.architecture.vocab_size
        request = Request(0, rng.integers(0, vocabulary, length).astype(np.int32), 1 + answered)
        request.generated = rng.integers(0, vocabulary, answered).tolist()
        taken = -(-(length + answered) // PAGE)
        request.pages = list(range(self.pages, self.pages + taken))
        self.pages += taken
        return request

    def logits(self, batch: ModelBatch, fused: FusedLayers | None) -> torch.Tensor:  # [samples, vocabulary] float32
        return ModelRunner(self.model, self.architecture, self.backend, fused).step(batch)

    def figures(self, step: str, fused: FusedLayers | None, exact: torch.Tensor, count: int) -> Figures:
        batch = self.steps[step]
        error = (self.logits(batch, fused) - exact).double()
        runner = ModelRunner(self.model, self.architecture, self.backend, fused)
        eager = self._median_ms(lambda: runner.step(batch), count)
        graph, kernels, busy = 0.0, 0, 0.0
        if self.device.type == "cuda":
            graph, kernels, busy = self._on_the_device(batch, fused, count)
        layers = "own" if fused is None else "fused"
        worst, mean = float(error.abs().max()), float(error.square().mean().sqrt())
        return Figures(step, layers, eager, graph, kernels, busy, worst, mean)

    def _on_the_device(self, batch: ModelBatch, fused: FusedLayers | None, count: int) -> tuple[float, int, float]:
        batch = batch.to(self.device)
        context = self.backend.prepare(batch.attention)
        swap, tokens = AttentionSwap(self.model), batch.tokens

        def forward() -> torch.Tensor:
            return self.model(
                input_ids=tokens.input_ids[None],
                position_ids=tokens.position_ids[None],
                use_cache=False,
                logits_to_keep=tokens.logits_rows,
            ).logits

        with torch.no_grad(), swap.applied(ATTENTION_NAME), attention_context(context):
            with nullcontext() if fused is None else fused.applied():
                plain = forward()  # the step's lists are made, and kernels compiled
                activities = [torch.profiler.ProfilerActivity.CUDA]
                with torch.profiler.profile(activities=activities) as profile:
                    forward()
                    torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    replayed = forward()
                graph.replay()
                assert torch.equal(replayed, plain), "a replay gives something else"
            milliseconds = self._median_ms(graph.replay, count)
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return milliseconds, len(events), sum(event.time_range.elapsed_us() for event in events) / 1e3

    def _median_ms(self, function: Any, count: int) -> float:
        times = []
        for _ in range(3):
            function()
        for _ in range(count):
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begin.record()
                function()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end))
            else:
                start = time.perf_counter()
                function()
                times.append((time.perf_counter() - start) * 1e3)
        return float(np.median(times))


def random_model(family: str, layers: int, seed: int) -> Any:
    on_gpu = torch.cuda.is_available()  # elsewhere a tiny model, to see that this runs
    config = AutoConfig.for_model(family, **(SHAPE if on_gpu else TINY), num_hidden_layers=layers)
    torch.manual_seed(seed)
    with torch.device("cuda" if on_gpu else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def exact_logits(model: Any, sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What the same weights give in float32, with the model's own layers, for each step."""
    wide = copy.deepcopy(model).float()
    # The angles as they were: a cast to bfloat16 and back would move them.
    for name, angles in model.model.rotary_emb.named_buffers():
        setattr(wide.model.rotary_emb, name, angles.float())
    bench = Bench(wide, *sizes)
    return {step: bench.logits(batch, None) for step, batch in bench.steps.items()}


def kernels_for(device: torch.device) -> FusedKernels:
    found = fused_kernels(BatchConfig(page_size=PAGE), device)
    return found or FusedKernels(layer_ops_torch.add_rms_norm, layer_ops_torch.act_and_mul)


def compare_errors(family: str, layers: int, trials: int, sizes: tuple[int, ...]) -> None:
    """Root mean squares of many models' errors: one model's says whose rounding was luckier."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(trials):
        model = random_model(family, layers, seed)
        exact = exact_logits(model, sizes)
        bench, fusion = Bench(model, *sizes), Fusion(model)
        own = {step: bench.logits(batch, None) for step, batch in bench.steps.items()}
        fused = fusion.merge(kernels_for(bench.device))
        for step, batch in bench.steps.items():
            both = (own[step], bench.logits(batch, fused))
            of_own, of_fused = (float((logits - exact[step]).double().square().mean().sqrt()) for logits in both)
            errors.setdefault(step, []).append((of_own, of_fused))
        fusion.unmerge()
    print(f"{family}, {layers} layers, {trials} models: root mean square of the errors of logits beside float32")
    print(f"{'step':22s} {'own':>9s} {'fused':>9s}   fused / own: mean, least, most")
    for step, pairs in errors.items():
        own_mean, fused_mean = np.mean(pairs, axis=0)
        ratios = [of_fused / of_own for of_own, of_fused in pairs]
        spread = f"{np.mean(ratios):.4f} {min(ratios):.4f} {max(ratios):.4f}"
        print(f"{step:22s} {own_mean:9.5f} {fused_mean:9.5f}   {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="llama", help="a model_type: llama, qwen3, gemma3_text, ...")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--count", type=int, default=10, help="how often each is timed")
    parser.add_argument("--trials", type=int, default=0, help="errors alone, of so many models with other weights")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.trials < 0:
        parser.error(f"--trials takes a number of models, not {chosen.trials}")
    if chosen.trials and chosen.json:
        parser.error("--trials prints its table and writes no --json")
    need_gpu()
    on_gpu = torch.cuda.is_available()
    if chosen.trials:  # more prompts, so more logits
        sizes = (256, 128, 64, 128) if on_gpu else (8, 16, 4, 32)
        compare_errors(chosen.family, chosen.layers, chosen.trials, sizes)
        return
    sizes = (256, 128, 4, 2048) if on_gpu else (8, 16, 2, 32)
    model = random_model(chosen.family, chosen.layers, seed=0)
    exact = exact_logits(model, sizes)
    bench = Bench(model, *sizes)
    figures = [bench.figures(step, None, exact[step], chosen.count) for step in bench.steps]
    kernels = kernels_for(bench.device)
    began, fusion = time.perf_counter(), Fusion(model)
    before = torch.cuda.memory_reserved() if on_gpu else 0
    fused = fusion.merge(kernels)
    grown = (torch.cuda.memory_reserved() - before) / 1e9 if on_gpu else 0.0
    spent = time.perf_counter() - began
    print(f"{chosen.family}: {fusion.summary} fused, merged in {spent:.2f} s, {grown:+.2f} GB of memory reserved")
    figures += [bench.figures(step, fused, exact[step], chosen.count) for step in bench.steps]
    fusion.unmerge()

    print(f"{'step':22s} {'layers':6s} {'eager ms':>9s} {'graph ms':>9s} {'kernels':>8s} {'busy ms':>8s}   errors")
    for line in sorted(figures, key=lambda line: line.step):
        print(
            f"{line.step:22s} {line.layers:6s} {line.eager_ms:9.2f} {line.graph_ms:9.2f} {line.kernels:8d} "
            f"{line.busy_ms:8.2f}   {line.largest_error:.4f} {line.mean_error:.5f}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(line) for line in figures], indent=1))


if __name__ == "__main__":
    main()
