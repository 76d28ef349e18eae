"""Compiles kernels for cards that are not there. What they take on chip, the compiler tells without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton

from hf_batchllm.kernels import cards

REGISTERS = 64 << 10  # of a multiprocessor, on every card since 2012
THREADS = {(8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}  # of a multiprocessor


Target = cards.Capability | str  # of NVIDIA's; or "gfx942", AMD's MI300
TARGETS: list[Target] = [*cards.CARDS, "gfx942"]


def named(target: Target) -> str:
    return target if isinstance(target, str) else f"{target[0]}.{target[1]}"


def card_of(target: Target) -> cards.Card:
    return cards.INSTINCT if isinstance(target, str) else cards.card_of(target)


@dataclass(frozen=True)
class Compiled:
    kernel: str
    target: Target
    warps: int
    shared: int  # bytes of a block
    registers: int  # of a thread
    spilled: int  # bytes of a thread: what it keeps in slow memory, for want of registers
    code: str  # PTX, or AMD's assembly

    @property
    def blocks(self) -> int | None:
        """Blocks that a multiprocessor has room for at once; None where nobody has worked it out."""
        if isinstance(self.target, str):
            return None
        threads = 32 * self.warps
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * threads)
        by_memory = card_of(self.target).multiprocessor_memory // (self.shared + 1024)
        return min(by_registers, by_memory, THREADS[self.target] // threads, 32)


@contextmanager
def compiled_for(target: Target) -> Iterator[list[Compiled]]:
    """What is launched inside is compiled for such a card, and is not run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.runtime import jit

    amd = isinstance(target, str)
    number = target if isinstance(target, str) else target[0] * 10 + target[1]
    gpu = GPUTarget("hip", number, 64) if amd else GPUTarget("cuda", number, 32)
    backend = make_backend(gpu)
    made: list[Compiled] = []

    def compile_it(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        find = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, kinds, rest = find(*given, **options)
        chosen, signature, constants, attributes = self._pack_args(backend, options, bound, kinds, rest)
        kind = GluonASTSource if isinstance(self, GluonJITFunction) else ASTSource
        source = kind(self, signature, constants, attributes)
        done = triton.compile(source, target=gpu, options=chosen.__dict__)
        code = done.asm["amdgcn" if amd else "ptx"]
        used = _registers_of_amd(code) if amd else _registers(done.asm["cubin"])
        made.append(Compiled(self.fn.__name__, target, done.metadata.num_warps, done.metadata.shared, *used, code))

    with pytest.MonkeyPatch.context() as patch:
        if amd:
            patch.setattr(torch.version, "hip", "7.0")
        else:
            patch.setenv("TRITON_OVERRIDE_ARCH", f"sm{number}")
        patch.setattr(jit.JITFunction, "run", compile_it)
        cards.card_on.cache_clear()
        yield made
    cards.card_on.cache_clear()


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, where what does not fit into registers is kept."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def _registers_of_amd(code: str) -> tuple[int, int]:
    found = [re.search(rf"\.{field}:\s*(\d+)", code) for field in ("vgpr_count", "private_segment_fixed_size")]
    assert found[0] and found[1]
    return int(found[0][1]), int(found[1][1])
