"""How the tokens of a call are picked: by the device, or by the host."""

from __future__ import annotations

from ..model.model_in_use import ModelInUse
from ..sampling.token_picking import TokenPicking
from .call_outputs import CallOutputs
from .job import Job

DEPTH = {"cuda": 2}  # steps on their way at a time: one runs while the host prepares the next


def picking_of(job: Job, use: ModelInUse) -> TokenPicking:
    return TokenPicking(
        use.model,
        use.device,
        use.architecture.vocab_size,
        job.options,
        job.places,
        job.samples,
        [len(prompt.ids) for prompt in job.prompts],
        job.max_new_tokens,
        job.seed,
        amd=use.kernels_by_name,
        grammars=job.grammars,
    )


def why_by_host(job: Job, outputs: CallOutputs, picking: TokenPicking, depth: int | None = None) -> str | None:
    """Why the host picks the tokens; None if the device does. ``depth``: how many steps may be on their way."""
    if outputs.why_by_host is not None:
        return outputs.why_by_host
    if job.widths is not None:
        return "beams are chosen by the host, which waits for each step"
    return picking.why_by_host(DEPTH.get(picking.device.type, 1) if depth is None else depth)
