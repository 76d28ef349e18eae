"""What admission by a forecast brings over static admission: a list of mixed lengths with little memory, on a model.

    python examples/benchmarks/bench_admission.py --config llama-8b --memory 10GB --plot steps.svg
    python examples/benchmarks/bench_admission.py --config llama-8b --memory 10GB --new 1024 --stop-after 200

With --stop-after answers end at random; otherwise each has a length of its own, which the scheduler knows.
simulate_schedule.py says what to expect. The model runs on a GPU if there is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bench_support.static_admission import StaticAdmission

from hf_batchllm.bench.contenders import Ours
from hf_batchllm.bench.measuring import measure
from hf_batchllm.bench.models import end_at_random, load_model
from hf_batchllm.bench.plot_steps import draw_steps
from hf_batchllm.bench.workload import MixedGroups
from hf_batchllm.results.timeline import Timeline

_SCHEDULERS = {"static": StaticAdmission, "groups": None}  # None: the default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="a shape with random weights (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=400, metavar="N")
    parser.add_argument("--degree", type=int, default=8, metavar="N", help="prompts that share a prefix")
    parser.add_argument("--shared", type=int, default=2000, metavar="N", help="median tokens of a prefix")
    parser.add_argument("--own", type=int, default=200, metavar="N", help="median tokens of a prompt after its prefix")
    parser.add_argument("--new", type=int, default=2048, metavar="N", help="tokens of the longest answer")
    parser.add_argument("--stop-after", type=int, metavar="N", help="one token in N ends an answer")
    parser.add_argument("--memory", default="10GB", help="for the KV cache (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="of each; the median counts (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the steps of the last runs")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    model = load_model(None, asked.config, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if asked.stop_after:
        end_at_random(model, asked.stop_after)
    lengths = {"shared": asked.shared, "own": asked.own, "new": asked.new, "degree": asked.degree}
    workload = MixedGroups(asked.requests, **lengths, open_ended=asked.stop_after is not None)
    prompts = workload.prompts(model.config.get_text_config().vocab_size)
    timelines: dict[str, Timeline] = {}
    head = f"{'':<10}{'seconds':>10}{'new tokens':>12}{'tokens/s':>10}{'steps':>9}{'preemptions':>13}{'recomputed':>11}"
    lines = [head]
    for name, kind in _SCHEDULERS.items():
        fields = {"kv_memory": asked.memory} | ({"scheduler": kind()} if kind is not None else {})
        ours = Ours(model, fields, name=name)
        row = measure(ours, workload, prompts, asked.runs)
        report = ours.report
        assert report is not None and report.timeline is not None
        timelines[name] = report.timeline
        lines.append(
            f"{name:<10}{row.seconds:>10.2f}{row.made[-1]:>12,}{row.new_tokens_per_second:>10,.0f}{report.steps:>9,}"
            f"{report.preemptions:>13,}{report.recomputed_tokens:>11,}"
        )
    print(f"\n{workload}, {asked.memory} for the KV cache")
    print("\n".join(lines))
    if asked.plot is not None:
        draw_steps(timelines, asked.plot, f"{asked.config} on {_device_name(device)}, {asked.memory}. {workload}")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


if __name__ == "__main__":
    main()
