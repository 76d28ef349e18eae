"""Chromium without a window: pictures of a page, and the page as it is after its scripts have run.

``host_page`` puts what a notebook would show into a page that is like the notebook's: its style sheet comes first and
means every table, and its theme is told by attributes and variables, whatever the operating system's is.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from html import escape
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1"
).split()
_NARROWEST_WINDOW = 500  # what is narrower has to be a frame in a page
_SECONDS = 60


@functools.cache
def find() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)


WHY_SKIPPED = "needs Chromium or Chrome (on Debian: apt install chromium)"


def screenshot(
    html: str, path: str | os.PathLike[str], width: int = 1000, height: int = 800, dark: bool = False
) -> None:
    """A PNG of the page. ``dark`` is what the operating system prefers; a page's own theme is up to its ``html``.

    A page narrower than a window can be stands at the left of the picture, beside grey.
    """
    target = Path(path).resolve()
    _run(html, [f"--screenshot={target}", f"--window-size={max(width, _NARROWEST_WINDOW)},{height}"], dark, width)
    if not target.exists():
        raise RuntimeError(f"{find()} made no picture of the page")


def dom(html: str, dark: bool = False) -> str:
    """The page's HTML after its scripts have run."""
    return _run(html, ["--dump-dom"], dark, None)


def _run(html: str, what: list[str], dark: bool, width: int | None) -> str:
    browser = find()
    if browser is None:
        raise RuntimeError(WHY_SKIPPED)
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as folder:
        page = Path(folder, "page.html")
        if "<html" not in html[:1000].lower():
            html = f"<!DOCTYPE html><html><head><meta charset='utf-8'></head><body>{html}</body></html>"
        page.write_text(html, encoding="utf-8")
        if width is not None and width < _NARROWEST_WINDOW:
            frame = f"<iframe src='page.html' style='border:0;width:{width}px;height:100vh'></iframe>"
            page = Path(folder, "narrow.html")
            page.write_text(f"<!DOCTYPE html><body style='margin:0;background:#777'>{frame}</body>", encoding="utf-8")
        flags = [*_QUIET, f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={int(not dark)}"]
        done = subprocess.run([browser, *flags, *what, page.as_uri()], capture_output=True, timeout=_SECONDS)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace")[-2000:]
            raise RuntimeError(f"{browser} ended with {done.returncode}: {said}")
        return done.stdout.decode("utf-8", errors="replace")


# What JupyterLab 4 says of HTML in an output, as far as it can get in the way: tables above all.
_JUPYTERLAB = """
:root { --jp-ui-font-family: system-ui, "Liberation Sans", sans-serif; --jp-code-font-size: 13px;
  --jp-content-font-family: system-ui, "Liberation Sans", sans-serif; --jp-content-font-size1: 14px;
  --jp-code-font-family: "DejaVu Sans Mono", monospace; }
body { margin: 0; padding: 12px; background: var(--jp-layout-color0); color: var(--jp-content-font-color1);
  font-family: var(--jp-content-font-family); font-size: 14px; line-height: 1.6; }
.jp-OutputArea-child { display: table; table-layout: fixed; width: 100%; overflow: hidden; }
.jp-OutputArea-output { display: table-cell; vertical-align: top; overflow-x: auto; }
.jp-RenderedHTMLCommon { padding-right: 20px; }
.jp-RenderedHTMLCommon table { border-collapse: collapse; border-spacing: 0; border: none; font-size: 12px;
  table-layout: fixed; margin-left: auto; margin-bottom: 1em; margin-right: auto; }
.jp-RenderedHTMLCommon thead { border-bottom: 1px solid var(--jp-border-color1); vertical-align: bottom; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th, .jp-RenderedHTMLCommon tr { vertical-align: middle;
  padding: 0.5em; line-height: normal; white-space: normal; max-width: none; border: none; }
.jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) td, .jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) th {
  text-align: right; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: var(--jp-layout-color0); }
.jp-RenderedHTMLCommon tbody tr:nth-child(even) { background: var(--jp-rendermime-table-row-background); }
.jp-RenderedHTMLCommon tbody tr:hover { background: var(--jp-rendermime-table-row-hover-background); }
.jp-RenderedHTMLCommon pre { margin: 0; padding: 0; background: var(--jp-layout-color0); }
.jp-RenderedHTMLCommon svg { max-width: 100%; }
"""
_JUPYTERLAB_LIGHT = """:root { --jp-layout-color0: white; --jp-layout-color1: white; --jp-layout-color2: #eee;
  --jp-border-color1: #bdbdbd; --jp-border-color2: #e0e0e0; --jp-content-font-color1: rgba(0, 0, 0, 0.87);
  --jp-content-font-color2: rgba(0, 0, 0, 0.54); --jp-rendermime-table-row-background: #f5f5f5;
  --jp-rendermime-table-row-hover-background: #e1f5fe; }"""
_JUPYTERLAB_DARK = """:root { --jp-layout-color0: #111111; --jp-layout-color1: #212121; --jp-layout-color2: #424242;
  --jp-border-color1: #616161; --jp-border-color2: #424242; --jp-content-font-color1: rgba(255, 255, 255, 1);
  --jp-content-font-color2: rgba(255, 255, 255, 0.7); --jp-rendermime-table-row-background: #212121;
  --jp-rendermime-table-row-hover-background: rgba(3, 169, 244, 0.2); }"""
_VSCODE = """
body { margin: 0; padding: 12px; font-family: var(--vscode-font-family); font-size: 13px;
  background: var(--vscode-editor-background); color: var(--vscode-foreground); }
table { border-collapse: collapse; border-spacing: 0; } th, td, tr { text-align: right; padding: 5px 8px; }
tbody tr:nth-child(even) { background-color: rgba(128, 128, 128, 0.13); }
:root { --vscode-font-family: system-ui, "Liberation Sans", sans-serif; """
_VSCODE_COLOURS = "--vscode-editor-background: {0}; --vscode-foreground: {1}; --vscode-editor-foreground: {1}; }}"
_VSCODE_LIGHT = _VSCODE_COLOURS.format("#ffffff", "#3b3b3b")
_VSCODE_DARK = _VSCODE_COLOURS.format("#1f1f1f", "#cccccc")

HOSTS = ("plain", "jupyterlab", "vscode", "colab")


def host_page(output: str, host: str = "jupyterlab", dark: bool = False) -> str:
    """The page of a notebook that shows ``output``, in the host's own light or dark theme."""
    attributes, classes, style = "", "", ""
    if host == "jupyterlab":
        style = _JUPYTERLAB + (_JUPYTERLAB_DARK if dark else _JUPYTERLAB_LIGHT)
        attributes = f' data-jp-theme-light="{"false" if dark else "true"}"'
        output = (
            '<div class="jp-OutputArea-child"><div class="jp-RenderedHTMLCommon jp-RenderedHTML jp-OutputArea-output">'
            f"{output}</div></div>"
        )
    elif host == "vscode":
        style = _VSCODE + (_VSCODE_DARK if dark else _VSCODE_LIGHT)
        classes = f' class="vscode-{"dark" if dark else "light"}"'
        attributes = f' data-vscode-theme-kind="vscode-{"dark" if dark else "light"}"'
    elif host == "colab":
        style = f"body {{ background: {'#383838' if dark else 'white'}; color: {'#d5d5d5' if dark else '#212121'} }}"
    root = f' theme="{"dark" if dark else "light"}"' if host == "colab" else ""
    return (
        f"<!DOCTYPE html><html{root}><head><meta charset='utf-8'><title>{escape(host)}</title><style>{style}</style>"
        f"</head><body{classes}{attributes}>{output}</body></html>"
    )
