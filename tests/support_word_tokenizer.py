"""A tokenizer whose words are their ids: "w5 w6" is [5, 6]."""

from __future__ import annotations

import os
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_TEMPLATE = """
{%- for message in messages -%}
{%- if message.role == 'alien' -%}{{ raise_exception('no aliens') }}{%- endif -%}
w1 {{ message.content or '' }} {% endfor -%}
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, so a character outside of ASCII is several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def word_tokenizer(words: int = 101, bos: bool = False, template: bool = False) -> PreTrainedTokenizerFast:
    """w0 stands for unknown words, w2 is EOS; w1 is BOS, or begins each message of a chat.

    These three are found in longer words, too: w3 to w9, w30 to w99 and w300 to w999 are words as any other.
    """
    inner = Tokenizer(models.WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w2", bos_token="w1")
    tokenizer.chat_template = _TEMPLATE if template else None
    return tokenizer


def save_without_template(tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """As a model that was not trained on chats has it."""
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.chat_template = template
