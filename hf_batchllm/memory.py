"""How large the KV cache becomes, and what of it outlives a call."""

from __future__ import annotations

import psutil
import torch
from torch import nn

from .architecture import Architecture
from .cache import PagedCache
from .config import BatchConfig
from .errors import CacheMemoryError
from .storage import KVStorage, autocast_dtype

_DEFAULT_SHARE = {"cpu": 0.5}  # of the free memory
_OTHER_SHARE = 0.9


class CacheHome:
    """Owns the cache and its tensors: made for a call, dropped after it unless prefixes are kept in them."""

    def __init__(self, model: nn.Module, architecture: Architecture, config: BatchConfig) -> None:
        self._model = model
        self.architecture = architecture  # set anew by the generator before each call
        self._config = config
        self._fingerprint: object = None
        self.cache: PagedCache | None = None
        self.storage: KVStorage | None = None

    @property
    def page_bytes(self) -> int:
        return self.architecture.kv_bytes_per_token * self._config.page_size

    def open(self, pages_wanted: int) -> tuple[PagedCache, KVStorage]:
        """A cache for a call that could use ``pages_wanted`` pages beside those of kept prefixes."""
        if self.cache is not None and self._fingerprint != weights_fingerprint(self._model):
            self.cache.forget_kept()  # computed with other weights
            self.clear()
        if self.cache is None or self.storage is None:
            pages = min(pages_wanted, self._affordable())
            self.storage = KVStorage(pages, self._config.page_size)
            self.cache = PagedCache(pages, self._config.page_size, self._config.keep_prefixes)
        else:
            kept = self.cache.num_pages - self.cache.free_pages
            pages = min(pages_wanted + kept, self._affordable(self.storage.bytes))
            if pages > self.cache.num_pages:
                self.storage.grow(pages)  # first, as it may fail for want of memory
                self.cache.grow(pages)
        self.cache.start_counting()
        return self.cache, self.storage

    def settle(self) -> None:
        """A call has ended well: whatever holds no kept prefix goes."""
        if self.cache is None or self.storage is None or not self.cache.kept_prefixes:
            self.clear()
            return
        try:
            self.storage.keep_only(self.cache.compact())
            self._fingerprint = weights_fingerprint(self._model)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        if self.storage is not None:
            self.storage.release()
        self.cache = self.storage = None

    def _affordable(self, held: int = 0) -> int:
        """Pages that the memory allows, ``held`` bytes being ours already."""
        device = self.architecture.device
        free = held + free_memory(device)
        size = self._config.kv_bytes(free)
        if size is None:
            size = int(free * _DEFAULT_SHARE.get(device.type, _OTHER_SHARE))
        pages = size // self.page_bytes
        if pages == 0:
            raise CacheMemoryError(
                f"a single page of {self._config.page_size:,} tokens takes {self.page_bytes:,} bytes, and the KV cache "
                f"may have {size:,}: set a smaller `page_size`, or a larger `kv_memory`"
            )
        return pages


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def weights_fingerprint(model: nn.Module) -> object:
    """Changes when weights do (in place and behind PyTorch's back, too), when adapters are switched or scaled, and
    when autocast has keys and values computed in another dtype.

    Hooks are left out: most only watch, and what one does cannot be seen.
    """
    tensors = [*model.parameters(), *model.buffers()]
    # Writing through .data moves no version counter: what the weights add up to shows it.
    sums = [tensor.detach().sum(dtype=torch.float64) for tensor in tensors]
    identity = [(tensor.data_ptr(), None if tensor.is_inference() else tensor._version) for tensor in tensors]
    adapters = []
    for module in model.modules():
        if hasattr(module, "disable_adapters"):  # PEFT's layers
            fields = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
            adapters.append([str(getattr(module, name, None)) for name in fields])
    return identity, torch.stack(sums).tolist(), adapters, autocast_dtype(tensors[0].device)
