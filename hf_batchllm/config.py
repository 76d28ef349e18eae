"""BatchConfig: every knob of the engine, validated early, with advice on when to change it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import ConfigError
from .wording import a_kind, did_you_mean, either, is_whole, shown

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# Names of vLLM that its scripts have most, and options that belong to generate(): what to do instead.
_NO_BATCH_SIZE = "is not needed: the batch is as large as memory allows (see `kv_memory` and `max_batch_tokens`)"
_OF_THE_MODEL = (
    "is not an option here: the model runs on its own device, in its own dtype. Set it when you load the model"
)
_PARTS = "is not an option here: GeneratorPool(name, gpus=8, tp=2) has each model on two GPUs (docs/larger-models.md)"
_POOL = "is not an option here: GeneratorPool(model, gpus=N) runs one list of prompts on several GPUs"
_FROM_ELSEWHERE = {
    "gpu_memory_utilization": "is called `kv_memory` here: a fraction of the memory that is free",
    "mem_fraction_static": "is called `kv_memory` here: a fraction of the memory that is free",
    "max_num_batched_tokens": "is called `max_batch_tokens` here",
    "block_size": "is called `page_size` here",
    "enable_prefix_caching": "is called `share_prefixes` here (and `keep_prefixes` from one call to the next)",
    "enforce_eager": "is called `cuda_graphs=False` here",
    "batch_size": _NO_BATCH_SIZE,
    "max_num_seqs": _NO_BATCH_SIZE,
    **dict.fromkeys(("device", "device_map", "dtype", "torch_dtype", "quantization", "kv_cache_dtype"), _OF_THE_MODEL),
    "max_model_len": "is not an option here: `max_prompt_tokens` of generate() cuts long prompts, and a warning names "
    "the prompts that go beyond the model's context",
    **dict.fromkeys(("tensor_parallel_size", "tp"), _PARTS),
    **dict.fromkeys(("data_parallel_size", "gpus"), _POOL),
    "attn_implementation": "is not an option here: attention is this library's own (see `backend`)",
    **dict.fromkeys(
        "generation_config seed progress on_error max_new_tokens max_tokens do_sample temperature stop_strings".split(),
        "goes into generate(), with the prompts",
    ),
}
C = TypeVar("C")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*")


def _refuses_other_fields(config: type[C]) -> type[C]:
    """A wrong field's name gets the same words from the class as from ``BatchGenerator``, instead of a TypeError."""
    made: Any = config.__init__

    @functools.wraps(made)
    def checked(self: Any, *values: Any, **fields: Any) -> None:
        _check_names(type(self), fields)
        made(self, *values, **fields)

    checked.__signature__ = inspect.signature(made)  # type: ignore[attr-defined]
    config.__init__ = checked  # type: ignore[method-assign]
    return config


