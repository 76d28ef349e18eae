"""Recognises a model and its tokenizer: those that a run was begun with, or those that another process has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from ...inputs.base_model import base_model
from ...inputs.plain_values import plain
from ...patches.adapter_swap import adapted_layers
from ...patches.sharded_modules import local
from .weights_digest import has_kernel, number_of, parts_of

_WRAPPED = ("base_layer", "original_module")  # what PEFT's layers call the model's own
# Fields of configs without effect on answers, or that say where a model comes from and what has saved it.
_IDLE = frozenset(
    [
        *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict"),
        *("cache_implementation", "cache_config", "compile_config", "disable_compile"),
        *("output_attentions", "output_hidden_states", "name_or_path", "tokenizer_file", "vocab_file"),
    ]
)


def fingerprint(
    model: nn.Module, tokenizer: Any = None, of_all: Callable[[int], list[int]] | None = None
) -> dict[str, str]:
    """A digest of each thing that answers depend on: of every byte of weights, adapters and buffers, and of the rest.

    They are the same in every process, on every device, and when the model is saved and loaded again. Where processes
    have a model together, they also depend on the number of these.

    tokenizer: a processor, too. Without one, nothing is said about it.
    of_all: from this process's number to those of all that have the model together, each of which must ask.
    """
    inner = base_model(model)
    layers = adapted_layers(model)
    own = {id(each) for each in inner.parameters()} - {id(each) for layer in layers for each in layer.parameters()}
    own |= {id(each) for layer in layers for name in _WRAPPED for each in _parameters_of(layer._modules.get(name))}
    said = {
        "weights": _of_tensors(each for each in inner.named_parameters() if id(each[1]) in own),
        "adapters": _of_tensors(each for each in model.named_parameters() if id(each[1]) not in own),
        "buffers": _of_tensors(_lasting_buffers(inner)),
    }
    if of_all is not None:
        said = {name: _of_parts(of_all(number)) for name, number in said.items()}
    digests = {name: f"{number & (1 << 64) - 1:016x}" for name, number in said.items()}
    digests["adapters"] = _of_values([digests["adapters"], [getattr(layer, "scaling", None) for layer in layers]])
    digests["config"] = _of_values(inner.config.to_diff_dict())
    generation = inner.generation_config
    digests["generation config"] = _of_values(None if generation is None else generation.to_diff_dict())
    if tokenizer is not None:
        digests |= _of_tokenizer(tokenizer)
    return digests


def digests_of_whole(model: nn.Module) -> dict[str, int]:
    """Digests of the weights and buffers that this process has the whole of."""
    inner = base_model(model)
    each: dict[str, Iterable[tuple[str, torch.Tensor]]]
    each = {"weights": inner.named_parameters(), "buffers": _lasting_buffers(inner)}
    return {name: _of_tensors(pair for pair in some if local(pair[1]) is pair[1]) for name, some in each.items()}


def _of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    checksum = hashlib.blake2b(digest_size=8)
    by_kernel = cache(has_kernel)
    numbers: list[torch.Tensor] = []
    with torch.no_grad():
        for name, tensor in sorted(((_unwrapped(name), each) for name, each in named), key=lambda each: each[0]):
            checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            parts = [part.contiguous() for part in parts_of(tensor) if part.numel()]
            numbers += [number_of(part, by_kernel(part.device)) for part in parts]
    for number in numbers:  # a GPU has all of them to do before it is waited for
        checksum.update(int(number).to_bytes(8, "little", signed=True))
    return int.from_bytes(checksum.digest(), "little", signed=True)


def _unwrapped(name: str) -> str:
    """The name without what PEFT and ``torch.compile`` put around modules."""
    return ".".join(each for each in name.split(".") if each not in (*_WRAPPED, "_orig_mod"))


def _parameters_of(module: nn.Module | None) -> Iterable[nn.Parameter]:
    return () if module is None else module.parameters()


def _of_parts(each: list[int]) -> int:
    """Each process has a part of the weights."""
    return int.from_bytes(hashlib.blake2b(repr(each).encode(), digest_size=8).digest(), "little", signed=True)


def _lasting_buffers(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """All but those that a RoPE whose frequencies depend on the length writes anew while it runs.

    Those that are computed and not loaded are rounded: their last bits depend on the processor.
    """
    for place, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        written = any("dynamic" in str(kind) or kind == "longrope" for kind in _each(kinds))
        for name, tensor in module.named_buffers(recurse=False):
            if written and name.endswith("inv_freq"):
                continue
            computed = name in module._non_persistent_buffers_set and tensor.is_floating_point()
            yield f"{place}.{name}", tensor.to(torch.bfloat16) if computed else tensor


def _each(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else [value]


def _of_values(value: Any) -> str:
    return hashlib.blake2b(repr(plain(_lasting(value))).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _lasting(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(name): each for name, each in value.items()}
        return {name: _lasting(each) for name, each in kept.items() if name not in _IDLE and not name.startswith("_")}
    return [_lasting(each) for each in value] if isinstance(value, list | tuple) else value


def _of_tokenizer(given: Any) -> dict[str, str]:
    """What changes no prompt is left out: padding, its token, and truncation, which calls set anew."""
    inner = getattr(given, "tokenizer", given)  # of a processor
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()
        made_of: list[Any] = [text[text.index('"added_tokens"') :]]  # padding and truncation stand before it
    else:
        made_of = [inner.get_vocab() if hasattr(inner, "get_vocab") else None, getattr(inner, "init_kwargs", None)]
    made_of += [
        type(inner).__name__,
        {name: each for name, each in getattr(inner, "special_tokens_map", {}).items() if name != "pad_token"},
        *(getattr(inner, name, None) for name in ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")),
        given.to_dict() if inner is not given and hasattr(given, "to_dict") else None,
    ]
    templates = [getattr(each, "chat_template", None) for each in (given, inner)]
    return {"tokenizer": _of_values(made_of), "chat template": _of_values(templates)}
