"""The tensors behind the page table."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import torch
from torch import nn

from hf_batchllm.model.attention.kv_storage import KVStorage


def test_what_pages_are_read_by_goes_with_them() -> None:
    """It holds the tensors: kept any longer it would keep a whole cache alive."""
    layer = nn.Identity()
    for change in (lambda storage: storage.grow(8), lambda storage: storage.keep_only([1]), KVStorage.release):
        storage = KVStorage(4, 2)
        states = torch.zeros(1, 1, 3)
        old = weakref.ref(storage.of(layer, states, states)[0])
        made: list[torch.Tensor] = []
        pages = storage.paged(layer, lambda pages, made=made: made.append(pages) or SimpleNamespace(base=pages))
        assert [tuple(page.shape) for page in made] == [(4, 2, 1, 3)] * 2
        assert storage.paged(layer, made.append) is pages, "made once"
        del pages
        made.clear()
        change(storage)
        gc.collect()
        assert old() is None
        storage.of(layer, states, states)
        storage.paged(layer, made.append)
        assert len(made) == 2, "made anew"