@_refuses_other_fields
@dataclass(frozen=True)
class BatchConfig:
    """How the engine runs. The defaults suit nearly everybody.

    page_size: tokens in a page of the KV cache. Smaller wastes less memory on ragged ends, larger means
        fewer pages to handle. Leave it at 64, the tile of the GPU kernels, unless memory is very tight.
    max_batch_tokens: most tokens in one step of the model. Lower it when a step's activations do not fit.
        None: 512 on a CPU; on a GPU 8,192, and up to 32,768 for small models where there is plenty of memory.
    kv_memory: memory for the KV cache: bytes, a string such as "20GiB", or a fraction (0 to 1) of the memory
        that is free. Lower it to leave room for other programs. None: half of the free memory on a CPU; on a GPU, what
        the model and its largest step leave. Where no step can be tried beforehand (models with hooks or in training
        mode, attention in plain PyTorch) it is nine tenths of the free memory. The cache is never larger than the
        list of prompts can use.
    share_prefixes: compute shared prefixes once. Turn off only to measure what sharing saves.
    min_shared_tokens: the fewest tokens that a shared prefix must save to be computed separately. Raise it when
        there are many tiny groups.
    scheduler: "groups" (fills memory, sharers side by side) or "fifo" (in the order given, never preempts). In Python
        also an object with the methods of ``hf_batchllm.BaseScheduler``.
    steps_per_sync: how many steps are launched before the host waits for tokens. On a GPU decode steps are launched in
        bursts of half as many: the host prepares the next burst while one runs. Lower it where answers are short and
        stop early: steps beyond an end are wasted (the report counts them); 1 to debug. None: up to 32 on a GPU,
        fewer for a large model; 1 on a CPU. Results are the same. Sampling on a CPU waits for each step, and so does
        a scheduler that does not run ahead.
    cuda_graphs: replay decode steps on a GPU as graphs. Turn off to debug. Results are the same.
    fuse: use fused kernels where the model's structure allows. Turn off to debug.
    keep_prefixes: how many shared prefixes stay in the cache for the next call; the least recently used is dropped
        first. Set it when several calls in a row use the same documents. They are dropped when the model was changed
        between two calls: its weights, modules, mode or config. Change it between calls, not during one. None are kept
        of a model that runs code or hooks of your own: what these compute may change without a trace.
    backend: "torch" or "triton" attention; "auto" takes the best one for the device.
    invariant: the same answer to a prompt, to the last bit, whatever else is in the list: alone, in any order, with
        shared prefixes or without, in steps of any size. Set it for evaluations, caches and RL, where answers must not
        depend on their neighbours. It costs a few percent on a GPU, and more on a CPU.
    """

    page_size: int = 64
    max_batch_tokens: int | None = None
    kv_memory: int | float | str | None = None
    share_prefixes: bool = True
    min_shared_tokens: int = 32
    scheduler: Any = "groups"
    steps_per_sync: int | None = None
    cuda_graphs: bool = True
    fuse: bool = True
    keep_prefixes: int = 0
    backend: str = "auto"
    invariant: bool = False

    def __post_init__(self) -> None:
        _whole(self, "page_size", 1)
        _whole(self, "max_batch_tokens", 1, optional=True)
        _whole(self, "min_shared_tokens", 0)
        _whole(self, "steps_per_sync", 1, optional=True)
        _whole(self, "keep_prefixes", 0)
        for name in ("share_prefixes", "cuda_graphs", "fuse", "invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"`{name}` must be True or False, not {shown(getattr(self, name))}")
        self.kv_bytes(free=1 << 40)  # only to check the value now
        if isinstance(self.scheduler, str):
            _choice(self, "scheduler", ("groups", "fifo"))
        elif isinstance(self.scheduler, type):
            name = self.scheduler.__name__
            raise ConfigError(f"`scheduler` is the class {name}: pass an object of it, {name}()")
        elif not all(callable(getattr(self.scheduler, name, None)) for name in ("start", "next", "finish")):
            raise ConfigError(
                f'`scheduler` must be "groups", "fifo" or an object with start(), next() and finish() '
                f"(see hf_batchllm.BaseScheduler), not {shown(self.scheduler)}"
            )
        _choice(self, "backend", ("auto", "torch", "triton"))

    @classmethod
    def of(cls, config: BatchConfig | None, fields: dict[str, Any], called: str = "config") -> BatchConfig:
        """``config``, or the defaults, with ``fields`` replaced. ``called``: the name of ``config`` in errors."""
        if config is not None and not isinstance(config, cls):
            hint = f": pass BatchConfig(**{called}), or the fields by name" if isinstance(config, dict) else ""
            raise ConfigError(f"`{called}` must be a BatchConfig, not {a_kind(config)}{hint}")
        _check_names(cls, fields)
        return dataclasses.replace(config or cls(), **fields)

    def kv_bytes(self, free: int) -> int | None:
        """``kv_memory`` in bytes where ``free`` bytes are free; None if it was not set."""
        size = self.kv_memory
        if size is None:
            return None
        if isinstance(size, str):
            found = _SIZE.fullmatch(size)
            unit = _UNITS.get(found.group(2).upper()) if found else None
            if found is None or unit is None:
                part = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", size)
                hint = f": for a part of the free memory pass {float(part[1]) / 100:g}" if part else ""
                raise ConfigError(f'`kv_memory` must be a size such as "20GiB" or "500MB", not {shown(size)}{hint}')
            size = int(float(found.group(1)) * unit)
        elif isinstance(size, float):
            if not 0.0 < size <= 1.0:
                raise ConfigError(
                    f"`kv_memory` as a float is a fraction of the free memory, from 0 to 1, not {size!r}: "
                    'for bytes pass an int, or a string such as "20GiB"'
                )
            size = int(size * free)
        elif not is_whole(size):
            raise ConfigError(
                f'`kv_memory` must be bytes, a string such as "20GiB" or a fraction such as 0.5, not {shown(size)}'
            )
        if size <= 0:
            raise ConfigError(f"`kv_memory` must be more than 0, not {self.kv_memory!r}")
        if is_whole(self.kv_memory) and 1 < size <= 100:  # 1 is refused where memory is counted
            raise ConfigError(
                f"`kv_memory` is {size} bytes: if it is a percentage of the free memory pass {size / 100:g}, and for "
                'bytes a string such as "20GiB"'
            )
        return int(size)


def elsewhere(name: str) -> str | None:
    """What to do instead of an option that engines like this one have, in words that follow its name."""
    return _FROM_ELSEWHERE.get(name)


def _check_names(config: type[BatchConfig], fields: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(config)]
    wrong = {name: _unknown_field(name, names) for name in fields if name not in names}
    if wrong:  # all at once; the list of fields at the end of the last of them is enough
        every = f"; the fields are {', '.join(names)}"
        listed = "\n".join(f"`{name}` {why.removesuffix(every)}" for name, why in wrong.items())
        raise ConfigError(listed + (every if any(why.endswith(every) for why in wrong.values()) else ""))


def _unknown_field(name: str, names: list[str]) -> str:
    if name in _FROM_ELSEWHERE:
        return _FROM_ELSEWHERE[name]
    return "is not a field of BatchConfig" + did_you_mean(name, names, f"; the fields are {', '.join(names)}")


def _whole(config: BatchConfig, name: str, least: int, optional: bool = False) -> None:
    value = getattr(config, name)
    if value is None and optional:
        return
    if not is_whole(value) or value < least:
        none = " or None" if optional else ""
        raise ConfigError(f"`{name}` must be a whole number of at least {least}{none}, not {shown(value)}")
    object.__setattr__(config, name, int(value))  # NumPy's integers, too


def _choice(config: BatchConfig, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        hint = did_you_mean(str(value), choices, form='"{}"')
        quoted = [f'"{choice}"' for choice in choices]
        raise ConfigError(f"`{name}` must be {either(quoted)}, not {shown(value)}{hint}")
