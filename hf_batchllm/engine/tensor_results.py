"""What a call with tensors gives back: a tensor, or a ModelOutput, as from ``generate``."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from ..inputs.options import Options
from ..inputs.padded_batch import PaddedBatch
from ..results.generations import BatchResult
from .beams.outputs import beam_output, filling
from .call import Call


def as_tensors(
    padded: PaddedBatch, result: BatchResult, options: Options, call: Call
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput:
    sequences = padded.continued(result.token_ids, filling(options))
    if not options.config.return_dict_in_generate:
        return sequences
    longest, tensors = sequences.shape[1] - padded.width, call.outputs.tensors
    if options.num_beams > 1:
        return beam_output(sequences, longest, call.answers, options, tensors)
    lengths = [len(tokens) for tokens in result.token_ids]
    beside: dict[str, Any] = {} if tensors is None else dict(tensors.outputs(longest, sequences.device, lengths))
    return GenerateDecoderOnlyOutput(**{"sequences": sequences, **beside})
