"""What the cases of models that ranks have together begin with: this rank, and its part of a model."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging import version
from support_device_loop import run_over_references
from support_families import build, random_prompts
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PROMPTS = {kind: random_prompts(random.Random(4), 97, kind, 24)[:10] for kind in ("nested", "distinct")}
QUIET: dict[str, Any] = {"progress": False}
FOLDER = Path(sys.argv[1])
DEVICE = os.environ.get("TENSOR_RANKS_ON", "cpu")
FOUND: dict[str, Any] = {}  # by case
OLDER = version.parse(transformers.__version__) < version.parse("5.20")


@cache
def sharded(family: str) -> Any:
    """The model of a family, of which this rank has a part."""
    saved = FOLDER / family
    if RANK == 0:
        build(family).save_pretrained(saved)
    dist.barrier()
    auto: Any = AutoModelForCausalLM
    with pytest.MonkeyPatch.context() as patch:
        if len(build(family).get_output_embeddings().weight) % RANKS and OLDER:
            patch.setattr(type(build(family)), "_tp_plan", {})  # whole heads: 5.17 does not spread such a vocabulary
        return auto.from_pretrained(
            saved, distributed_config=DistributedConfig(tp_size=RANKS), dtype=torch.float32
        ).eval()


@cache
def whole_model(family: str) -> Any:
    return copy.deepcopy(build(family)).to(DEVICE)


def over_references(case: Callable[..., Any]) -> Callable[..., Any]:
    """On the GPU's loop; on a CPU over the kernels' references."""

    def run(*given: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if DEVICE == "cpu":
                run_over_references(patch)
            return case(*given)

    return run


def group_of(gen: Any) -> Any:
    """The processes that have the model of a generator together."""
    return gen._group


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
