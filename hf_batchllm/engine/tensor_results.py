"""What a call with tensors gives back: a tensor, or a ModelOutput, as from ``generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from ..errors import UnsupportedOptionError
from ..inputs.options import Options
from ..inputs.padded_batch import PaddedBatch
from ..patches.attention_interface import CACHE_NAME
from ..results.generations import BatchResult
from .beams.outputs import beam_output, filling
from .call import Call

_GO_ON = (
    "pass the whole conversation anew, with its images. Or begin it with the model's own `generate`, outside of "
    "`accelerated`, which returns its cache"
)


class NoCache:
    """Stands where a ModelOutput of ``generate`` has its cache. Whoever goes on from it is told that there is none."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<no cache: hf_batchllm keeps none for a next call. To go on, {_GO_ON}>"

    def __getattr__(self, name: str) -> Any:  # an AttributeError, so that `hasattr`, copies and pickles work
        raise AttributeError(f"hf_batchllm returned no cache, so there is no `{name}`: {_GO_ON}")

    def __setattr__(self, name: str, value: object) -> None:  # the first thing that `generate` does with a cache
        self.__getattr__(name)

    def __getitem__(self, key: object) -> Any:
        raise TypeError(f"hf_batchllm returned no cache: {_GO_ON}")


def refuse_no_cache(given: Mapping[str, Any]) -> None:
    """``given``: arguments of a call of ``generate``, by name."""
    for name, value in given.items():
        if isinstance(value, NoCache):
            raise UnsupportedOptionError(name, f"is of an output of hf_batchllm, which has no cache: {_GO_ON}")


def as_tensors(
    padded: PaddedBatch, result: BatchResult, options: Options, call: Call
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput:
    sequences = padded.continued(result.token_ids, filling(options))
    if not options.config.return_dict_in_generate:
        return sequences
    longest, tensors = sequences.shape[1] - padded.width, call.outputs.tensors
    output: GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput
    if options.num_beams > 1:
        output = beam_output(sequences, longest, call.answers, options, tensors)
    else:
        lengths = [len(tokens) for tokens in result.token_ids]
        beside: dict[str, Any] = {} if tensors is None else dict(tensors.outputs(longest, sequences.device, lengths))
        output = GenerateDecoderOnlyOutput(**{"sequences": sequences, **beside})
    if options.config.use_cache is not False:  # as in ``generate``
        output[CACHE_NAME] = NoCache()
    return output
