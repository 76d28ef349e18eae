"""Draws the README's picture, the plan of `make demo` and its run: ``.venv/bin/python docs/make_pictures.py``.

It runs the prompts of ``examples/quickstart.py`` over their model and writes ``docs/plan-and-run.svg``. In a notebook a
plan and a report draw themselves, with more in them (``hf_batchllm/results``). This picture has to stand alone:
an image in a page that brings no style sheet and no fonts, on a light or a dark ground.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the library of this checkout

from hf_batchllm import BatchGenerator, BatchResult, RunReport, SharingPlan
from hf_batchllm.results.sharing_plan import layout_of
from hf_batchllm.results.views.chart import number, ticks

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "plan-and-run.svg"

WIDTH, HEIGHT = 880, 452
LEFT, RIGHT = 62, 24  # beside the panels
PLAN_TOP, PLAN_HEIGHT = 84, 150
RUN_TOP, RUN_HEIGHT = 314, 84
_LABEL_WIDTH, _LABEL_HEIGHT = 100, 22  # of a block that has room for a label

# Blue and teal for what is shared (by all, and by some), orange for answers; grey for what each prompt has of its own.
_LIGHT = {
    "ground": "#ffffff", "ink": "#1f2328", "dim": "#616870", "line": "#dde1e6",
    "all": "#1e3785", "some": "#2878a6", "own": "#c9ced5", "prompts": "#2878a6", "answers": "#ee8866", "on": "#ffffff",
}  # fmt: skip
_DARK = {
    "ground": "#111418", "ink": "#e8eaed", "dim": "#a4abb3", "line": "#3a4048",
    "all": "#cde58d", "some": "#35a0b0", "own": "#5a616b", "prompts": "#35a0b0", "answers": "#ee8866", "on": "#04161a",
}  # fmt: skip


def main() -> None:
    from quickstart import MAX_NEW_TOKENS, all_prompts
    from small_model import load

    with BatchGenerator(*load()) as gen:
        prompts = all_prompts()
        result: BatchResult = gen.generate(prompts, max_new_tokens=MAX_NEW_TOKENS)
        PICTURE.write_text(picture(gen.plan(prompts), result.report), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


def picture(plan: SharingPlan, report: RunReport) -> str:
    """The plan of some prompts above the run of the same prompts."""
    prompts = len(plan.order)
    parts = [
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        _text(LEFT, 32, "The plan, before anything runs", "title"),
        _text(
            WIDTH - RIGHT,
            32,
            f"{plan.total_tokens:,} tokens in {prompts} prompts, {plan.computed_tokens:,} to compute: "
            f"{plan.saving:.0%} saved",
            "ink end",
        ),
        _legend(LEFT, 58, [("all", "shared by all"), ("some", "shared by some"), ("own", "a prompt's own")]),
        _plan(plan),
        _text(LEFT, RUN_TOP - 24, "The run", "title"),
        _legend(LEFT + 82, RUN_TOP - 24, [("prompts", "tokens of prompts"), ("answers", "tokens of answers")]),
        _text(
            WIDTH - RIGHT,
            RUN_TOP - 24,
            f"{report.new_tokens:,} new tokens in {report.steps:,} steps, all prompts at once",
            "ink end",
        ),
        _run(report),
    ]
    about = f"{prompts} prompts: {plan.saving:.0%} of their tokens are shared, and computed once"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(about)}">\n<style>{_style()}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _style() -> str:
    def colours(palette: dict[str, str]) -> str:
        return "".join(f".{name}{{fill:{colour}}}" for name, colour in palette.items()) + (
            f".grid{{stroke:{palette['line']}}}.gap{{stroke:{palette['ground']}}}"
        )

    fonts = "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}.title{font-size:15px;font-weight:600}"
    return (
        f"{fonts}.end{{text-anchor:end}}.middle{{text-anchor:middle}}{colours(_LIGHT)}.title{{fill:{_LIGHT['ink']}}}"
        f"@media (prefers-color-scheme:dark){{{colours(_DARK)}.title{{fill:{_DARK['ink']}}}}}"
    )


# -- the panels --------------------------------------------------------------------------------------------------------


def _plan(plan: SharingPlan) -> str:
    """Each prompt is a column, its first token at the top; a block is computed once for all columns below it."""
    tree, prompts = layout_of(plan), len(plan.order)
    across, down = (WIDTH - LEFT - RIGHT) / prompts, PLAN_HEIGHT / tree.limit
    parts = [_grid(PLAN_TOP + level * down, f"{level:,.0f}") for level in ticks(tree.limit, 4, whole=True)]
    for index, left in zip(tree.blocks.tolist(), tree.block_left.tolist(), strict=True):
        segment = plan.segments[index]
        kind = "all" if segment.members == prompts else "some"
        x, y = LEFT + left * across, PLAN_TOP + segment.start * down
        width, height = segment.members * across, len(segment) * down
        parts.append(_box(f"{kind} gap", x, y, width, height))
        if width >= _LABEL_WIDTH and height >= _LABEL_HEIGHT:
            middle = (x + width / 2, y + height / 2)
            parts.append(_text(middle[0], middle[1] - 2, f"{len(segment):,} tokens,", "on middle"))
            parts.append(_text(middle[0], middle[1] + 14, f"once for {segment.members}", "on middle"))
    rows = zip(tree.first, tree.size, tree.top, tree.shared, tree.own, strict=True)
    for first, size, top, shared, own in (map(float, row) for row in rows):
        x, y = LEFT + first * across, PLAN_TOP + top * down
        if shared:
            parts.append(_box("some gap", x, y, size * across, shared * down))
        parts.append(_box("own gap", x, y + shared * down, size * across, own * down))
    middle_of_all = (LEFT + WIDTH - RIGHT) / 2
    note = "each prompt is a column, its first token at the top; prompts stand in the order in which they run"
    return "\n".join([*parts, _text(middle_of_all, PLAN_TOP + PLAN_HEIGHT + 22, note, "dim middle")])


def _run(report: RunReport) -> str:
    timeline = report.timeline
    assert timeline is not None
    across = (WIDTH - LEFT - RIGHT) / timeline.steps.sum()
    prompts, answers = timeline.prompt_tokens / timeline.steps, timeline.decode_tokens / timeline.steps
    limit = float((prompts + answers).max())
    up, ground = RUN_HEIGHT / limit, RUN_TOP + RUN_HEIGHT
    parts = [_grid(ground - level * up, f"{level:,.0f}") for level in ticks(limit, 3, whole=True)]
    x = float(LEFT)
    for steps, of_prompts, of_answers in zip(timeline.steps, prompts, answers, strict=True):
        width = steps * across
        parts.append(_box("answers gap", x, ground - of_answers * up, width, of_answers * up))
        parts.append(_box("prompts gap", x, ground - (of_answers + of_prompts) * up, width, of_prompts * up))
        x += width
    middle_of_all = (LEFT + WIDTH - RIGHT) / 2
    note = "each column is one step of the model"
    return "\n".join([*parts, _text(middle_of_all, ground + 24, note, "dim middle")])


# -- their pieces ------------------------------------------------------------------------------------------------------


def _text(x: float, y: float, said: str, kind: str) -> str:
    return f'<text class="{kind}" x="{number(x)}" y="{number(y)}">{escape(said)}</text>'


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    if height <= 0:
        return ""
    return f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"/>'


def _grid(y: float, label: str) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{number(y)}" y2="{number(y)}"/>'
    return line + _text(LEFT - 8, y + 4, label, "dim end")


def _legend(x: float, y: float, entries: list[tuple[str, str]]) -> str:
    parts = []
    for kind, label in entries:
        parts.append(f'<rect class="{kind}" x="{number(x)}" y="{number(y - 10)}" width="11" height="11" rx="2"/>')
        parts.append(_text(x + 17, y, label, "dim"))
        x += 17 + 6.4 * len(label) + 18
    return "".join(parts)


if __name__ == "__main__":
    main()
