"""The output of a beam search on tensors, in the shape that ``generate`` gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from ...inputs.options import Options
from ...planning.requests_and_prefixes import Request
from ...sampling.step_tensors import StepTensors
from .group import Answer
from .search_rules import NEVER


def beam_output(
    sequences: torch.Tensor,  # [rows, width + longest]
    longest: int,
    answers: Sequence[Request],  # [rows]
    options: Options,
    tensors: StepTensors | None,
) -> GenerateBeamDecoderOnlyOutput:
    """Where a prompt's search was over before the others, its rows of scores and logits are 0."""
    device = sequences.device
    indices = torch.full((len(answers), longest), -1, dtype=torch.int32, device="cpu")
    for row, answer in zip(indices, answers, strict=True):
        assert isinstance(answer, Answer)
        first = answer.index * options.num_beams
        parents = [first + parent for parent in answer.parents]
        row[: len(parents)] = torch.tensor(parents, dtype=torch.int32, device="cpu")
    scores = None
    if options.config.output_scores:
        each = [NEVER if answer.score is None else answer.score for answer in answers]
        scores = torch.tensor(each, dtype=torch.float32, device=device)
    fields: dict[str, Any] = {} if tensors is None else {**tensors.outputs(None, device)}
    fields |= {"sequences": sequences, "sequences_scores": scores, "beam_indices": indices.to(device)}
    return GenerateBeamDecoderOnlyOutput(**fields)


def filling(options: Options) -> int | None:
    """The id that fills up short rows of a tensor. ``generate`` has a rule of its own for beams."""
    if options.num_beams == 1:
        return options.pad_token_id
    eos = options.config._eos_token_tensor
    return -1 if eos is None else options.pad_token_id or int(eos[0])
