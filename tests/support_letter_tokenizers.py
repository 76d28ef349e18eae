"""Tokenizers whose tokens are one to three letters of six: strings begin and end anywhere in them."""

from __future__ import annotations

from itertools import islice, product

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdef"
EOS = 100


def letter_tokens() -> list[str]:
    every = ("".join(letters) for size in (1, 2, 3) for letters in product(LETTERS, repeat=size))
    return [*islice(every, 100), "</s>"]


def letter_tokenizer(bytes_in_tokens: bool = True) -> PreTrainedTokenizerFast:
    """101 tokens. Strings are found in their bytes or, without ``bytes_in_tokens``, in what the tokenizer decodes."""
    tokens = letter_tokens()
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.decoder = decoders.ByteLevel() if bytes_in_tokens else decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
