"""The views' style sheet.

JupyterLab and VS Code publish their own colours, which are used; elsewhere there is a light and a dark set. The
notebook decides which, and the operating system only where the notebook says nothing: a light JupyterLab stays light on
a dark desktop. Sizes follow the width of the output, not of the window: a notebook beside other panes is narrow.
"""

from __future__ import annotations

import re
from functools import cache

SHADES = 5  # of blocks: the more prompts share a block, the higher its shade
SERIES = 11  # colours that tell things side by side apart

_HOSTS = {  # the names that VS Code and JupyterLab have for a colour
    "bg": ("--vscode-editor-background", "--jp-layout-color0"),
    "fg": ("--vscode-foreground", "--jp-content-font-color1"),
    "dim": ("--vscode-descriptionForeground", "--jp-content-font-color2"),
    "line": ("--vscode-panel-border", "--jp-border-color2"),
}
# "s" are shades, after ColorBrewer's YlGnBu, and "i" the ink that can be read on each. "c" are series, after Paul Tol's
# "bright" and "muted" (light) and "light" (dark), which colour-blind readers can tell apart, too.
_NAMES = "bg fg dim line own gain bad s1 i1 s2 i2 s3 i3 s4 i4 s5 i5 c0 c1 c2 c3 c4 c5 c6 c7 c8 c9 c10".split()
_LIGHT = """
#ffffff #1f2328 #616870 #dde1e6 #dfe2e6 #0f7a86 #b3261e
#b5e2c4 #10362a #5fc3c0 #06302f #1d80ab #ffffff #2860a8 #ffffff #1e3785 #ffffff
#3f74b5 #ee8866 #38a58c #aa4499 #ccb23c #62c0e0 #cc5a6e #117733 #8a8f98 #882255 #8b6b4a
"""
_DARK = """
#111418 #e8eaed #a4abb3 #3a4048 #42474f #5fd3c4 #ff8a80
#214d7a #ffffff #1f7a99 #ffffff #2fa8a0 #04211f #7fd0a0 #0a2a1a #cde58d #26300a
#77aadd #ee8866 #44bb99 #c988c0 #d9c766 #99ddff #ff9aad #a3c644 #b4b8c0 #e0709a #c9a47c
"""
_SAYS_LIGHT = "[data-jp-theme-light=true],.vscode-light,.vscode-high-contrast-light,[theme=light],[data-theme=light]"
_SAYS_DARK = (
    "[data-jp-theme-light=false],.vscode-dark,.vscode-high-contrast:not(.vscode-high-contrast-light),"
    "[theme=dark],[data-theme=dark]"
)

