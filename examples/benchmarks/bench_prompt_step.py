"""How much longer a packed step of prompts takes than its matrix products and its attention alone.

    python examples/benchmarks/bench_prompt_step.py                                  # shapes of Llama-8B and Qwen3-8B
    python examples/benchmarks/bench_prompt_step.py --shapes gemma3-4b --tokens 8192 --seconds 10
    python examples/benchmarks/bench_prompt_step.py --layers 4 --json figures.json   # fewer layers, to try it out

Four functions take turns, launched one behind the other without a gap. The first half of the time is warm-up, so that
power sets the same clock for all; each figure is the median of the second half (CUDA events), in milliseconds:

    fused      one step with fused layers, as the engine runs it, the LM head on each prompt's last token
    own        the same with the model's own layers, over the same attention (not with --no-own)
    products   the same layers' matrix products alone: q+k+v, o, gate+up, down, with the same weights
    attention  the same layers' prefill attention kernels alone, over the K and V that the step wrote

ratio = fused / (products + attention).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import common
import numpy as np
import torch
import transformers
from torch.nn import functional

from hf_batchllm import BatchConfig
from hf_batchllm.model.attention.choose_backend import fused_kernels, make_backend
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.model.inspection.architecture import inspect_model
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.notices import Notices
from hf_batchllm.patches.attention_interface import AttentionCall
from hf_batchllm.patches.fused_forwards import FusedKernels
from hf_batchllm.patches.fusion import Fusion
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Chunk, Step

DEVICE = torch.device("cuda")
PAGE = 64


def kernels_here() -> FusedKernels:
    kernels = fused_kernels(BatchConfig(page_size=PAGE), DEVICE)
    assert kernels is not None
    return kernels


class Requests:
    """Requests with random prompts, each on pages of its own."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.pages, self.dice = vocabulary, 0, np.random.default_rng(5)

    def add(self, length: int, answered: int = 0) -> Request:
        request = Request(0, self.dice.integers(0, self.vocabulary, length).astype(np.int32), 1 + answered)
        request.generated = self.dice.integers(0, self.vocabulary, answered).tolist()
        begin, self.pages = self.pages, self.pages - (-(length + answered) // PAGE)
        request.pages = list(range(begin, self.pages))
        return request


class Forward:
    """One model, one step of prompts over a cache of its own, and the parts of that step."""

    def __init__(self, model: Any, fusion: Fusion, kernels: FusedKernels, tokens: int, length: int) -> None:
        self.model = model
        self.architecture = inspect_model(model)
        requests = Requests(self.architecture.vocab_size)
        chunks = [Chunk(requests.add(length), 0, length) for _ in range(tokens // length)]
        self.storage = KVStorage(requests.pages, PAGE)
        self.backend = make_backend(BatchConfig(page_size=PAGE), DEVICE, self.storage, Notices())
        builder = BatchBuilder(PAGE, short_chunk=self.backend.short_chunk)
        self.batch = builder.build(Step([], chunks))
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
        other: Any = make_backend(BatchConfig(page_size=PAGE), DEVICE, self.storage, Notices())
        other.kernels = dataclasses.replace(other.kernels, write=lambda *args, **kwargs: None)
        self.context = other.prepare(batch.attention)
        # All layers get the same K and V: nothing reads them, as the cache holds the real ones.
        first = self.calls[0]
        self.calls[:] = [dataclasses.replace(call, k=first.k, v=first.v) for call in self.calls]

    def _record_products(self, fusion: Fusion, tokens: int) -> None:
        inputs: dict[int, torch.Tensor] = {}

        def add(weight: torch.Tensor) -> None:
            width = weight.shape[1]
            if width not in inputs:
                inputs[width] = common.randn(tokens, width)
            self.product_inputs.append((inputs[width], weight))

        for stack, weights in fusion.lay_out()[0]:
            for index, layer in enumerate(stack.layers):
                add(weights[index, "attention"][0][0])
                add(layer.module.self_attn.o_proj.weight.data)
                add(weights[index, "MLP"][0][0])
                add(layer.module.mlp.down_proj.weight.data)

    def fused(self) -> None:
        self._step(self.fused_runner)

    def own(self) -> None:
        self._step(self.own_runner)

    def _step(self, runner: ModelRunner) -> None:
        runner.step(self.batch)
        runner.control.restore()  # the other one runs next

    @torch.no_grad()
    def products(self) -> None:
        for x, weight in self.product_inputs:
            functional.linear(x, weight)

    @torch.no_grad()
    def attention(self) -> None:
        for call in self.calls:
            self.context.attend(call)


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--shapes": {"nargs": "+", "choices": common.DENSE, "metavar": "NAME", "default": ["llama-8b", "qwen3-8b"]},
        "--tokens": {"nargs": "+", "type": int, "default": [4096, 8192]},
        "--seconds": {"type": float, "default": 14.0, "help": "for each shape and number of tokens"},
        "--no-own": {"action": "store_true", "help": "leave the model's own layers out"},
    }
    numbers = {"length": (2048, "tokens of each prompt"), "layers": (0, "fewer than the shape has; 0: all")}
    chosen = common.read(__doc__, arguments, flags, on="gpu", figures=True, **numbers)
    print(f"{common.card()}, transformers {transformers.__version__}")
    kernels = kernels_here()
    names = ["fused", "products", "attention"] + ([] if chosen.no_own else ["own"])
    columns = {"shape": "<12", "tokens": "7,", **dict.fromkeys(("fused", "own", "products", "attention"), "9.2f")}
    columns |= {"ratio": "6.3f", "own ratio": "9.3f", "TFLOP/s": "8.0f", "MHz": "6.0f", "W": "5.0f", "n": "4"}
    table = common.Table(columns)
    for shape in chosen.shapes:
        model = common.random_shape(shape, chosen.layers)
        fusion = Fusion(model)
        for tokens in chosen.tokens:
            forward = Forward(model, fusion, kernels, tokens, min(chosen.length, tokens))
            watch = common.Watch()
            times = common.turns({name: getattr(forward, name) for name in names}, chosen.seconds)
            state = watch.end()
            ms = {name: float(np.median(each)) for name, each in times.items()}
            parts = ms["products"] + ms["attention"]
            flops = sum(2 * tokens * weight.numel() for _, weight in forward.product_inputs)
            found = {"shape": shape, "tokens": tokens, **ms, "ratio": ms["fused"] / parts, "n": len(times["fused"])}
            found |= {"own ratio": ms["own"] / parts} if "own" in ms else {}
            table.add({**found, **state, "TFLOP/s": flops / ms["products"] / 1e9}, times=dict(times))
            del forward
            torch.cuda.empty_cache()
        print(f"{'':12} {fusion.summary} fused")
        fusion.unmerge()
        del model, fusion
        torch.cuda.empty_cache()
    table.write(chosen.json)


if __name__ == "__main__":
    main()
