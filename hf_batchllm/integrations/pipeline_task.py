"""The tasks ``batch-text-generation`` and ``batch-image-text-to-text``: added to transformers' list where asked for."""

from __future__ import annotations

from transformers.pipelines import PIPELINE_REGISTRY

from .image_pipeline import BatchImageTextToTextPipeline
from .pipeline import BatchTextGenerationPipeline


def register_tasks() -> None:
    """Make both tasks known to ``transformers.pipeline``. A second call does no harm."""
    # Not by register_pipeline(): it marks the class as custom code, which save_pretrained() would then copy next to the
    # model and enter in its config.
    tasks = PIPELINE_REGISTRY.supported_tasks
    for each in (BatchTextGenerationPipeline, BatchImageTextToTextPipeline):
        tasks[each.own_task] = {**tasks[each.stock_task], "impl": each}
