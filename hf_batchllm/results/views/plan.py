"""A SharingPlan as a picture: the prompts' tree. Areas are tokens; darker blocks are shared by more prompts."""

from __future__ import annotations

from . import axes
from .axes import WIDTH, number, rectangle, titled
from .icicle import Icicle, icicle
from .markup import count, folded, legend, one_line, percent, several, shorter, table, text, tiles, view
from .protocols import ShownPlan, ShownSegment
from .shades import Shades

_HEIGHT, _HEIGHT_OF_NOTHING_SHARED = 280, 140
_SEGMENTS_LISTED = 8  # in the table
_GAP_FROM = 4  # pixels: smaller boxes have no gap around them
# Shares of the width that a short label needs, a full one, and either in a narrow view; pixels of a line.
_SHORT_LABEL, _LABEL, _LABEL_IF_NARROW = 0.035, 0.11, 0.3
_LABEL_HEIGHT = 20
_TOOLTIP_CHARACTERS = 80


def plan_html(plan: ShownPlan) -> str:
    body = plan_body(plan, "sequence" if plan.of_sequences else "prompt")
    return view(f'<div class="hfb-title">What the prompts share</div>{body}', str(plan))


def plan_body(plan: ShownPlan, thing: str = "prompt") -> str:
    """``thing``: "prompt", or "sequence" for the plan of a run, where each sample of a prompt counts."""
    parts = [tiles(_figures(plan, thing))]
    if plan.why_nothing:
        parts.append(f'<div class="hfb-caption">{text(plan.why_nothing)}</div>')
    if len(plan.order):
        parts.append(_picture(plan, thing))
    if plan.segments:
        parts += [_largest(plan, thing), folded("Groups by size", _histogram(plan))]
    return "".join(parts)


def _figures(plan: ShownPlan, thing: str) -> list[tuple[str, str]]:
    prompts = len(plan.order)
    figures = [(f"{prompts:,}", thing if prompts == 1 else f"{thing}s")]
    figures.append((f"{plan.total_tokens:,}", "tokens asked for"))
    figures.append((f"{plan.computed_tokens:,}", "tokens to compute"))
    if plan.total_tokens:
        figures.append((percent(plan.saving), "saved"))
    return figures


# -- the picture -------------------------------------------------------------------------------------------------------


def _picture(plan: ShownPlan, thing: str) -> str:
    tree = icicle(plan)
    height = _HEIGHT if plan.segments else _HEIGHT_OF_NOTHING_SHARED
    scale = height / tree.limit
    shades = Shades(_members_drawn(plan, tree))
    drawing = _blocks(plan, tree, scale, thing, shades) + _columns(plan, tree, scale, thing, shades)
    shown = [(f"hfb-s{shade}", name) for shade, name in shades.names()]
    shades_legend = (
        legend([("hfb-own", "1 (its own)"), *shown], f"{thing.title()}s that share a block:") if shown else ""
    )
    y_ticks = [(level * scale, count(level)) for level in axes.ticks(tree.limit, 5, whole=True)]
    over = _block_labels(plan, tree, scale, shades) + (_cut(tree, thing) if tree.is_cut else "")
    about = f"{several(len(plan.order), thing)}, {percent(plan.saving)} of their tokens shared"
    return (
        f'<div class="hfb-head"><span class="hfb-dim">Tokens, from the first one down</span>{shades_legend}</div>'
        + axes.plot(drawing, height, y_ticks, over, about)
        + axes.x_axis(tree.prompts, lambda at: f"{at:,.0f}", f"{thing}s, in the order they run", whole=True)
        + f'<div class="hfb-caption">{text(_caption(tree, thing))}</div>'
    )


def _caption(tree: Icicle, thing: str) -> str:
    sentences = f"Each {thing} is a column, its first token at the top. "
    if len(tree.blocks) or tree.shared.any():
        sentences += (
            f"A coloured block is a beginning that the {thing}s below it have in common: its tokens are computed once "
            "for all of them. "
        )
    elif tree.prompts > 1:
        sentences += "No tokens are computed once for several of them. "
    if len(tree.size) < tree.prompts:
        sentences += "Neighbours too narrow to be told apart are drawn as one column, their average."
    return sentences.strip()


def _members_drawn(plan: ShownPlan, tree: Icicle) -> list[float]:
    """How many prompts share each thing that is drawn; of columns, on average."""
    blocks = [plan.segments[index] for index in tree.blocks.tolist()]
    members: list[float] = [block.members for block in blocks if block.start < tree.limit]
    drawn = (tree.shared > 0) & (tree.top < tree.limit)
    return members + [_members(saving) for saving in tree.saving[drawn].tolist()]


def _members(saving: float) -> float:
    return max(2.0, round(1 / max(1 - saving, 1e-9)))


