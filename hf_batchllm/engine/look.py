"""Looks at a call before it takes memory: whatever it cannot be served with is refused here, by name."""

from __future__ import annotations

from ..inputs.prompts import longest_uncut
from ..model.image_features import ImageFeatures
from ..model.inspection.invariance import refuse_calls_that_vary
from ..model.model_in_use import ModelInUse
from ..planning.call_plan import CallPlan
from ..sampling.device_logprobs import MOST_LIKELY
from .call_outputs import CallOutputs
from .invariance_trial import refuse_by_trial, try_wide_passes
from .job import Job
from .resources import Resources


def look_at_plan(
    job: Job, plan: CallPlan, outputs: CallOutputs, images: ImageFeatures | None, resources: Resources
) -> None:
    """Refuse what differs from batch to batch, where results may not, and say what makes steps larger."""
    config = resources.config
    top_logprobs = MOST_LIKELY if outputs.top_logprobs > MOST_LIKELY else None
    device, beams = resources.architecture.device, job.widths is not None
    refuse_calls_that_vary(config, device, images=images is not None, beams=beams, most_likely=top_logprobs)
    most, uncut = config.max_batch_tokens, longest_uncut(plan.prompts)
    if most is not None and most < uncut:
        resources.notices(
            "uncut",
            f"an image takes {uncut:,} tokens, which see each other both ways and are computed in one step: "
            f"`max_batch_tokens` is {most:,}, and steps have up to {uncut:,}",
        )


def try_model(use: ModelInUse, plan: CallPlan, images: ImageFeatures | None, resources: Resources) -> None:
    """Fuse the model's layers, and try whether steps keep what the settings promise."""
    config = resources.config
    if images is not None and config.keep_prefixes and resources.kv.cache is None:
        images.read_first()  # before the model is looked at: whether it changes decides what is kept
    use.fuse()
    refuse_by_trial(use, config)
    try_wide_passes(use, config, plan.sharing.computed_tokens, resources.notices)
