"""examples/benchmarks/check_kernels.py finds nothing wrong with the kernels, and finds what is wrong with others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support_kernels import GPU, takes_all_masks
from support_quick_python import run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "benchmarks"


@takes_all_masks
def test_each_kernel_has_its_line() -> None:
    """As one starts it: it chooses the interpreter by itself."""
    command = [sys.executable, "check_kernels.py", "--cases", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
    good = [line.split()[0] for line in done.stdout.splitlines() if line.endswith("yes")]
    assert sorted(good) == sorted(
        "own segment merge prefill rope_and_write add_rms_norm act_and_mul greedy gumbel_sample advance".split()
    )


def test_a_kernel_that_is_off_is_named() -> None:
    broken = """
import sys
import check_kernels
from check_kernels import layer_ops_torch, layer_ops_triton, sample_torch, sample_triton

for name in ("attention", "rope", "advancing"):
    setattr(check_kernels, name, lambda case: iter(()))
sample_triton.greedy = lambda logits, out: out.copy_(sample_torch.greedy(logits) + 1)
layer_ops_triton.act_and_mul = lambda gate, up, activation, out: out
sys.argv[1:] = ["--cases", "1"]
sys.exit(check_kernels.main())
"""
    interpreted = os.environ | ({} if GPU else {"TRITON_INTERPRET": "1"})
    done = run([sys.executable, "-c", broken], capture_output=True, text=True, cwd=EXAMPLES, env=interpreted)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: greedy: off by 1.0" in done.stdout
    assert "WRONG: activation, case 0: act_and_mul" in done.stdout
    assert "gumbel_sample      1      0.0e+00   0.0e+00  yes" in done.stdout