# Tables of Jupyter and VS Code have rules of their own, which `.hfb-view` before a name outweighs.
_RULES = """
style~.hfb-plain{display:none!important}
style~.hfb-view{display:block!important}
.hfb-view{container-type:inline-size;min-width:300px;max-width:1080px;box-sizing:border-box;padding:12px 14px;
 border-radius:6px;background:var(--hfb-bg);color:var(--hfb-fg);font-variant-numeric:tabular-nums;text-align:left;
 font:13px/1.45 var(--jp-ui-font-family,var(--vscode-font-family,system-ui,-apple-system,"Segoe UI",sans-serif))}
.hfb-view *{box-sizing:border-box}
.hfb-dim{color:var(--hfb-dim)}
.hfb-tile span,.hfb-key,.hfb-axis,.hfb-caption,summary{color:var(--hfb-dim);font-size:12px}
.hfb-y,.hfb-x,.hfb-nl,.hfb-image,.hfb-ids{color:var(--hfb-dim);font-size:11px}
.hfb-tile b,.hfb-tile span,.hfb-y,.hfb-x span,.hfb-in,.hfb-parts span,.hfb-parts em,.hfb-why{white-space:nowrap}
.hfb-note,.hfb-why{border:1px solid var(--hfb-line);border-radius:9px;padding:1px 7px;font-size:11px}
.hfb-text,.hfb-start{unicode-bidi:plaintext;overflow-wrap:anywhere;white-space:pre-wrap;text-align:start}
.hfb-clamp,.hfb-start{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:4;overflow:hidden}
.hfb-title{font-size:15px;font-weight:600;margin:0 0 10px}
.hfb-warn,.hfb-bad{color:var(--hfb-bad)}
.hfb-tiles{display:flex;flex-wrap:wrap;gap:8px 30px;margin:0 0 14px}
.hfb-tile b{display:block;font-size:21px;line-height:1.2;font-weight:600;letter-spacing:-.01em}
.hfb-gain b{color:var(--hfb-gain)}
.hfb-head{display:flex;flex-wrap:wrap;gap:2px 16px;justify-content:space-between;align-items:baseline;margin:14px 0 5px}
.hfb-head b{font-weight:600}
.hfb-key{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:center}
.hfb-key i,.hfb-parts i{display:inline-block;flex:none;width:11px;height:11px;border-radius:2px;align-self:center}
.hfb-key i{margin-right:5px;vertical-align:-1px}
.hfb-plot{position:relative;margin:0 0 0 54px}
.hfb-plot svg{display:block;width:100%;height:100%;max-width:none;overflow:visible;shape-rendering:crispEdges}
.hfb-y{position:absolute;right:100%;margin-right:7px;transform:translateY(-50%);line-height:1}
.hfb-x{position:relative;height:17px;margin:3px 0 0 54px;line-height:17px}
.hfb-x span{position:absolute;top:0;transform:translateX(-50%)}
.hfb-x .hfb-first{transform:none}
.hfb-x .hfb-last{transform:translateX(-100%)}
.hfb-axis{margin:0 0 0 54px;text-align:center}
.hfb-grid,.hfb-gap,.hfb-size{stroke:var(--hfb-line);stroke-width:1;vector-effect:non-scaling-stroke}
.hfb-gap{stroke:var(--hfb-bg)}
.hfb-size{stroke:var(--hfb-fg);stroke-dasharray:5 4}
.hfb-pale{fill-opacity:.22}
.hfb-hit{fill:transparent}
svg g:hover>.hfb-hit{fill:var(--hfb-dim);fill-opacity:.16}
svg g:hover>:not(.hfb-hit){filter:brightness(1.12)}
.hfb-cut,.hfb-note,.hfb-in{position:absolute;pointer-events:none}
.hfb-cut{left:0;right:0;bottom:-1px;height:7px;color:var(--hfb-bg);
 background:linear-gradient(135deg,transparent 5px,currentColor 5.5px) 0 0/10px 7px repeat-x,
 linear-gradient(225deg,transparent 5px,currentColor 5.5px) 0 0/10px 7px repeat-x}
.hfb-note{right:0;bottom:12px;background:var(--hfb-bg);max-width:100%}
.hfb-in{overflow:hidden;padding:3px 7px;font-size:12px;line-height:16px}
.hfb-in span{display:block;overflow:hidden;text-overflow:ellipsis}
.hfb-in .hfb-said{opacity:.85;font-size:11px;white-space:pre}
.hfb-caption{margin:8px 0 0;max-width:130ch}
.hfb-bar{display:flex;height:22px;gap:1px;border-radius:3px;overflow:hidden;background:var(--hfb-line)}
.hfb-bar span{min-width:1px}
.hfb-parts{display:grid;grid-template-columns:repeat(auto-fill,minmax(205px,1fr));gap:1px 26px;margin:7px 0 0;
 font-size:12px}
.hfb-parts div{display:flex;align-items:baseline;gap:6px}
.hfb-parts span{flex:1;overflow:hidden;text-overflow:ellipsis}
.hfb-parts em{font-style:normal;color:var(--hfb-dim);min-width:48px;text-align:right}
details{margin:12px 0 0}
summary{cursor:pointer}
summary:hover{color:var(--hfb-fg)}
summary+.hfb-tiles{margin-top:10px}
.hfb-view table{width:100%;margin:12px 0 0;border-collapse:collapse;border:0;font-size:12px;table-layout:auto;
 color:inherit}
.hfb-view table.hfb-narrow{width:auto}
.hfb-view thead{border:0}
.hfb-view tr,.hfb-view tbody tr:nth-child(n){background:transparent}
.hfb-view tbody tr:nth-child(n):hover{background:color-mix(in srgb,var(--hfb-fg) 5%,transparent)}
.hfb-view th,.hfb-view td{padding:5px 14px 5px 0;border:0;border-bottom:1px solid var(--hfb-line);text-align:left;
 vertical-align:top;font-weight:400;line-height:1.4;background:transparent;color:inherit;white-space:normal;
 max-width:none}
.hfb-view th,.hfb-view .hfb-fact{color:var(--hfb-dim);white-space:nowrap}
.hfb-view .hfb-num{text-align:right;white-space:nowrap}
.hfb-view tr>:last-child{padding-right:2px}
.hfb-view tbody tr:last-child>*,.hfb-view .hfb-rows td{border-bottom:0}
.hfb-view .hfb-rows tr:nth-child(n+2).hfb-group td,.hfb-view .hfb-more td{border-top:1px solid var(--hfb-line)}
.hfb-more td{color:var(--hfb-dim);text-align:center}
.hfb-view .hfb-results .hfb-prompt{width:34%}
.hfb-view .hfb-results .hfb-answer{width:52%}
.hfb-view .hfb-scores .hfb-prompt{width:38%}
.hfb-scores .hfb-answer,.hfb-ids{overflow-wrap:anywhere}
.hfb-start{-webkit-line-clamp:1}
.hfb-nl{opacity:.75}
.hfb-why{display:inline-block;padding:0 7px;line-height:16px}
.hfb-error{color:var(--hfb-bad);border-color:currentColor}
.hfb-images{display:flex;flex-wrap:wrap;gap:4px;align-items:center;margin:0 0 3px}
.hfb-view .hfb-thumb{height:36px;width:auto;max-width:84px;margin:0}
.hfb-view .hfb-thumb,.hfb-image{border-radius:3px;border:1px solid var(--hfb-line)}
.hfb-image{padding:0 4px}
.hfb-ids{font-family:var(--jp-code-font-family,var(--vscode-editor-font-family,monospace))}
.hfb-share{display:inline-block;min-width:60px}
.hfb-among{display:inline-block;width:64px;height:8px;margin-right:8px;border-radius:2px;overflow:hidden;
 background:color-mix(in srgb,var(--hfb-line) 55%,transparent)}
.hfb-among i{display:block;height:100%}
"""
# Rows of answers, and those of scores below their contexts, become a few lines each.
_NARROW = """
.hfb-tiles{gap:8px 12px}
.hfb-tile b{font-size:16px}
.hfb-key{gap:2px 8px}
.hfb-tile span{font-size:11px}
.hfb-wide,.hfb-among{display:none}
.hfb-view th,.hfb-view td{padding-right:9px}
.hfb-view th{white-space:normal;vertical-align:bottom}
.hfb-view .hfb-folds tr{display:grid;gap:4px 10px;padding:6px 0;
 grid-template:"at ask ask" "of say say" ". why new" / auto 1fr auto}
.hfb-view .hfb-scores.hfb-folds tr{gap:3px 8px;padding:1px 0;grid-template:"at ask ask" ". say new" / 30px 1fr auto}
.hfb-view .hfb-folds td,.hfb-view .hfb-folds th{display:block;width:auto!important;padding:0!important;
 border:0!important;min-width:16px}
.hfb-view .hfb-folds .hfb-at{grid-area:at}
.hfb-view .hfb-folds .hfb-prompt{grid-area:ask;color:var(--hfb-dim)}
.hfb-view .hfb-folds .hfb-sample{grid-area:of}
.hfb-view .hfb-folds .hfb-answer{grid-area:say}
.hfb-view .hfb-folds .hfb-ended{grid-area:why}
.hfb-view .hfb-folds .hfb-new{grid-area:new}
.hfb-view .hfb-folds tr.hfb-more{display:block}
.hfb-view .hfb-folds tr:nth-child(n+2).hfb-group{border-top:1px solid var(--hfb-line)}
.hfb-view .hfb-scores.hfb-folds .hfb-group{padding-top:6px}
.hfb-view .hfb-folds thead .hfb-at,.hfb-view .hfb-folds .hfb-wide,.hfb-view .hfb-results thead{display:none}
.hfb-view .hfb-results .hfb-new:after{content:" tokens";color:var(--hfb-dim)}
"""


