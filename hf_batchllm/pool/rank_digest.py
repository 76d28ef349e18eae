"""A digest of what a rank is asked for: ranks that are asked for something else must not run a call together."""

from __future__ import annotations

import hashlib

from ..inputs.plain_values import plain, plain_options
from .work import ScoreWork, Work


def digest_of(work: Work, seed_given: bool, everywhere: bool) -> str:
    """Processors and criteria count by what they hold when they are first seen, other objects by their classes."""
    job = work.job
    said = [
        type(work).__name__,
        everywhere,
        job.places,
        job.max_new_tokens,
        job.can_stop,
        sorted(map(str, job.problems)),
        job.adapters,
        None if job.grammars is None else job.grammars.each,
        job.seed if seed_given else None,
        plain_options(job.options, held=True),
    ]
    digest = hashlib.blake2b(repr(plain(said)).encode("utf-8", "surrogatepass"), digest_size=12)
    if isinstance(work, ScoreWork):
        for item in work.scores.inputs.items:
            digest.update(repr((item.index, item.choice, item.first)).encode() + item.ids.tobytes())
    for prompt in job.prompts:
        digest.update(len(prompt).to_bytes(4, "little") + prompt.ids.tobytes())
    return digest.hexdigest()
