"""What transformers itself gives: new tokens, and logits. It is the meaning of "correct"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


def reference_generate(model: PreTrainedModel, ids: Sequence[int], **kwargs: Any) -> list[int]:
    """The new tokens that ``model.generate`` gives for one prompt: the meaning of "correct"."""
    return reference_steps(model, ids, **kwargs)[0]


def reference_steps(model: PreTrainedModel, ids: Sequence[int], **kwargs: Any) -> tuple[list[int], torch.Tensor]:
    """The new tokens, and the raw logits [steps, vocabulary] from which each of them was chosen."""
    prompt = torch.tensor([list(ids)], device=model.device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, **kwargs}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    generate: Any = model.generate
    out = generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)


_TOKENS_AT_ONCE = 8192  # of one pass over rows that are padded to the same length


@torch.no_grad()
def logits_of_rows(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits [tokens, vocabulary] of transformers' own forward over each row.

    Rows are padded on the right, where no token before sees it, and run many at a time: most of a tiny model's time
    goes into calling it.
    """
    found: dict[int, torch.Tensor] = {}
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
    while order:
        longest = len(rows[order[-1]])
        count = max(1, _TOKENS_AT_ONCE // max(longest, 1))
        order, chosen = order[:-count], order[-count:]
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        for line, at in enumerate(chosen):
            ids[line, : len(rows[at])] = torch.tensor(rows[at], dtype=torch.long)
        logits = model(ids.to(model.device), use_cache=False).logits
        found |= {at: logits[line, : len(rows[at])] for line, at in enumerate(chosen)}
    return [found[at] for at in range(len(rows))]


def gaps(logits: torch.Tensor) -> torch.Tensor:
    """How far the best logit is ahead of the second best, at each step."""
    best = logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]
