"""The model and the prompts: shapes of well-known models, and lists that share prefixes, or whose lengths are mixed."""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

Tokens = list[list[int]]  # of each prompt, or of each answer

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip


def shape(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """The fields of a config. ``sizes``: in the order of _SIZES."""
    return {"model_type": model_type, **dict(zip(_SIZES, sizes, strict=True)), **more}


SHAPES = {
    "tiny": shape("llama", 4096, 128, 512, 4, 4, 2, 32768),
    "llama-8b": shape("llama", 128256, 4096, 14336, 32, 32, 8, 131072, head_dim=128, rope_theta=5e5),
    "qwen3-8b": shape("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128, rope_theta=1e6),
    "qwen3-0.6b": shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, head_dim=128, rope_theta=1e6,
                        tie_word_embeddings=True),
    "qwen3-30b-a3b": shape("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 40960, head_dim=128, rope_theta=1e6,
                           moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
    "gpt-oss-20b": shape("gpt_oss", 201088, 2880, 2880, 24, 64, 8, 131072, head_dim=64, sliding_window=128,
                         num_local_experts=32, num_experts_per_tok=4),
    "mixtral-8x7b": shape("mixtral", 32000, 4096, 14336, 32, 32, 8, 32768, head_dim=128, rope_theta=1e6,
                          num_local_experts=8, num_experts_per_tok=2),
    "qwen3.5-9b": shape("qwen3_5_text", 248320, 4096, 12288, 32, 16, 4, 262144, head_dim=256, linear_num_key_heads=16,
                        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
                        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8),
    "granite-4-h-small": shape("granitemoehybrid", 100352, 4096, 768, 40, 32, 8, 131072, num_local_experts=72,
                               num_experts_per_tok=10, shared_intermediate_size=1536, mamba_n_heads=128,
                               mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_expand=2,
                               layer_types=([*["linear_attention"] * 5, "full_attention"]
                                            + ["linear_attention"] * 4) * 4, tie_word_embeddings=True),
}  # fmt: skip


def known_config(name: str) -> str:
    """``name``, if it is one of SHAPES or a file: the type of --config."""
    if name not in SHAPES and not Path(name).exists():
        raise argparse.ArgumentTypeError(f"{name!r} is neither one of {', '.join(SHAPES)} nor a file")
    return name


def random_model(config: Any, device: torch.device, dtype: torch.dtype, seed: int = 0, auto: Any = None) -> Any:
    """Random weights, drawn on the device: on a CPU eight billion of them take long. No token ends an answer."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = (auto or AutoModelForCausalLM).from_config(config, dtype=dtype)
    return _ready(model)


def load_model(model: str | None, config: str, device: torch.device, dtype: torch.dtype) -> Any:
    """``model``: a folder or a name on the hub; if None, ``config`` with random weights."""
    if model is None:
        known = AutoConfig.for_model(**SHAPES[config]) if config in SHAPES else AutoConfig.from_pretrained(config)
        return random_model(known, device, dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return _ready(loaded.to(device))


def _ready(model: Any) -> Any:
    model.config._name_or_path = ""  # so that no tokenizer is found: nobody reads the text of the answers
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.eval()


def words_of(model: Any) -> int:
    """The number of token ids that a model knows."""
    return int(model.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class PromptGroup:
    """The lengths of prompts that share a prefix."""

    shared: int
    own: Sequence[int]  # [members]  tokens after the prefix
    new: Sequence[int]  # [members]  tokens of the answer


@dataclass(frozen=True)
class Workload:
    """Prompts in groups of ``degree``, whose text differs from group to group. ``kind`` says how long they are.

    rfc: a group shares ``shared`` tokens, and each prompt has ``own`` more and ``new`` to generate (vLLM's RFC #12080).
    sharegpt: nothing is shared, and lengths are as in people's chats, up to ``own`` and ``new``.
    mixed: ``shared`` and ``own`` are medians, ``new`` is the longest answer, of which the median answer is a tenth.
    """

    requests: int
    shared: int
    own: int
    new: int
    degree: int
    shuffle: bool = True
    seed: int = 0
    kind: str = "rfc"

    def __post_init__(self) -> None:
        for name in ("requests", "shared", "own", "new", "degree"):
            least = int(name != "shared" or self.kind == "mixed")
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}")

    @cached_property
    def groups(self) -> list[PromptGroup]:
        dice, found = random.Random(self.seed), []

        def draw(median: float, spread: float, least: float = 0, most: float = math.inf) -> float:
            return min(max(dice.lognormvariate(math.log(median), spread), least), most)

        for begin in range(0, self.requests, self.degree):
            size = min(self.degree, self.requests - begin)
            shared, own, new = self.shared, [self.own] * size, [self.new] * size
            if self.kind == "sharegpt":  # up to 2,048 the means are about 220 and 200
                own = [round(draw(100 * self.own / 2048, 1.3, 4, self.own))]
                new = [round(draw(112 * self.new / 2048, 1.1, 4, self.new))]
            elif self.kind == "mixed":  # together, the spreads between groups and within them are those of chats
                shared = round(draw(self.shared, 0.5))
                medians = draw(self.own, 0.5), draw(self.new / 10, 0.8)
                for at in range(size):
                    new[at], own[at] = round(draw(medians[1], 0.8, 10, self.new)), round(draw(medians[0], 0.5, 1))
            found.append(PromptGroup(shared, own, new))
        return found

    def _in_order(self, grouped: Sequence[Any]) -> list[Any]:
        """From group by group to the order in which prompts are passed in."""
        order = list(range(self.requests))
        if self.shuffle and self.kind != "sharegpt":
            random.Random(self.seed + 1).shuffle(order)
        return [grouped[place] for place in order]

    @property
    def answers(self) -> list[int]:
        """How many tokens each prompt gets, in the order of ``prompts``."""
        return self._in_order([count for group in self.groups for count in group.new])

    def prompts(self, vocabulary: int) -> Tokens:
        dice = random.Random(self.seed + ("rfc", "sharegpt", "mixed").index(self.kind))
        lowest = min(1000, vocabulary // 10)  # the lowest ids are mostly special tokens and bytes

        def text(length: int) -> list[int]:
            return [dice.randrange(lowest, vocabulary) for _ in range(length)]

        prompts: Tokens = []
        for group in self.groups:
            prefix = text(group.shared)
            prompts += [prefix + text(own) for own in group.own]
        return self._in_order(prompts)

    def first(self, requests: int) -> Workload:
        """The first prompts of it, in whole groups as far as possible: for rivals that would take too long."""
        return replace(self, requests=min(requests, self.requests))

    def __str__(self) -> str:
        def spread(lengths: Sequence[int]) -> str:
            least, most = min(lengths), max(lengths)
            return f"{least:,}" if least == most else f"{least:,} to {most:,} (mean {statistics.mean(lengths):,.0f})"

        own, new = (spread([each for group in self.groups for each in getattr(group, name)]) for name in ("own", "new"))
        text = f"{self.requests:,} prompts of {own} tokens, nothing shared"
        if self.shared:
            prefixes = f"{len(self.groups):,} prefix{'es' * (len(self.groups) > 1)} of "
            text = f"{self.requests:,} prompts, {'shuffled' if self.shuffle else 'sorted'}: {prefixes}"
            text += f"{spread([group.shared for group in self.groups])} tokens, each shared by "
            text += f"{min(self.degree, self.requests):,}; {own} tokens of their own"
        return f"{text}; {new} new tokens, EOS ignored"
