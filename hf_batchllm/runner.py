"""ModelRunner: one step of the user's own model, in the mode that it is in."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from .attention import ATTENTION_NAME, CascadeAttention, attention_context
from .batch import ModelBatch
from .cascade import CascadePlan
from .patches.attention_swap import attention_configs, swapped_attention
from .storage import KVStorage


class ModelRunner:
    def __init__(self, model: nn.Module, storage: KVStorage, device: torch.device) -> None:
        self.model = model
        self.storage = storage
        self.device = device
        self._configs = attention_configs(model)
        forward = getattr(model, "get_base_model", lambda: model)().forward
        self._selects_rows = "logits_to_keep" in inspect.signature(forward).parameters

    @torch.no_grad()
    def step(self, batch: ModelBatch) -> torch.Tensor:  # [samples, vocabulary] float32
        """Run the step's tokens; the logits of those rows that are sampled."""
        batch = batch.to(self.device)
        tokens = batch.tokens
        keep = {"logits_to_keep": tokens.logits_rows} if self._selects_rows else {}
        plan = CascadePlan(batch.attention, self.device)
        # Swapped for this step only: between steps, and after any exception, the model is as its owner left it.
        with swapped_attention(self._configs, ATTENTION_NAME), attention_context(CascadeAttention(plan, self.storage)):
            output = self.model(
                input_ids=tokens.input_ids[None],
                position_ids=tokens.position_ids[None],
                use_cache=False,
                return_dict=True,
                **keep,
            )
        logits = output.logits[0]
        if not self._selects_rows:
            logits = logits[tokens.logits_rows]
        return logits.float()
