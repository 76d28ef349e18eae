"""Models and tokenizers for grammars, and llguidance as a plain processor that looks at one sequence."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from support_family_models import Family
from support_letter_tokenizers import EOS, letter_tokenizer
from support_word_tokenizer import byte_tokenizer
from transformers import LogitsProcessor, PreTrainedModel

pytest.importorskip("llguidance", reason="needs the extra `json`")
import llguidance.hf
from llguidance import LLMatcher, LLTokenizer, grammar_from

END_OF_BYTES = 256
_SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_FORMATS = {"schema": "json_schema", "regex": "regex", "grammar": "lark", "choice": "choice"}


@cache
def letters() -> tuple[PreTrainedModel, Any]:
    """A model of 101 tokens, all but one of which are one to three letters."""
    return build("llama"), letter_tokenizer()


@cache
def of_bytes() -> tuple[PreTrainedModel, Any]:
    """Each byte is a token, and one more ends answers. The model has others, of which the tokenizer knows nothing."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return Family("bytes", "llama", _SIZES)(), tokenizer


@cache
def _prepared(tokenizer: Any, vocabulary: int, end: int) -> LLTokenizer:
    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=end)


class Plain(LogitsProcessor):
    """What llguidance allows after the tokens of one sequence, found anew at each step."""

    def __init__(self, option: str, text: str, given: tuple[PreTrainedModel, Any], prompt_tokens: int) -> None:
        model, tokenizer = given
        end = EOS if tokenizer is letters()[1] else END_OF_BYTES
        self._matcher = LLMatcher(_prepared(tokenizer, model.config.vocab_size, end), source(option, text))
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._masked(ids, row[None]) for ids, row in zip(input_ids.tolist(), scores, strict=True)])

    def _masked(self, ids: list[int], scores: torch.Tensor) -> torch.Tensor:
        matcher = self._matcher.deep_copy()
        assert matcher.consume_tokens(ids[self._prompt_tokens :]), matcher.get_error()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        banned = torch.from_numpy(bits[: scores.shape[1]] == 0).to(scores.device)
        return scores.masked_fill(banned, -torch.inf)


def source(option: str, text: str) -> str:
    return grammar_from(_FORMATS[option], text)  # type: ignore[arg-type]
