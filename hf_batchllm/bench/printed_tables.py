"""The tables that are printed once everything has been measured."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .ablation import ALL_ON, Ablation
from .floor import Floor
from .gpu_busy import GpuBusy
from .measuring import Measurement, Reads
from .model_alone import ModelAlone
from .parameter_sweeps import DegreeSweep, SyncCell, SyncSweep

_NAME, _VARIANT = 28, 37  # characters of a table's first column
_WIDTH = 118  # of the text below a table


def contenders_table(rows: Sequence[Measurement]) -> str:
    """``rows``: ours comes first."""
    ours = rows[0]
    with_floor, with_memory = ours.floor is not None, ours.peak_bytes > 0
    head = f"{'':<{_NAME}}{'prompts':>8}{'seconds':>10}{'prompts/s':>11}{'new tokens/s':>14}{'hf_batchllm is':>18}"
    lines = [head + ("   of the floor" if with_floor else "") + ("   peak memory" if with_memory else "")]
    for row in rows:
        line = f"{row.name:<{_NAME}}{row.requests:>8,}"
        if row.error:
            lines.append(f"{line}  failed: {row.error[:60]}")
            continue
        ratio = "" if row is ours else f"{ours.times_faster_than(row):.2f} x as fast"
        line += f"{row.seconds:>10.2f}{row.prompts_per_second:>11.2f}{row.new_tokens_per_second:>14,.0f}{ratio:>18}"
        if with_floor:
            line += f"{_percent(row.share_of_floor):>15}"
        if with_memory:
            line += f"{row.peak_bytes / 2**30:>10.1f} GiB"
        lines.append(line.rstrip())
    return "\n".join(lines)


def model_alone_lines(alone: ModelAlone, ours: Measurement) -> str:
    layers = "matrix products" if alone.products_only else "layers without attention"
    return "\n".join(
        [
            _seconds("model alone", alone.total, f"hf_batchllm takes {ours.seconds / alone.total - 1:.0%} more"),
            _seconds(f"  prompts: {layers}", alone.prefill),
            _seconds("  answers: layers without attention", alone.decode),
            _seconds("  LM head for sampled rows", alone.head),
        ]
    )


def floor_lines(floor: Floor, ours: Measurement) -> str:
    rates = str(floor.rates).split(" and ")
    speed = f"{ours.requests / floor.seconds:,.4g} prompts/s; hf_batchllm reaches {_percent(ours.share_of_floor)}"
    lines = [
        _seconds("floor", floor.seconds, speed),
        _seconds("  products, attention of prompts", floor.products, f"at {rates[0]}, measured in this run"),
        _seconds("  K and V that decode steps read", floor.keys, f"at {rates[1]}, measured in this run"),
    ]
    if floor.alone or floor.weights:
        of = "a step's" if floor.alone else "all"
        lines.append(
            _seconds("  waiting for weights", floor.weights, f"where reading them takes longer than {of} products")
        )
    if floor.needs.experts_met:
        counted = f"counted over {floor.routed_tokens:,} tokens" if floor.routed_tokens else "if all are met alike"
        note = f"of {floor.experts:,} in a layer, on average; {counted}"
        lines.append(_seconds("  experts that a decode step meets", floor.needs.experts_met, note))
    fused = "not in the floor: norms, rope, activations, all of them fused"
    lines.append(_seconds("small operations", floor.elementwise, fused))
    return "\n".join(lines)


def reads_line(reads: Reads) -> str:
    speed, steps = f"{reads.bytes_per_second / 1e9:,.4g} GB/s", f"{reads.weight_steps:,} steps without prompts"
    return f"decode steps read at least {speed} over the whole run: K and V, and the weights for {steps}"


def busy_line(busy: GpuBusy, new: int) -> str:
    return (
        f"GPU busy {100 * busy.share:.1f} % of the decode part: its last {busy.seconds:.2f} s in a run of {new:,} new "
        "tokens under a profiler"
    )


def degrees_table(sweep: DegreeSweep) -> str:
    with_floor = sweep.rows[0].floor is not None
    theirs = sweep.generate if sweep.generate is not None and not sweep.generate.error else None
    head = f"{'degree':>8}{'prompts':>10}{'seconds':>10}{'prompts/s':>11}"
    head += f"{'floor prompts/s':>18}{'of the floor':>15}" if with_floor else ""
    lines = [head + (f"{'x generate':>13}" if theirs else "")]
    for row in sweep.rows:
        line = f"{row.workload.degree:>8,}{row.requests:>10,}{row.seconds:>10.2f}{row.prompts_per_second:>11.2f}"  # type: ignore[union-attr]
        if row.floor is not None:
            line += f"{row.requests / row.floor.seconds:>18.2f}{_percent(row.share_of_floor):>15}"
        if theirs:
            line += f"{row.prompts_per_second / theirs.prompts_per_second:>11.2f} x"
        lines.append(line)
    if theirs:
        lines += [
            "",
            f"{theirs.name}: {theirs.prompts_per_second:.2f} prompts/s, from {theirs.requests:,} prompts. Measured "
            "once: it shares nothing,\nso the degree does not change its work.",
        ]
    elif sweep.generate is not None:
        lines += ["", f"{sweep.generate.name} failed: {sweep.generate.error[:80]}"]
    if with_floor and sweep.rows[0].floor:
        lines.append(f"The floor is at {sweep.rows[0].floor.rates}, measured in this run.")
    return "\n".join(lines)


def sync_table(sweep: SyncSweep) -> str:
    def columns(cell: SyncCell) -> str:
        return f"{cell.row.new_tokens_per_second:>14,.0f}{cell.idle_tokens:>14,}"

    pair = f"{'new tokens/s':>14}{'idle tokens':>14}"
    groups, head = f"{'':>16}", f"{'steps_per_sync':>16}{pair}"
    if sweep.without:
        full = sweep.with_graphs[0].row.workload.new
        short = f", {sweep.off_new:,} new tokens" if sweep.off_new != full else ""
        groups += f"{'CUDA graphs':>28}{'no graphs' + short:>32}"
        head += f"{'':>4}{pair}"
    lines = [groups.rstrip(), head] if sweep.without else [head]
    for place, count in enumerate(sweep.steps):
        line = f"{count:>16,}{columns(sweep.with_graphs[place])}"
        lines.append(line + (f"{'':>4}{columns(sweep.without[place])}" if sweep.without else ""))
    if not sweep.without:
        lines += ["", "Without a GPU there are no CUDA graphs to turn off."]
    if not any(cell.idle_tokens for cell in sweep.with_graphs):
        reason = (
            "on a CPU each drawn token is waited for"
            if sweep.drawn
            else "every answer's length is known (see --stop-after)"
        )
        lines += ["", f"No token is idle: {reason}."]
    return "\n".join(lines)


def ablation_table(ablation: Ablation) -> str:
    all_on = ablation.rows[0]
    with_floor = all_on.row.floor is not None
    recomputed = any(ablated.report is not None and ablated.report.recomputed_tokens for ablated in ablation.rows)
    head = f"{'off':<{_VARIANT}}{'seconds':>9}{'prompts/s':>11}{'slower':>9}"
    head += f"{'of floor':>10}" if with_floor else ""
    head += f"{'computed':>12}{'again':>10}" if recomputed else f"{'computed':>12}"
    lines = [f"{head}{'steps':>8}{'running':>9}"]
    for ablated in ablation.rows:
        lines.append(f"{ablated.variant.label.replace(ALL_ON, 'nothing'):<{_VARIANT}}")
        if ablated.why_not or ablated.row.error:
            lines[-1] += f"  {ablated.why_not or f'failed: {ablated.row.error[:60]}'}"
            continue
        row, report = ablated.row, ablated.report
        assert report is not None
        lines[-1] += f"{row.seconds:>9.2f}{row.prompts_per_second:>11.2f}"
        lines[-1] += f"{'':>9}" if ablated is all_on else f"{ablation.times_slower(ablated):>7.2f} x"
        lines[-1] += f"{_percent(row.share_of_floor):>10}" if with_floor else ""
        lines[-1] += f"{report.computed_tokens:>12,}" + (f"{report.recomputed_tokens:>10,}" if recomputed else "")
        lines[-1] += f"{report.steps:>8,}{ablated.most_running:>9,}"
    lines += ["", "computed: prompt tokens. running: the most sequences at once."]
    if recomputed:
        lines[-1] += " again: tokens computed again after memory ran short."
    return "\n".join(lines + _about_ablation(ablation))


def _about_ablation(ablation: Ablation) -> list[str]:
    """How it was measured, and what to know when reading the table."""
    measured = [ablated for ablated in ablation.rows if ablated.same_tokens is not None]
    all_on, others = measured[0], measured[1:]
    lines = []
    if ablation.spread is None:
        lines.append("One run of each.")
    else:
        once = ", ".join(ablated.variant.name for ablated in measured if ablated.variant.once)
        medians = f"Medians of {ablation.rounds} rounds, one run of each in a round"
        lines.append(f"{medians}{f'; {once}: in the first round only' if once else ''}.")
        lines[-1] += f" Runs of the same thing differ by up to {100 * ablation.spread:.1f} %."
    requests = all_on.row.requests
    for ablated in others:
        if ablated.variant.name == "admission" and ablated.most_running == all_on.most_running:
            lines.append("admission: even with all on there were never more at once, so nothing was turned off.")
        if ablated.variant.name == "order" and ablated.most_running < all_on.most_running:
            # The forecast of memory rests on the plan's order, so both are off in this row.
            lines.append("order: requests are also admitted at their longest, as no plan says when prefixes end.")
    if others:
        differing = [ablated for ablated in others if ablated.same_tokens != requests]
        counts = ", ".join(f"{requests - (row.same_tokens or 0):,} ({row.variant.name})" for row in differing)
        lines.append(
            f"The same tokens as with all on, except for these numbers of {requests:,} prompts: {counts}."
            if differing
            else f"The same tokens for all {requests:,} prompts in each row."
        )
    if all_on.row.floor is not None:
        lines.append(f"The floor is at {all_on.row.floor.rates}, measured in this run.")
    elif ablation.note:
        lines.append(f"no floor: {ablation.note}")
    return [line for text in lines for line in textwrap.wrap(text, _WIDTH)]


def _seconds(name: str, seconds: float, note: str = "") -> str:
    return f"{name:<{_NAME + 8}}{seconds:>10.2f}" + (f"    {note}" if note else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def batch_sizes_tried(speeds: dict[int, float]) -> str:
    """Prompts/s of ``generate`` by batch size, with a note if the largest was the best."""
    each = ", ".join(f"{size}: {speed:.2f}" for size, speed in speeds.items())
    line = f"model.generate, prompts/s by batch size:\n  {each}"
    best_is_largest = len(speeds) > 1 and max(speeds, key=speeds.__getitem__) == max(speeds)
    return line + (
        "\n  The largest size tried is the best: try larger ones with --batch-sizes." if best_is_largest else ""
    )
