"""What is printed, once everything has been measured."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .ablation import ALL_ON, Ablation
from .busy import Busy
from .floor import Floor
from .measuring import Reads, Row
from .pieces import Pieces
from .sweeps import DegreeSweep, SyncCell, SyncSweep

_NAME, _OFF = 28, 37
_WIDTH = 118


def contenders_table(rows: Sequence[Row]) -> str:
    """Ours comes first."""
    ours = rows[0]
    with_floor, with_memory = ours.floor is not None, ours.peak_bytes > 0
    head = f"{'':<{_NAME}}{'prompts':>8}{'seconds':>10}{'prompts/s':>11}{'new tokens/s':>14}{'ours is':>10}"
    lines = [head + ("   of the floor" if with_floor else "") + ("   peak memory" if with_memory else "")]
    for row in rows:
        line = f"{row.name:<{_NAME}}{row.requests:>8,}"
        if row.error:
            lines.append(f"{line}  failed: {row.error[:60]}")
            continue
        ratio = "" if row is ours else f"{ours.times_faster_than(row):.2f} x"
        line += f"{row.seconds:>10.2f}{row.prompts_per_second:>11.2f}{row.new_tokens_per_second:>14,.0f}{ratio:>10}"
        if with_floor:
            line += f"{_percent(row.share_of_floor):>15}"
        if with_memory:
            line += f"{row.peak_bytes / 2**30:>10.1f} GiB"
        lines.append(line)
    return "\n".join(lines)


def pieces_lines(pieces: Pieces, ours: Row) -> str:
    what = "matrix products" if pieces.products_only else "layers without attention"
    return "\n".join(
        [
            _seconds("bare pieces", pieces.total, f"ours takes {ours.seconds / pieces.total - 1:.0%} more"),
            _seconds(f"  prompts: {what}", pieces.prefill),
            _seconds("  decode: layers without attention", pieces.decode),
            _seconds("  LM head where a row samples", pieces.head),
        ]
    )


def floor_lines(floor: Floor, ours: Row) -> str:
    rates = str(floor.rates).split(" and ")
    reached = f"{ours.requests / floor.seconds:,.4g} prompts/s, of which ours makes {_percent(ours.share_of_floor)}"
    lines = [
        _seconds("floor", floor.seconds, reached),
        _seconds("  products, attention of prompts", floor.products, f"at {rates[0]}, measured in this run"),
        _seconds("  K and V that decode steps read", floor.keys, f"at {rates[1]}, measured in this run"),
    ]
    if floor.alone:
        lines.append(_seconds("  waiting for weights", floor.weights, "where a step's products take less long"))
    fused = "not in the floor: norms, rope, activations, if all are fused"
    lines.append(_seconds("small operations", floor.elementwise, fused))
    return "\n".join(lines)


def reads_line(reads: Reads) -> str:
    speed, steps = f"{reads.bytes_per_second / 1e9:,.4g} GB/s", f"{reads.weight_steps:,} steps without prompts"
    return f"decode steps had to read {speed} over the whole run: K and V, and weights for {steps}"


def busy_line(busy: Busy, new: int) -> str:
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
            "once: it shares nothing,\nso no degree changes what it has to do.",
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
    over, head = f"{'':>16}", f"{'steps_per_sync':>16}{pair}"
    if sweep.without:
        full = sweep.with_graphs[0].row.workload.new
        short = f", {sweep.off_new:,} new tokens" if sweep.off_new != full else ""
        over += f"{'CUDA graphs':>28}{'no graphs' + short:>32}"
        head += f"{'':>4}{pair}"
    lines = [over.rstrip(), head] if sweep.without else [head]
    for place, count in enumerate(sweep.steps):
        line = f"{count:>16,}{columns(sweep.with_graphs[place])}"
        lines.append(line + (f"{'':>4}{columns(sweep.without[place])}" if sweep.without else ""))
    if not sweep.without:
        lines += ["", "Without a GPU there are no CUDA graphs to turn off."]
    if not any(cell.idle_tokens for cell in sweep.with_graphs):
        why = (
            "tokens drawn on a CPU are waited for"
            if sweep.drawn
            else "every answer's length is known (see --stop-after)"
        )
        lines += ["", f"No token is idle: {why}."]
    return "\n".join(lines)


def ablation_table(ablation: Ablation) -> str:
    all_on = ablation.rows[0]
    with_floor = all_on.row.floor is not None
    again = any(ablated.report is not None and ablated.report.recomputed_tokens for ablated in ablation.rows)
    head = f"{'off':<{_OFF}}{'seconds':>9}{'prompts/s':>11}{'slower':>9}"
    head += f"{'of floor':>10}" if with_floor else ""
    head += f"{'computed':>12}{'again':>10}" if again else f"{'computed':>12}"
    lines = [f"{head}{'steps':>8}{'running':>9}"]
    for ablated in ablation.rows:
        lines.append(f"{ablated.variant.label.replace(ALL_ON, 'nothing'):<{_OFF}}")
        if ablated.why_not or ablated.row.error:
            lines[-1] += f"  {ablated.why_not or f'failed: {ablated.row.error[:60]}'}"
            continue
        row, report = ablated.row, ablated.report
        assert report is not None
        lines[-1] += f"{row.seconds:>9.2f}{row.prompts_per_second:>11.2f}"
        lines[-1] += f"{'':>9}" if ablated is all_on else f"{ablation.times_slower(ablated):>7.2f} x"
        lines[-1] += f"{_percent(row.share_of_floor):>10}" if with_floor else ""
        lines[-1] += f"{report.computed_tokens:>12,}" + (f"{report.recomputed_tokens:>10,}" if again else "")
        lines[-1] += f"{report.steps:>8,}{ablated.most_running:>9,}"
    lines += ["", "computed: tokens of prompts. running: sequences at once, at most."]
    if again:
        lines[-1] += " again: tokens computed again, for want of memory."
    return "\n".join(lines + _about_ablation(ablation))


def _about_ablation(ablation: Ablation) -> list[str]:
    """How it was measured, and what is not as the table has it."""
    measured = [ablated for ablated in ablation.rows if ablated.same_tokens is not None]
    all_on, others = measured[0], measured[1:]
    lines = []
    if ablation.spread is None:
        lines.append("One run of each.")
    else:
        once = ", ".join(ablated.variant.name for ablated in measured if ablated.variant.once)
        said = f"Medians of {ablation.rounds} rounds, one run of each in a round"
        lines.append(f"{said}{f'; {once}: in the first alone' if once else ''}.")
        lines[-1] += f" Runs of the same thing differ by up to {100 * ablation.spread:.1f} %."
    requests = all_on.row.requests
    for ablated in others:
        if ablated.variant.name == "admission" and ablated.most_running == all_on.most_running:
            lines.append("admission: there were never more at once with all on either, so nothing was turned off.")
        if ablated.variant.name == "order" and ablated.most_running < all_on.most_running:
            # What is expected of memory rests on the plan's order, so both are off in this row.
            lines.append("order: everybody counts at their longest, too, as no plan says when prefixes may go.")
    if others:
        apart = [ablated for ablated in others if ablated.same_tokens != requests]
        said = ", ".join(f"{requests - (ablated.same_tokens or 0):,} ({ablated.variant.name})" for ablated in apart)
        lines.append(
            f"The same tokens as with all on, but for so many of {requests:,} prompts: {said}."
            if apart
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


def tried(speeds: dict[int, float]) -> str:
    """Prompts/s of ``generate`` by batch size; and whether a larger one might have been better."""
    each = ", ".join(f"{size}: {speed:.2f}" for size, speed in speeds.items())
    said = f"model.generate, prompts/s by batch size:\n  {each}"
    best_is_largest = len(speeds) > 1 and max(speeds, key=speeds.__getitem__) == max(speeds)
    return said + ("\n  The largest that was tried is the best: see --batch-sizes." if best_is_largest else "")
