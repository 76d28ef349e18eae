"""transformers' tables for stop strings, made in a fraction of the time.

transformers decodes each token of the vocabulary by itself, and compares it with a string at every offset: seconds for
262,000 tokens, for each new string. Here the decoded tokens of a tokenizer are kept, and only tokens that can overlap
with a string are compared with it. The tables are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

Text = str | bytes  # bytes where tokens may hold parts of a letter


class DecodedVocabulary:
    """What each token of a tokenizer adds to a text."""

    def __init__(self, tokenizer: Any) -> None:
        mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        cleaned = StopStringCriteria.clean_tokenizer_vocab(_quick(tokenizer), stop_string_matching_mode=mode)
        self.texts: tuple[Text, ...] = cleaned[0]
        self.ids = np.array(cleaned[1], dtype=np.int64)  # [tokens]
        self.lengths = np.fromiter(map(len, self.texts), dtype=np.int32, count=len(self.texts))  # [tokens]

    def overlapping(self, strings: tuple[Text, ...]) -> list[int]:
        """The places of the tokens that can hold a part of a string. An empty one fits everywhere."""
        begins: Any = tuple(each[:size] for each in strings for size in range(1, len(each) + 1))
        ends: Any = tuple(each[-size:] for each in strings for size in range(1, len(each) + 1))
        whole: Any = strings
        found: list[int] = []
        text: Any
        for place, text in enumerate(self.texts):
            if text.endswith(begins) or text.startswith(ends):
                found.append(place)
                continue
            for each in whole:
                if text in each or each in text:
                    found.append(place)
                    break
        return found


class QuickStopStrings(StopStringCriteria):
    """StopStringCriteria whose tables come from a vocabulary that is decoded already."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...], vocabulary: DecodedVocabulary) -> None:
        self._vocabulary = vocabulary
        # transformers would make lists of the whole vocabulary, which are not needed here.
        of_tokenizer = SimpleNamespace(backend_tokenizer=getattr(tokenizer, "backend_tokenizer", None), get_vocab=dict)
        stand_in: Any = of_tokenizer
        super().__init__(stand_in, list(strings))
        del self._vocabulary  # these criteria are kept, for many strings

    def clean_and_embed_tokens_with_cache(
        self, token_list: Any, token_indices: Any, tokenizer: Any
    ) -> tuple[torch.Tensor, int, int]:
        vocabulary, strings = self._vocabulary, self._stop_strings_for_matching
        places = vocabulary.overlapping(strings)
        texts, ids = tuple(vocabulary.texts[place] for place in places), tuple(vocabulary.ids[places].tolist())
        # Without any token transformers has no table to make, and its own error does not come.
        if not places:
            texts, ids = vocabulary.texts[:1], tuple(vocabulary.ids[:1].tolist())
        made: Any = self._stop_string_create_embedding_vec(texts, ids, strings)
        few, positions, ends = made
        # The others match nothing; the last row is for tokens outside of the vocabulary.
        table = few.new_full((int(vocabulary.ids.max()) + 2, few.shape[1]), -1)
        table[: len(few)] = few
        table[torch.from_numpy(vocabulary.ids), -1] = torch.from_numpy(vocabulary.lengths)
        return table, positions, ends


def _quick(tokenizer: Any) -> Any:
    """Decodes as the tokenizer does, without its work around each token."""
    own = getattr(type(tokenizer), "convert_tokens_to_string", None)
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None or own is not PreTrainedTokenizerFast.convert_tokens_to_string:
        return tokenizer
    if "convert_tokens_to_string" in vars(tokenizer):
        return tokenizer
    return _Decoding(tokenizer, decoder)


class _Decoding:
    def __init__(self, tokenizer: Any, decoder: Any) -> None:
        self._tokenizer = tokenizer
        self.convert_tokens_to_string = decoder.decode

    def get_vocab(self) -> Mapping[str, int]:
        vocabulary: Mapping[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def _convert_id_to_token(self, token: int) -> str:
        text: str = self._tokenizer._convert_id_to_token(token)
        return text

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)
