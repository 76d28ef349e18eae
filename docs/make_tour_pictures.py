"""Takes pictures of what examples/tour.ipynb shows: ``.venv/bin/python docs/make_tour_pictures.py [CELL ...]``.

The notebook runs from beginning to end over its model. The plan, the report, the results and the scores (or the cells
that are named) are then photographed as JupyterLab shows them, light and dark, wide and narrow, by Chromium or Chrome.
All of it is written to ``build/pictures``, for people to look at; nothing there is kept in git.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbclient
import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import support_browser

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "build" / "pictures"
CELLS = "plan", "report", "result", "scores"
WIDTHS = {"wide": 1000, "narrow": 420}
HEIGHT = 1000


def main(cells: tuple[str, ...]) -> None:
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    where = {"metadata": {"path": str(ROOT / "examples")}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where)
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    PICTURES.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, PICTURES / "tour.ipynb")
    print(f"wrote {(PICTURES / 'tour.ipynb').relative_to(ROOT)}, with its outputs")

    shown = {cell.id: html for cell in notebook.cells if (html := shown_html(cell))}
    if unknown := [name for name in cells if name not in shown]:
        sys.exit(f"no picture in the cell {', '.join(unknown)}; there are {', '.join(shown)}")
    if support_browser.find() is None:
        sys.exit(f"no pictures were taken: that {support_browser.WHY_SKIPPED}")
    for name in cells:
        for size, width in WIDTHS.items():
            for dark in (False, True):
                picture = PICTURES / f"{name}-{'dark' if dark else 'light'}-{size}.png"
                page = support_browser.host_page(shown[name], dark=dark)
                support_browser.screenshot(page, picture, width=width, height=HEIGHT, dark=dark)
                print(f"wrote {picture.relative_to(ROOT)}")


def shown_html(cell: nbformat.NotebookNode) -> str:
    """What a cell shows as HTML; empty if nothing."""
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.get("outputs", []))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or CELLS)