def _palette(colours: str) -> str:
    values = dict(zip(_NAMES, colours.split(), strict=True))
    values |= {name: f"var({code},var({jupyter},{values[name]}))" for name, (code, jupyter) in _HOSTS.items()}
    return ";".join(f"--hfb-{name}:{value}" for name, value in values.items())


def _scoped(rules: str) -> str:
    """The rules, for what is inside a view alone."""
    flat = rules.replace("\n ", " ").replace("\n", "")
    return re.sub(r"([^{}]+)(?={)", lambda selectors: ",".join(f".hfb {one}" for one in selectors[0].split(",")), flat)


@cache
def style() -> str:
    light, dark = _palette(_LIGHT), _palette(_DARK)
    filling = [name for name in _NAMES if name[0] in "osc"]
    fills = [f".hfb-{name}{{fill:var(--hfb-{name});background:var(--hfb-{name})}}" for name in filling]
    fills += [f".hfb-i{at}{{color:var(--hfb-i{at})}}" for at in range(1, SHADES + 1)]
    line = "fill:none;stroke-width:1.5;vector-effect:non-scaling-stroke"
    fills += [f".hfb-l{at}{{stroke:var(--hfb-c{at});{line}}}" for at in range(SERIES)]
    system = f":where(:root:not(:is({_SAYS_LIGHT}))) :where(body:not(:is({_SAYS_LIGHT}))) .hfb{{{dark}}}"
    return (
        f"<style>.hfb{{{light}}}@media (prefers-color-scheme:dark){{{system}}}:is({_SAYS_DARK}) .hfb{{{dark}}}"
        f"{_scoped(''.join(fills) + _RULES)}@container (max-width:560px){{{_scoped(_NARROW)}}}</style>"
    )