def _blocks(plan: ShownPlan, tree: Icicle, scale: float, thing: str, shades: Shades) -> str:
    parts = []
    across = WIDTH / tree.prompts
    for index, left in zip(tree.blocks.tolist(), tree.block_left.tolist(), strict=True):
        segment = plan.segments[index]
        if segment.start >= tree.limit:  # below the cut
            continue
        shade = shades.of(segment.members)
        width, height = segment.members * across, (min(segment.end, tree.limit) - segment.start) * scale
        drawn = _box(f"hfb-s{shade}", left * across, segment.start * scale, width, height)
        parts.append(titled(_tooltip(segment, plan.labels.get(index), thing), drawn))
    return "".join(parts)


def _tooltip(segment: ShownSegment, label: str | None, thing: str) -> str:
    tooltip = (
        f"{segment.members:,} {thing}s share {several(len(segment), 'token')}"
        f"{f' after {segment.start:,} others' if segment.start else ''}: {segment.saved_tokens:,} saved"
    )
    if thing == "prompt":  # sequences are not numbered as the user's prompts are
        tooltip += f"; the first is prompt {segment.prompt}"
    return tooltip if label is None else f"{tooltip}\n“{shorter(label, _TOOLTIP_CHARACTERS)}”"


def _columns(plan: ShownPlan, tree: Icicle, scale: float, thing: str, shades: Shades) -> str:
    parts = []
    across = WIDTH / tree.prompts
    order = plan.order
    rows = zip(tree.first, tree.size, tree.top, tree.shared, tree.saving, tree.own, strict=True)
    for first, size, top, shared, saving, own in (map(float, row) for row in rows):
        left, width = first * across, size * across
        top, middle, bottom = (min(level, tree.limit) for level in (top, top + shared, top + shared + own))
        drawn = ""
        if middle > top:
            shade = shades.of(_members(saving))
            drawn = _box(f"hfb-s{shade}", left, top * scale, width, (middle - top) * scale)
        drawn += _box("hfb-own", left, middle * scale, width, (bottom - middle) * scale)
        if size == 1 and thing == "prompt":
            tooltip = f"prompt {order[int(first)]}: {several(int(own), 'token')} of its own"
        else:
            tooltip = f"{several(int(size), thing)}: {count(own)} own tokens{' each' if size > 1 else ''}"
        if shared:
            tooltip += f", {count(shared)} shared in small groups ({percent(saving)} of these saved)"
        parts.append(titled(tooltip, drawn))
    return "".join(parts)


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    gap = " hfb-gap" if min(width, height) >= _GAP_FROM else ""
    return rectangle(kind + gap, x, y, x + width, y + height)


def _block_labels(plan: ShownPlan, tree: Icicle, scale: float, shades: Shades) -> str:
    """Labels in the blocks that have room for them."""
    parts = []
    for index, left in zip(tree.blocks.tolist(), tree.block_left.tolist(), strict=True):
        segment = plan.segments[index]
        width = segment.members / tree.prompts
        height = (min(segment.end, tree.limit) - segment.start) * scale
        if width < _SHORT_LABEL or height < _LABEL_HEIGHT:
            continue
        lines = f"<span>{f'{len(segment):,} tokens ' if width >= _LABEL else ''}× {segment.members:,}</span>"
        label = plan.labels.get(index)
        if label is not None and width >= _LABEL and height > 2 * _LABEL_HEIGHT:
            lines += f'<span class="hfb-said">{one_line(label, _TOOLTIP_CHARACTERS)}</span>'
        wide = "" if width >= _LABEL_IF_NARROW else " hfb-wide"
        parts.append(
            f'<div class="hfb-in hfb-i{shades.of(segment.members)}{wide}" style="left:{100 * left / tree.prompts:.2f}%;'
            f'width:{100 * width:.2f}%;top:{number(segment.start * scale)}px;height:{number(height)}px">{lines}</div>'
        )
    return "".join(parts)


def _cut(tree: Icicle, thing: str) -> str:
    note = f"cut off here: the longest {thing} has {tree.longest:,} tokens"
    return f'<div class="hfb-cut"></div><div class="hfb-note">{text(note)}</div>'


# -- the tables --------------------------------------------------------------------------------------------------------


def _largest(plan: ShownPlan, thing: str) -> str:
    segments = plan.largest_savers(_SEGMENTS_LISTED)
    rows = []
    for segment in segments:
        label = plan.labels.get(segment.index)
        if label is not None:
            begins = f'<div class="hfb-text">{"… " if segment.start else ""}{one_line(label, 140)}</div>'
        else:
            of = f"of prompt {segment.prompt}" if thing == "prompt" else ""
            begins = f'<span class="hfb-dim">tokens {segment.start:,} to {segment.end:,} {of}</span>'
        rows.append([begins, f"{segment.members:,}", f"{len(segment):,}", f"{segment.saved_tokens:,}"])
    head = ["Largest shared beginnings", f"{thing}s", "tokens", "saved"]
    more = len(plan.segments) - len(segments)
    note = f'<div class="hfb-caption">and {more:,} more</div>' if more else ""
    return table(head, rows, 3) + note


def _histogram(plan: ShownPlan) -> str:
    return table(plan.HISTOGRAM_COLUMNS, [[text(cell) for cell in row] for row in plan.histogram()], 3, narrow=True)
