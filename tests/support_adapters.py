"""Models with real PEFT adapters, and what ``generate`` makes of each prompt alone with one of them."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from support_families import FAMILIES, gaps, random_prompts, reference_steps
from support_parity import NEAR_TIE
from support_peft_version import skip_where_transformers_refuses_peft

from hf_batchllm import BatchConfig, BatchGenerator, BatchResult

peft = pytest.importorskip("peft")

NEW_TOKENS = 6
PAGES = {"page_size": 8, "min_shared_tokens": 4}
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Name = str | None


def prompts(count: int = 6, seed: int = 4, kind: str = "mixed") -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, kind, count)[:count]


def lora(targets: Sequence[str] = ("q_proj", "v_proj"), **more: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), init_lora_weights=False, **more)


def wrapped(first: Any, second: Any = None, family: str = "llama", **more: Any) -> Any:
    """A PeftModel with the adapters "a", which is active, and "b"; one that a test may change."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(11)
        model = peft.get_peft_model(FAMILIES[family](), first, adapter_name="a", **more)
        model.add_adapter("b", first if second is None else second)
        for name, parameter in model.named_parameters():
            if ".a" in name or ".b" in name:  # some kinds begin with what changes nothing
                parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def of_transformers() -> Any:
    """transformers' own way to put adapters into a model."""
    skip_where_transformers_refuses_peft()
    model: Any = FAMILIES["llama"]()
    with torch.random.fork_rng():
        torch.manual_seed(12)
        model.add_adapter(lora(modules_to_save=["lm_head"]), adapter_name="a")
        model.add_adapter(lora(["gate_proj"], modules_to_save=["lm_head"]), adapter_name="b")
        model.set_adapter("a")
    return model.eval()


def injected() -> Any:
    """A model in which nothing but its layers says that there are adapters."""
    return wrapped(lora(), lora(["o_proj"])).get_base_model()


MODELS: dict[str, Any] = {
    "lora": lambda: wrapped(lora(), lora(["gate_proj", "o_proj"])),
    "everywhere": lambda: wrapped(lora([*EVERY, "lm_head", "embed_tokens"]), lora(EVERY, use_dora=True)),
    "saved": lambda: wrapped(lora(modules_to_save=["lm_head", "norm"]), lora(["k_proj"], use_rslora=True)),
    "tokens": lambda: wrapped(lora(trainable_token_indices=[1, 5, 9]), lora(["k_proj"])),
    "transformers": of_transformers,
    "injected": injected,
    "mixed": lambda: wrapped(lora(), peft.LoHaConfig(r=4, target_modules=["k_proj"]), mixed=True),
    "loha": lambda: wrapped(
        peft.LoHaConfig(r=4, target_modules=["q_proj", "up_proj"]), peft.LoHaConfig(r=4, target_modules=["v_proj"])
    ),
    "ia3": lambda: wrapped(
        peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        )
    ),
    "qwen3": lambda: wrapped(lora(), lora(["gate_proj", "o_proj"]), family="qwen3"),
    "gemma2": lambda: wrapped(lora(), lora(["gate_proj", "o_proj"]), family="gemma2"),
}


_INTO_STATES = "in_proj in_proj_qkv in_proj_qkvz q_proj f_proj f_a_proj a_proj".split()
_AND_OUT = "in_proj in_proj_ba in_proj_a in_proj_z b_proj o_proj down_proj w2 output_linear".split()


def carrying(family: str) -> Any:
    """A model of layers that carry a state, with adapters on what goes into it, and on what comes of it."""
    there = {name.rsplit(".", 1)[-1] for name, _ in FAMILIES[family]().named_modules()}
    first, second = ([name for name in names if name in there] for names in (_INTO_STATES, _AND_OUT))
    return wrapped(lora(first), lora(second), family=family)


@cache
def build(kind: str) -> Any:
    """Of ``MODELS``, or of ``CARRYING``. The same object at every call: leave it as you found it."""
    return MODELS[kind]() if kind in MODELS else carrying(kind)


@cache
def _reference(kind: str) -> Any:
    return copy.deepcopy(build(kind))


@contextmanager
def having(model: Any, name: Name) -> Iterator[None]:
    """As its user would have it run with an adapter, or without any."""
    if name is not None:
        if hasattr(model, "disable_adapter"):
            model.set_adapter(name)
        else:
            peft.functional.set_adapter(model, name)
        yield
    elif hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            yield
    else:
        layers = [each for each in model.modules() if isinstance(each, peft.tuners.tuners_utils.BaseTunerLayer)]
        layers += [each for each in model.modules() if isinstance(each, peft.utils.ModulesToSaveWrapper)]
        for layer in layers:
            layer.enable_adapters(False)
        yield
        for layer in layers:
            layer.enable_adapters(True)


@cache
def reference(kind: str, name: Name, prompt: tuple[int, ...], new_tokens: int) -> tuple[list[int], int]:
    """What ``generate`` gives for one prompt, and how many of its tokens are not decided by rounding."""
    with having(_reference(kind), name):
        tokens, logits = reference_steps(_reference(kind), prompt, max_new_tokens=new_tokens)
    close = (gaps(logits) < NEAR_TIE).nonzero()
    return tokens, int(close[0]) if len(close) else len(tokens)


def assert_each(
    kind: str,
    given: Sequence[Sequence[int]],
    names: Sequence[Name],
    result: BatchResult,
    new_tokens: int = NEW_TOKENS,
) -> None:
    """Every row is what ``generate`` gives for its prompt alone, with its adapter."""
    assert len(result) == len(given) == len(names)
    whole = 0
    for index, (prompt, name, generation) in enumerate(zip(given, names, result, strict=True)):
        assert generation.index == index and generation.prompt_token_ids == list(prompt)
        expected, sure = reference(kind, name, tuple(prompt), new_tokens)
        assert generation.token_ids[:sure] == expected[:sure], f"{kind}: prompt {index}, adapter {name}"
        whole += generation.token_ids == expected
    assert whole >= 0.8 * len(given), f"{kind}: too many near ties to prove anything"


def assert_adapters_matter(kind: str, given: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> None:
    a, b, none = ([reference(kind, name, tuple(each), new_tokens)[0] for each in given] for name in ("a", "b", None))
    assert a != b and b != none and none != a


def thrice(given: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[Name]]:
    """Every prompt with both adapters, and without."""
    both = [(list(prompt), name) for prompt in given for name in ("b", None, "a")]
    return [prompt for prompt, _ in both], [name for _, name in both]


def generate(kind: str, given: Any, adapter: Any, config: BatchConfig | None = None, **options: Any) -> BatchResult:
    generator = BatchGenerator(build(kind), config=config or BatchConfig(**PAGES))
    return generator.generate(given, adapter=adapter, progress=False, **{"max_new_tokens": NEW_TOKENS, **options})
