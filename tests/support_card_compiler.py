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
import triton

from hf_batchllm.kernels import cards

REGISTERS = 64 << 10  # of a multiprocessor, on every card since 2012
THREADS = {(8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}  # of a multiprocessor


@dataclass(frozen=True)
class Compiled:
    kernel: str
    capability: tuple[int, int]
    warps: int
    shared: int  # bytes of a block
    registers: int  # of a thread
    spilled: int  # bytes of a thread: what it keeps in slow memory, for want of registers
    ptx: str

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has room for at once."""
        card, threads = cards.card_of(self.capability), 32 * self.warps
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * threads)
        by_memory = card.multiprocessor_memory // (self.shared + 1024)
        return min(by_registers, by_memory, THREADS[self.capability] // threads, 32)


@contextmanager
def compiled_for(capability: tuple[int, int]) -> Iterator[list[Compiled]]:
    """What is launched inside is compiled for such a card, and is not run."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.runtime import jit

    number = capability[0] * 10 + capability[1]
    target = GPUTarget("cuda", number, 32)
    backend = CUDABackend(target)
    made: list[Compiled] = []

    def compile_it(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        find = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, kinds, rest = find(*given, **options)
        chosen, signature, constants, attributes = self._pack_args(backend, options, bound, kinds, rest)
        kind = GluonASTSource if isinstance(self, GluonJITFunction) else ASTSource
        source = kind(self, signature, constants, attributes)
        code = triton.compile(source, target=target, options=chosen.__dict__)
        registers, spilled = _registers(code.asm["cubin"])
        made.append(
            Compiled(
                self.fn.__name__,
                capability,
                code.metadata.num_warps,
                code.metadata.shared,
                registers,
                spilled,
                code.asm["ptx"],
            )
        )

    with pytest.MonkeyPatch.context() as patch:
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
