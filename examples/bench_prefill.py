"""How fast prefill attention over paged caches is on this GPU, beside torch's own attention on plain tensors.

    python examples/bench_prefill.py                               # the four default batches
    python examples/bench_prefill.py 8x1024 4x2000+16x200 1x2048@6144
    python examples/bench_prefill.py --tiles 64,4,3 128,8,3        # tile, warps, stages

A batch is one prefill step of one layer: chunks x rows (4x2048), and for each, if wanted, members x rows that read
it as their prefix in the same step (4x2000+16x200), or the tokens computed in steps before (1x2048@6144). Only the
operations of the (row, key) pairs that causality needs count. Times are medians of replays of a CUDA graph that goes
over several caches in turn; pages lie scattered over the caches. Every configuration is checked before it is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_attention import PAGE, graph_ms  # beside this file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a source checkout needs no installation

from hf_batchllm.kernels import prefill_triton as pt
from hf_batchllm.kernels import work_lists as wl

DEFAULT = ["8x1024", "4x2048", "1x8192", "4x2000+16x200"]
TOLERANCE = 8e-3  # bfloat16 weights and output against float32
RIVALS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Batch:
    chunks: int
    rows: int
    members: int = 0  # of each chunk, which they read as their prefix
    member_rows: int = 0
    earlier: int = 0  # tokens below each chunk

    @classmethod
    def parse(cls, text: str) -> Batch:
        found = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+)x(\d+))?(?:@(\d+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not CHUNKSxROWS, with +MEMBERSxROWS or @EARLIER after it")
        return cls(*(int(group or 0) for group in found.groups()))

    def __str__(self) -> str:
        members = f"+{self.members}x{self.member_rows}" if self.members else ""
        return f"{self.chunks}x{self.rows}{members}" + (f"@{self.earlier}" if self.earlier else "")

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Of each chunk: its group, its rows and the position of its first one."""
        upper = self.earlier + self.rows
        first = [(group, self.rows, self.earlier) for group in range(self.chunks)]
        return first + [(group, self.member_rows, upper) for group in range(self.chunks) for _ in range(self.members)]

    @property
    def total_rows(self) -> int:
        return sum(rows for _, rows, _ in self.spans)

    @property
    def pairs(self) -> int:
        """(row, key) pairs."""
        return sum(rows * first + rows * (rows + 1) // 2 for _, rows, first in self.spans)

    def layout(self) -> tuple[wl.Chunks, int]:
        """What each chunk reads, and how many pages there are."""
        sizes = [self.earlier + self.rows] * self.chunks + [self.member_rows] * (self.chunks * self.members)
        pages = [-(-size // PAGE) for size in sizes]
        numbers = iter(np.random.default_rng(0).permutation(sum(pages)))
        units = []
        for (_, _, first), size, count in zip(self.spans, sizes, pages, strict=True):
            at = np.arange(count) * PAGE
            own = [np.array([next(numbers) for _ in at]), np.minimum(PAGE, size - at), at]
            units.append(np.stack(own) if first == self.earlier else np.stack([own[0], own[1], first + at]))
        reads = [
            units[i] if i < self.chunks else np.concatenate([units[group], units[i]], axis=1)
            for i, (group, _, _) in enumerate(self.spans)
        ]
        rows = np.array([rows for _, rows, _ in self.spans])
        page, tokens, first = np.concatenate(reads, axis=1)
        chunks = wl.Chunks(
            row_begin=np.cumsum(rows) - rows,
            row_end=np.cumsum(rows),
            position=np.array([first for *_, first in self.spans]),
            page_begin=np.concatenate([[0], np.cumsum([len(each[0]) for each in reads])]),
            page=page,
            tokens=tokens,
            first=first,
        )
        return chunks, sum(pages)


@dataclass
class Inputs:
    batch: Batch
    q: torch.Tensor  # [rows, heads, dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # each [pages, PAGE, kv_heads, dim]
    chunks: wl.Chunks
    want: torch.Tensor  # [rows, heads, dim]  of the first cache

    @classmethod
    def make(cls, batch: Batch, heads: int, kv_heads: int, dim: int, caches: int) -> Inputs:
        chunks, pages = batch.layout()
        q = torch.randn(batch.total_rows, heads, dim, dtype=torch.bfloat16, device="cuda")
        made = torch.randn(caches, 2, pages, PAGE, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
        pairs = [(k, v) for k, v in made]
        return cls(batch, q, pairs, chunks, cls._reference(chunks, q, *pairs[0]))

    @staticmethod
    def _reference(chunks: wl.Chunks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, device="cuda")
        group = q.shape[1] // k.shape[2]
        for i, (begin, end) in enumerate(zip(chunks.row_begin, chunks.row_end, strict=True)):
            mine = slice(chunks.page_begin[i], chunks.page_begin[i + 1])
            valid = torch.from_numpy(np.arange(PAGE)[None] < chunks.tokens[mine, None]).cuda()
            page = torch.from_numpy(chunks.page[mine]).cuda()
            keys, values = k[page][valid].float(), v[page][valid].float()  # [keys, kv_heads, dim]
            at = torch.arange(len(keys), device="cuda")
            for low in range(begin, end, 1024):
                high = min(end, low + 1024)
                position = chunks.position[i] + torch.arange(low - begin, high - begin, device="cuda")
                query = q[low:high].float().unflatten(1, (-1, group))
                scores = torch.einsum("rhgd,khd->rhgk", query * q.shape[2] ** -0.5, keys)
                scores.masked_fill_((at > position[:, None])[:, None, None], float("-inf"))
                out[low:high] = torch.einsum("rhgk,khd->rhgd", scores.softmax(-1), values).flatten(1, 2)
        return out


def measure(inputs: Inputs, tile: int, warps: int, stages: int, replays: int) -> dict[str, float]:
    """Milliseconds for one step, and its error."""
    kv_heads, dim = inputs.caches[0][0].shape[2:]
    group = inputs.q.shape[1] // kv_heads
    work = wl.build_prefill(inputs.chunks, group=group, page_size=PAGE, tile=tile).to("cuda")
    out = torch.full_like(inputs.q, float("nan"))
    options = {"num_warps": warps, "num_stages": stages}

    def step(k: torch.Tensor, v: torch.Tensor) -> None:
        pt.attend_chunks(inputs.q, k, v, out, work, dim**-0.5, options=options)

    def steps() -> None:
        for k, v in inputs.caches:
            step(k, v)

    step(*inputs.caches[0])
    error = float((out.float() - inputs.want).norm() / inputs.want.norm())
    if not error < TOLERANCE:
        raise AssertionError(f"{inputs.batch}: error {error}")
    return {"ms": graph_ms(steps, replays) / len(inputs.caches), "error": error}


def measure_rival(inputs: Inputs, backend: SDPBackend, replays: int) -> float | None:
    """Milliseconds of torch's attention where the batch is a plain one: contiguous tensors, no pages."""
    batch = inputs.batch
    if batch.members or batch.earlier:
        return None
    heads, dim = inputs.q.shape[1:]
    kv_heads = inputs.caches[0][0].shape[2]

    def plain(count: int) -> torch.Tensor:
        return torch.randn(batch.chunks, count, batch.rows, dim, dtype=torch.bfloat16, device="cuda")

    pairs = [(plain(kv_heads), plain(kv_heads)) for _ in inputs.caches]
    q = plain(heads)

    def steps() -> None:
        for k, v in pairs:
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        steps()
        torch.cuda.synchronize()
        return graph_ms(steps, replays) / len(pairs)


def kernels() -> list[Any]:
    """All that the kernel was compiled to so far."""
    return list(pt._attend_chunks.device_caches[torch.cuda.current_device()][0].values())


def profile(kernel: Any) -> str:
    """What the compiler made of it: registers, words spilled, shared memory, blocks on a multiprocessor."""
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    blocks = min(65536 // (-(-kernel.n_regs // 8) * 8 * 32 * warps), 233472 // (shared + 1024), 64 // warps)
    return f"{kernel.n_regs:5} {kernel.n_spills:6} {shared / 1024:6.0f} {blocks:6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*", type=Batch.parse, default=[Batch.parse(text) for text in DEFAULT])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--caches", type=int, default=3, help="how many a graph goes over")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--tiles", nargs="+", help="TILE,WARPS,STAGES: others than the kernel would choose")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    chosen = pt.launch_options(options.heads // options.kv_heads, options.dim, options.dim, 2)
    tiles = [tuple(map(int, text.split(","))) for text in options.tiles or []] or [tuple(chosen.values())]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {options.heads} / {options.kv_heads}", end="")
    print(f" heads of {options.dim}\n{'batch':>16} {'kernel':>10} {'ms':>8} {'TFLOP/s':>8} {'error':>8}", end="")
    print(f" {'regs':>5} {'spills':>6} {'KB':>6} {'blocks':>6}")
    figures = []
    profiles: dict[str, str] = {}

    def report(batch: Batch, name: str, ms: float, error: float | None = None, notes: str = "") -> None:
        tflops = batch.pairs * options.heads * 4 * options.dim / ms / 1e9
        print(
            f"{batch!s:>16} {name:>10} {ms:8.4f} {tflops:8.0f}" + (f" {error:8.1e} {notes}" if error else ""),
            flush=True,
        )
        figures.append({"batch": str(batch), "kernel": name, "ms": ms, "tflops": tflops, "error": error})

    for batch in options.batches:
        inputs = Inputs.make(batch, options.heads, options.kv_heads, options.dim, options.caches)
        for tile in tiles:
            name = ",".join(map(str, tile))
            try:
                found = measure(inputs, *tile, options.replays)
            except Exception as error:  # of several candidates one may not fit the card
                print(f"{batch!s:>16} {name:>10} {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            if name not in profiles:
                profiles[name] = profile(kernels()[-1])
            report(batch, name, found["ms"], found["error"], profiles[name])
        for name, backend in RIVALS.items():
            try:
                ms = measure_rival(inputs, backend, options.replays)
            except RuntimeError as error:
                print(f"{batch!s:>16} {name:>10} {str(error)[:80]}", flush=True)
                continue
            if ms is not None:
                report(batch, name, ms)
        del inputs
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
