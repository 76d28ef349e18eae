"""One call of a pipeline for images with all its inputs at once. An input may have several rows: a list of texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.utils.chat_template_utils import Chat

from ..inputs.token_ids import BadPrompt
from .image_pipeline_inputs import as_image_input, why_not_processed
from .pipeline_call import EncodedInput, PipelineCall, PreparedInputs, TokenGenerator
from .pipeline_options import Parameters
from .remembered_images import with_remembered_images

_OF_PROCESSOR = "processor_kwargs"


class ImagePipelineCall(PipelineCall):
    _instead_of_a_cut = "make the prompt shorter, or the images smaller"

    def prepare(self, inputs: Iterable[Any], generator: TokenGenerator) -> PreparedInputs:
        self._processed = generator.processed_images()
        self._encoder = with_remembered_images(self._pipe)
        try:
            return super().prepare(inputs, generator)
        finally:  # they hold pixels
            del self._processed
            self._encoder = self._pipe

    def _as_input(self, given: Any) -> Any:
        return as_image_input(given)

    def _why_not_encoded(self, given: Any, error: Exception) -> str:
        return why_not_processed(given, error)

    def _options_of(self, given: Any) -> Parameters:
        options = {**self._preprocess, **(self._chat_options if isinstance(given, Chat) else {})}
        if options.get(_OF_PROCESSOR) is not None:  # transformers writes into it, for this prompt
            options[_OF_PROCESSOR] = dict(options[_OF_PROCESSOR])
        return options

    def _add(self, prepared: PreparedInputs, given: Any, encoded: Any) -> None:
        made = dict(encoded)
        text, ids = made.pop("text"), made["input_ids"]
        if ids.shape[-1] == 0:
            prepared.refuse("is an empty string, of which the processor makes no tokens")
            return
        rows = self._processed.prompts(made)
        if isinstance(rows, BadPrompt):
            prepared.refuse(rows.why)
            return
        prepared.padded |= any(len(row.ids) < ids.shape[1] for row in rows)
        mask = made.get("attention_mask")
        prepared.padded_right |= mask is not None and not mask[:, -1].all()
        prepared.add(EncodedInput(text, ids, ids), rows)

    def _in_stock_form(self, sequences: torch.Tensor) -> torch.Tensor:
        return sequences
