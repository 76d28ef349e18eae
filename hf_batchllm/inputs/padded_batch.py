"""Tensors in, tensors out: a padded batch of token ids as ``model.generate`` takes it, and the tensor it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig

from .base_model import base_model
from .images.prompt_images import IMAGE_TENSORS, IMAGE_TOKEN_TYPES
from .prompts import Prompt

_NAMES = ("input_ids", "inputs")  # two names of the same argument of ``generate``


@dataclass(frozen=True)
class PaddedBatch:
    """Rows of token ids, padded on either side to one width. A row is a prompt."""

    ids: torch.Tensor  # integers [rows, width]
    mask: torch.Tensor | None  # bool [rows, width]; None where none was passed
    beside: Mapping[str, Any] = field(default_factory=dict)  # of images, as a processor gives it

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def mask_for(self, model: nn.Module, config: GenerationConfig) -> torch.Tensor:
        """The mask passed; else the one that ``generate`` infers: pad tokens are padding, unless they are EOS, too."""
        if self.mask is not None:
            return self.mask
        inner = base_model(model)
        return inner._prepare_attention_mask_for_generation(self.ids.long().to(inner.device), config, {})

    def unpadded(self, marked: torch.Tensor, vocab_size: int) -> tuple[list[Prompt | None], dict[int, str]]:
        """Each row without its padding, or None where it cannot be run; and the reason for each of these, by row.

        ``marked``: the mask, or the one to use where none was passed.
        """
        mask = marked.cpu().numpy().astype(bool)  # [rows, width]
        ids = self.ids.cpu().numpy()
        lengths = mask.sum(axis=1)
        begins = mask.argmax(axis=1)
        ends = self.width - mask[:, ::-1].argmax(axis=1)
        wrong = mask & ((ids < 0) | (ids >= vocab_size))
        problems: dict[int, str] = {}
        for row in np.flatnonzero((lengths == 0) | (ends - begins != lengths) | wrong.any(axis=1)).tolist():
            if lengths[row] == 0:
                problems[row] = "is all padding: it has no token to begin from"
            elif ends[row] - begins[row] != lengths[row]:
                problems[row] = self._masked_inside(begins[row] + int(mask[row, begins[row] :].argmin()))
            else:
                column = int(wrong[row].argmax())
                problems[row] = self._outside_vocabulary(int(ids[row, column]), column, vocab_size)
        prompts: list[Prompt | None] = [
            None if row in problems else Prompt(np.frombuffer(ids[row, begin:end].astype(np.int32).tobytes(), np.int32))
            for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True))
        ]
        return prompts, problems

    def continued(self, new_tokens: Sequence[Sequence[int]], pad: int | None) -> torch.Tensor:
        """int64 [rows * samples, width + longest]: each row as it was passed, then its new tokens, then padding."""
        longest = max(map(len, new_tokens))
        if pad is None and any(len(tokens) < longest for tokens in new_tokens):
            raise ValueError(
                "rows ended at different lengths and there is no token to pad them with: set `pad_token_id`"
            )
        added = np.full((len(new_tokens), longest), 0 if pad is None else pad, np.int64)
        for row, tokens in zip(added, new_tokens, strict=True):
            row[: len(tokens)] = tokens
        before = self.ids.long().repeat_interleave(len(new_tokens) // len(self.ids), dim=0)
        return torch.cat([before, torch.from_numpy(added).to(before.device)], dim=1)

    def _masked_inside(self, column: int) -> str:
        if self.mask is None:
            return (
                f"has the pad token between other tokens (column {column}). No `attention_mask` was passed, so every "
                "pad token was taken for padding, which belongs at the ends of a row: pass an `attention_mask`"
            )
        return (
            f"is masked in its middle (column {column} of `attention_mask`): padding belongs at the ends of a row. "
            "Take those tokens out of `input_ids`"
        )

    def _outside_vocabulary(self, token: int, column: int, vocab_size: int) -> str:
        hint = ". Is it padding? Then pass an `attention_mask`" if self.mask is None else ""
        if token < 0:
            return f"has token id {token} in column {column}; token ids are not negative{hint}"
        return f"has token id {token} in column {column}, outside the model's vocabulary of {vocab_size}{hint}"


def take_padded(prompts: Any, kwargs: dict[str, Any]) -> PaddedBatch | None:
    """The batch of tensors that a call was given, removed from ``kwargs``; None if the prompts are a list."""
    given = {name: kwargs.pop(name, None) for name in _NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    mask = kwargs.pop("attention_mask", None)
    if isinstance(prompts, Mapping) and _dimensions(prompts.get("input_ids")) == 2:
        raise TypeError(f"prompts is a {type(prompts).__name__} of tensors: unpack it, generate(**inputs, ...)")
    if prompts is not None and (_dimensions(prompts) >= 2 or given):
        given = {"prompts": prompts, **given}
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name in given)
        raise ValueError(f"{names} were passed together: pass one of them")
    if not given:
        if mask is None:
            return None
        if prompts is None:
            raise ValueError("`attention_mask` was passed without `input_ids`")
        raise ValueError(
            "`attention_mask` goes with a padded 2-D tensor, and the prompts are a list: leave out mask and padding"
        )
    ((name, value),) = given.items()
    ids = _ids(name, value)
    beside = [*IMAGE_TENSORS, IMAGE_TOKEN_TYPES]
    if kwargs.get("pixel_values") is not None:
        beside.append("token_type_ids")  # as some processors call those of images
    of_images = {name: kwargs.pop(name) for name in beside if kwargs.get(name) is not None}
    return PaddedBatch(ids, None if mask is None else _mask(mask, ids.shape), of_images)


def _ids(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor | np.ndarray):
        hint = ": pass lists and strings as prompts, generate(prompts)" if isinstance(value, list | tuple | str) else ""
        raise TypeError(f"`{name}` must be a 2-D tensor of token ids, not {type(value).__name__}{hint}")
    if value.ndim != 2:
        hint = ""
        if value.ndim == 1:
            hint = f": for a batch of one row pass {name}[None], for a BatchResult pass it as a prompt, generate([ids])"
        raise ValueError(f"`{name}` must have two dimensions, [rows, tokens], not shape {list(value.shape)}{hint}")
    if 0 in value.shape:
        raise ValueError(f"`{name}` is empty: its shape is {list(value.shape)}")
    integers = value.dtype.kind in "iu" if isinstance(value, np.ndarray) else _holds_integers(value)
    if not integers:
        raise TypeError(f"`{name}` holds {value.dtype}; token ids are integers")
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64))
    if value.is_meta:
        raise ValueError(f"`{name}` is on the meta device, where tensors have no values")
    return value


def _mask(mask: Any, shape: torch.Size) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor | np.ndarray):
        raise TypeError(f"`attention_mask` must be a 2-D tensor beside `input_ids`, not {type(mask).__name__}")
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(
            f"`attention_mask` has shape {list(mask.shape)} and `input_ids` {list(shape)}: they must be the same"
        )
    given = torch.from_numpy(mask.copy()) if isinstance(mask, np.ndarray) else mask
    if given.is_meta:
        raise ValueError("`attention_mask` is on the meta device, where tensors have no values")
    kept = given != 0
    other = given[kept & (given != 1)]
    if other.numel():
        raise ValueError(f"`attention_mask` holds {other[0].item()}: 1 marks a token and 0 padding, nothing else")
    return kept


def _holds_integers(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _dimensions(value: Any) -> int:
    """The dimensions of a tensor or an array; -1 for anything else."""
    return value.ndim if isinstance(value, torch.Tensor | np.ndarray) else -1
