"""What the tests of the evaluation harness share: a tiny model, its tokenizer, and what the harness makes of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support_families import FAMILIES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_batchllm.lm_eval.model import BatchLM

TASKS = Path(__file__).parent / "support_lm_eval_tasks"
VOCABULARY = 400
SPECIAL = ["<pad>", "<bos>", "<eos>", "<turn>", "</think>"]
PAD, BOS, EOS, TURN, THINK = range(5)


@cache
def eval_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and some pairs of them: words take in the space before them, characters outside of ASCII are several."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted(TASKS.glob("*.jsonl"))]
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>" if bos else None, eos_token="<eos>", pad_token="<pad>"
    )


@cache
def eval_model(**options: Any) -> PreTrainedModel:
    """The same object for the same options: leave it as you found it."""
    family = FAMILIES["llama"]
    config = {**family.config, "vocab_size": VOCABULARY, "max_position_embeddings": 300, "eos_token_id": EOS}
    return dataclasses.replace(family, config=config, **options)()


def pair(bos: bool = True, model: Any = None, ours: dict[str, Any] | None = None, **given: Any) -> tuple[HFLM, BatchLM]:
    """The harness's own model, and this library's."""
    given = {"pretrained": eval_model() if model is None else model, "tokenizer": eval_tokenizer(bos), **given}
    return HFLM(**given), BatchLM(**given, **(ours or {}))


def instances(kind: str, arguments: Sequence[Any]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=place) for place, each in enumerate(arguments)]


def asked(lm: Any, kind: str, arguments: Sequence[Any]) -> list[Any]:
    return getattr(lm, kind)(instances(kind, arguments), disable_tqdm=True)
