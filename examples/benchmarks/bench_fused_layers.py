"""What fused layers bring: steps of decode rows and of prompts, with a model's own layers and with fused ones.

    python examples/benchmarks/bench_fused_layers.py  # eight layers of Llama-8B's shape, random weights
    python examples/benchmarks/bench_fused_layers.py --family gemma3_text --layers 4
    python examples/benchmarks/bench_fused_layers.py --json figures.json
    python examples/benchmarks/bench_fused_layers.py --family qwen3 --trials 8  # only errors, of eight models

A step runs as in the engine. "eager" is its time from call to call; "graph" is that of the same forward replayed from a
CUDA graph, so without the host's launches; each is a median. "kernels" is the number of kernels in one forward, and
"busy" the sum of their times. The errors are those of the logits against the same model in float32, largest and root
mean square: fused layers round where the model's own do, but a merged product may add up in another order.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import common
import numpy as np
import torch
from bench_prompt_step import DEVICE, PAGE, Requests, kernels_here
from transformers import AutoConfig, AutoModelForCausalLM

from hf_batchllm import BatchConfig
from hf_batchllm.bench.workload import SHAPES
from hf_batchllm.model.attention.choose_backend import make_backend
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.batch import ModelBatch
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.model.inspection.architecture import inspect_model
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.notices import Notices
from hf_batchllm.patches.attention_interface import ATTENTION_NAME, attention_context
from hf_batchllm.patches.attention_swap import AttentionSwap
from hf_batchllm.patches.fusion import FusedLayers, Fusion
from hf_batchllm.planning.step import Chunk, Step

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SHAPE = {name: SHAPES["llama-8b"][name] for name in WIDTHS} | {"max_position_embeddings": 8192}  # of every family


class Bench:
    """One model with a cache of its own, and the two steps over it."""

    def __init__(self, model: Any, rows: int, context: int, prompts: int, length: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.architecture = inspect_model(model)
        requests = Requests(self.architecture.vocab_size)
        self.rows = [requests.add(context, answered=1) for _ in range(rows)]
        self.prompts = [requests.add(length) for _ in range(prompts)]
        storage = KVStorage(requests.pages, PAGE)
        self.backend = make_backend(BatchConfig(page_size=PAGE), self.device, storage, Notices())
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

    def logits(self, batch: ModelBatch, fused: FusedLayers | None) -> torch.Tensor:  # [samples, vocabulary] float32
        runner = ModelRunner(self.model, self.architecture, self.backend, fused)
        try:
            return runner.step(batch)
        finally:
            runner.control.restore()

    def figures(self, step: str, fused: FusedLayers | None, exact: torch.Tensor, count: int) -> dict[str, Any]:
        batch = self.steps[step]
        error = (self.logits(batch, fused) - exact).double()
        runner = ModelRunner(self.model, self.architecture, self.backend, fused)
        eager = _median_ms(lambda: runner.step(batch), count)
        runner.control.restore()
        graph, kernels, busy = self._graph_figures(batch, fused, count)
        errors = {"largest error": float(error.abs().max()), "mean error": float(error.square().mean().sqrt())}
        times = {"eager ms": eager, "graph ms": graph, "kernels": kernels, "busy ms": busy}
        return {"step": step, "layers": "own" if fused is None else "fused", **times, **errors}

    def _graph_figures(self, batch: ModelBatch, fused: FusedLayers | None, count: int) -> tuple[float, int, float]:
        """Milliseconds of a replay, number of kernels, milliseconds that they are busy."""
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
            milliseconds = _median_ms(graph.replay, count)
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return milliseconds, len(events), sum(event.time_range.elapsed_us() for event in events) / 1e3


def _median_ms(function: Callable[[], object], count: int) -> float:
    for _ in range(3):
        function()
    return common.event_ms(function, count, wait=True)


def random_model(family: str, layers: int, seed: int) -> Any:
    config = AutoConfig.for_model(family, **SHAPE, num_hidden_layers=layers)
    torch.manual_seed(seed)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def exact_logits(model: Any, sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The logits of each step from the same weights in float32, with the model's own layers."""
    wide = copy.deepcopy(model).float()
    # The angles of the original: a cast to bfloat16 and back would move them.
    for name, angles in model.model.rotary_emb.named_buffers():
        setattr(wide.model.rotary_emb, name, angles.float())
    bench = Bench(wide, *sizes)
    return {step: bench.logits(batch, None) for step, batch in bench.steps.items()}


def compare_errors(family: str, layers: int, trials: int, sizes: tuple[int, ...]) -> None:
    """The errors of many models, root mean square: one model alone says more about luck in rounding."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(trials):
        model = random_model(family, layers, seed)
        exact = exact_logits(model, sizes)
        bench, fusion = Bench(model, *sizes), Fusion(model)
        own = {step: bench.logits(batch, None) for step, batch in bench.steps.items()}
        fused = fusion.merge(kernels_here())
        for step, batch in bench.steps.items():
            both = (own[step], bench.logits(batch, fused))
            of_own, of_fused = (float((logits - exact[step]).double().square().mean().sqrt()) for logits in both)
            errors.setdefault(step, []).append((of_own, of_fused))
        fusion.unmerge()
    print(f"{family}, {layers} layers, {trials} models: root mean square of the errors of logits beside float32")
    columns = {"step": "<22", "own": "9.5f", "fused": "9.5f", "fused / own": "11.4f", "least": "7.4f", "most": "7.4f"}
    table = common.Table(columns)
    for step, pairs in errors.items():
        own_mean, fused_mean = np.mean(pairs, axis=0)
        ratios = [of_fused / of_own for of_own, of_fused in pairs]
        spread = {"fused / own": np.mean(ratios), "least": min(ratios), "most": max(ratios)}
        table.add({"step": step, "own": own_mean, "fused": fused_mean, **spread})


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {"--family": {"default": "llama", "help": "a model_type: llama, qwen3, gemma3_text, ..."}}
    chosen = common.read(
        __doc__, arguments, flags, on="gpu", figures=True, layers=(8, "layers"),
        count=(10, "times that each is measured"), trials=(0, "print only the errors of so many models"),
    )  # fmt: skip
    if chosen.trials:  # many prompts: many logits
        compare_errors(chosen.family, chosen.layers, chosen.trials, sizes=(256, 128, 64, 128))
        return
    sizes = (256, 128, 4, 2048)
    model = random_model(chosen.family, chosen.layers, seed=0)
    exact = exact_logits(model, sizes)
    bench = Bench(model, *sizes)
    columns = {"step": "<22", "layers": "<6", "eager ms": "9.2f", "graph ms": "9.2f", "kernels": "8", "busy ms": "8.2f"}
    table = common.Table({**columns, "largest error": "13.4f", "mean error": "10.5f"})
    for step in bench.steps:
        table.add(bench.figures(step, None, exact[step], chosen.count))
    kernels = kernels_here()
    began, fusion = time.perf_counter(), Fusion(model)
    before = torch.cuda.memory_reserved()
    fused = fusion.merge(kernels)
    grown, spent = (torch.cuda.memory_reserved() - before) / 1e9, time.perf_counter() - began
    print(f"{chosen.family}: {fusion.summary} fused, merged in {spent:.2f} s, {grown:+.2f} GB of memory reserved")
    for step in bench.steps:
        table.add(bench.figures(step, fused, exact[step], chosen.count))
    fusion.unmerge()
    table.write(chosen.json)


if __name__ == "__main__":
    main()
