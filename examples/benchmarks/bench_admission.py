"""What admission by a forecast brings over static admission: a list of mixed lengths with little memory, on a model.

    python examples/benchmarks/bench_admission.py --config llama-8b --memory 10GB --plot steps.svg
    python examples/benchmarks/bench_admission.py --config llama-8b --memory 10GB --new 1024 --stop-after 200

With --stop-after answers end at random; otherwise each has a length of its own, which the scheduler knows.
simulate_schedule.py says what to expect. The model runs on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import common
from other_schedulers import StaticAdmission
from plot import draw_steps

from hf_batchllm.bench.contenders import Measurement, Ours, measure
from hf_batchllm.bench.workload import Tokens
from hf_batchllm.results.timeline import Timeline


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {
        "--stop-after": {"type": int, "metavar": "N", "help": "one token in N ends an answer"},
        "--memory": {"default": "10GB", "help": "for the KV cache (default: %(default)s)"},
        "--plot": {"type": Path, "metavar": "FILE", "help": "draw the steps of the last runs"},
    }
    asked = common.read(
        __doc__, arguments, flags, model="", requests=(400, "prompts"), degree=(8, "prompts that share a prefix"),
        shared=(2000, "median tokens of a prefix"), own=(200, "median further tokens"),
        new=(2048, "tokens of the longest answer"), runs=(1, "of which the median counts"),
    )  # fmt: skip
    model = common.model_of(asked)
    if asked.stop_after:
        common.end_at_random(model, asked.stop_after)
    workload = common.workload_of(asked, kind="mixed")
    found: list[tuple[Measurement, Ours]] = []
    for name, scheduler in (("static", StaticAdmission()), ("groups", "groups")):
        ours = Ours(model, {"kv_memory": asked.memory, "scheduler": scheduler})

        def run(prompts: Tokens, answers: Sequence[int], ours: Ours = ours) -> Tokens:
            return ours(prompts, [asked.new] * len(prompts) if asked.stop_after else answers)

        found.append((measure(run, model, Measurement(name, workload), asked.runs), ours))
    print(f"\n{workload}, {asked.memory} for the KV cache")
    columns = {"": "<8", "seconds": "8.2f", "new tokens": "10,", "tokens/s": "8,.0f", "steps": "7,"}
    table = common.Table({**columns, "preemptions": "11,", "recomputed": "10,"})
    timelines: dict[str, Timeline] = {}
    for row, ours in found:
        report, made = ours.report, sum(map(len, row.tokens))
        timelines[row.name] = report.timeline
        values = {"": row.name, "seconds": row.seconds, "new tokens": made, "steps": report.steps}
        more = {"preemptions": report.preemptions, "recomputed": report.recomputed_tokens}
        table.add({**values, **more, "tokens/s": row.new_tokens_per_second})
    if asked.plot is not None:
        draw_steps(timelines, asked.plot, f"{asked.config} on {asked.device}, {asked.memory}. {workload}")


if __name__ == "__main__":
    main()
