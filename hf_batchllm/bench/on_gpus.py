"""The contender on several GPUs: a pool of processes, each with the model of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..pool.devices import worker_devices
from ..pool.generator_pool import GeneratorPool
from ..results.run_report import RunReport
from .contenders import Answers, NoTokenizer, Prompts, Tokens, length_of_each


@dataclass
class OnGpus:
    """``load`` gives the model in each process; ``model`` is that of this process, whose settings are taken."""

    model: PreTrainedModel
    load: Callable[[], Any]
    gpus: Any
    fields: dict[str, Any] = field(default_factory=dict)  # of BatchConfig
    report: RunReport | None = None
    start_seconds: float = 0.0

    def __post_init__(self) -> None:
        began = time.perf_counter()
        self.pool = GeneratorPool(self.load, NoTokenizer(), gpus=self.gpus, **self.fields)
        self.pool.wait()
        self.start_seconds = time.perf_counter() - began
        self.processes = len(self.pool)
        self.kind = worker_devices(self.gpus)[0].device
        self.name = f"hf_batchllm, {self.processes} processes"

    def run(self, prompts: Prompts, answers: Answers) -> Tokens:
        lengths, own = length_of_each(answers, prompts), self.model.generation_config
        configs = {length: GenerationConfig(**own.to_diff_dict(), max_new_tokens=length) for length in set(lengths)}
        result = self.pool.generate(prompts, [configs[length] for length in lengths], progress=False)
        self.report = result.report
        return result.token_ids

    def close(self) -> None:
        self.pool.close()


def load_on(load: Callable[..., Any], model: str | None, config: str | None, dtype: torch.dtype) -> Any:
    """In a process of the pool, which sees one GPU, or none."""
    return load(model, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)
