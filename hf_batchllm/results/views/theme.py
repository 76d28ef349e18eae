"""The views' style sheet.

JupyterLab and VS Code publish their own colours, which are used; elsewhere there is a light and a dark set. The
notebook decides which, and the operating system only where the notebook says nothing: a light JupyterLab stays light on
a dark desktop. Background and text always come from the same source.

Sizes follow the width of the output, not of the window: a notebook beside other panes is narrow.
"""

from __future__ import annotations

SHADES = 5  # of blocks: the more prompts share a block, the higher its shade
SERIES = 11  # colours that tell things side by side apart

# (fill, readable text colour). Light to dark, after ColorBrewer's YlGnBu; dark to light on a dark background.
_LIGHT_SHADES = (
    ("#b5e2c4", "#10362a"),
    ("#5fc3c0", "#06302f"),
    ("#1d80ab", "#ffffff"),
    ("#2860a8", "#ffffff"),
    ("#1e3785", "#ffffff"),
)
_DARK_SHADES = (
    ("#214d7a", "#ffffff"),
    ("#1f7a99", "#ffffff"),
    ("#2fa8a0", "#04211f"),
    ("#7fd0a0", "#0a2a1a"),
    ("#cde58d", "#26300a"),
)
# After Paul Tol's "bright" and "muted" (light) and "light" (dark), which colour-blind readers can tell apart, too.
_LIGHT_SERIES = "#3f74b5 #ee8866 #38a58c #aa4499 #ccb23c #62c0e0 #cc5a6e #117733 #8a8f98 #882255 #8b6b4a".split()
_DARK_SERIES = "#77aadd #ee8866 #44bb99 #c988c0 #d9c766 #99ddff #ff9aad #a3c644 #b4b8c0 #e0709a #c9a47c".split()


def _palette(ground: str, text: str, dim: str, line: str, own: str, dark: bool) -> str:
    shades, series = (_DARK_SHADES, _DARK_SERIES) if dark else (_LIGHT_SHADES, _LIGHT_SERIES)
    pairs = {"bg": ground, "fg": text, "dim": dim, "line": line, "own": own}
    pairs |= {f"s{at}": fill for at, (fill, _) in enumerate(shades, 1)}
    pairs |= {f"i{at}": ink for at, (_, ink) in enumerate(shades, 1)}
    pairs |= {f"c{at}": colour for at, colour in enumerate(series)}
    pairs["gain"] = "#5fd3c4" if dark else "#0f7a86"
    pairs["bad"] = "#ff8a80" if dark else "#b3261e"
    return ";".join(f"--hfb-{name}:{value}" for name, value in pairs.items())


def _jupyter(ground: str, text: str, dim: str, line: str, own: str, dark: bool) -> str:
    return _palette(
        f"var(--jp-layout-color0,{ground})",
        f"var(--jp-content-font-color1,{text})",
        f"var(--jp-content-font-color2,{dim})",
        f"var(--jp-border-color2,{line})",
        own,
        dark,
    )


_LIGHT = _jupyter("#ffffff", "#1f2328", "#616870", "#dde1e6", "#dfe2e6", False)
_DARK = _jupyter("#111418", "#e8eaed", "#a4abb3", "#3a4048", "#42474f", True)
_CODE = ("var(--vscode-editor-background,{})", "var(--vscode-foreground,{})")
_CODE_LIGHT = _palette(_CODE[0].format("#fff"), _CODE[1].format("#333"), "#636a72", "#dde1e6", "#dfe2e6", False)
_CODE_DARK = _palette(_CODE[0].format("#1f1f1f"), _CODE[1].format("#ccc"), "#a4abb3", "#3a4048", "#484d55", True)

_SAYS_LIGHT = "[data-jp-theme-light=true],.vscode-light,.vscode-high-contrast-light,[theme=light],[data-theme=light]"

_RULES = """
.hfb style~.hfb-plain{display:none!important}
.hfb style~.hfb-view{display:block!important}
.hfb .hfb-view{container-type:inline-size;min-width:300px;max-width:1080px;
 box-sizing:border-box;padding:12px 14px;border-radius:6px;background:var(--hfb-bg);color:var(--hfb-fg);
 font:13px/1.45 var(--jp-ui-font-family,var(--vscode-font-family,system-ui,-apple-system,"Segoe UI",sans-serif));
 font-variant-numeric:tabular-nums;text-align:left}
.hfb .hfb-view *{box-sizing:border-box}
.hfb .hfb-title{font-size:15px;font-weight:600;margin:0 0 10px}
.hfb .hfb-warn{color:var(--hfb-bad);font-weight:600}
.hfb .hfb-dim{color:var(--hfb-dim)}
.hfb .hfb-tiles{display:flex;flex-wrap:wrap;gap:8px 30px;margin:0 0 14px}
.hfb .hfb-tile b{display:block;font-size:21px;line-height:1.2;font-weight:600;letter-spacing:-.01em;white-space:nowrap}
.hfb .hfb-tile span{color:var(--hfb-dim);font-size:12px;white-space:nowrap}
.hfb .hfb-gain b{color:var(--hfb-gain)}
.hfb .hfb-head{display:flex;flex-wrap:wrap;gap:2px 16px;justify-content:space-between;align-items:baseline;
 margin:14px 0 5px}
.hfb .hfb-head b{font-weight:600}
.hfb .hfb-key{display:flex;flex-wrap:wrap;gap:2px 12px;color:var(--hfb-dim);font-size:12px;align-items:center}
.hfb .hfb-key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px}
.hfb .hfb-plot{position:relative;margin:0 0 0 54px}
.hfb .hfb-plot svg{display:block;width:100%;height:100%;max-width:none;overflow:visible;shape-rendering:crispEdges}
.hfb .hfb-y{position:absolute;right:100%;margin-right:7px;transform:translateY(-50%);line-height:1;
 color:var(--hfb-dim);font-size:11px;white-space:nowrap}
.hfb .hfb-x{position:relative;height:17px;margin:3px 0 0 54px;color:var(--hfb-dim);font-size:11px;line-height:17px}
.hfb .hfb-x span{position:absolute;top:0;transform:translateX(-50%);white-space:nowrap}
.hfb .hfb-x .hfb-first{transform:none}
.hfb .hfb-x .hfb-last{transform:translateX(-100%)}
.hfb .hfb-axis{margin:0 0 0 54px;color:var(--hfb-dim);font-size:12px;text-align:center}
.hfb .hfb-axis-y{color:var(--hfb-dim);font-size:12px;margin:0 0 6px}
.hfb .hfb-grid{stroke:var(--hfb-line);stroke-width:1;vector-effect:non-scaling-stroke}
.hfb .hfb-gap{stroke:var(--hfb-bg);stroke-width:1;vector-effect:non-scaling-stroke}
.hfb .hfb-own{fill:var(--hfb-own);background:var(--hfb-own)}
.hfb .hfb-pale{fill-opacity:.22}
.hfb .hfb-size{stroke:var(--hfb-fg);stroke-width:1;stroke-dasharray:5 4;vector-effect:non-scaling-stroke}
.hfb .hfb-hit{fill:transparent}
.hfb svg g:hover>.hfb-hit{fill:var(--hfb-dim);fill-opacity:.16}
.hfb svg g:hover>:not(.hfb-hit){filter:brightness(1.12)}
.hfb .hfb-cut{position:absolute;left:0;right:0;bottom:-1px;height:7px;color:var(--hfb-bg);pointer-events:none;
 background:linear-gradient(135deg,transparent 5px,currentColor 5.5px) 0 0/10px 7px repeat-x,
 linear-gradient(225deg,transparent 5px,currentColor 5.5px) 0 0/10px 7px repeat-x}
.hfb .hfb-note{position:absolute;right:0;bottom:12px;padding:1px 7px;border-radius:9px;background:var(--hfb-bg);
 color:var(--hfb-fg);font-size:11px;border:1px solid var(--hfb-line);pointer-events:none;max-width:100%}
.hfb .hfb-in{position:absolute;overflow:hidden;padding:3px 7px;font-size:12px;line-height:16px;pointer-events:none;
 white-space:nowrap}
.hfb .hfb-in span{display:block;overflow:hidden;text-overflow:ellipsis}
.hfb .hfb-in .hfb-said{opacity:.85;font-size:11px;white-space:pre}
.hfb .hfb-caption{color:var(--hfb-dim);font-size:12px;margin:8px 0 0;max-width:130ch}
.hfb .hfb-bar{display:flex;height:22px;gap:1px;border-radius:3px;overflow:hidden;background:var(--hfb-line)}
.hfb .hfb-bar span{min-width:1px}
.hfb .hfb-parts{display:grid;grid-template-columns:repeat(auto-fill,minmax(205px,1fr));gap:1px 26px;margin:7px 0 0;
 font-size:12px}
.hfb .hfb-parts div{display:flex;align-items:baseline;gap:6px}
.hfb .hfb-parts i{flex:none;width:11px;height:11px;border-radius:2px;align-self:center}
.hfb .hfb-parts span{flex:1;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.hfb .hfb-parts em{font-style:normal;color:var(--hfb-dim);white-space:nowrap;min-width:48px;text-align:right}
.hfb details{margin:12px 0 0}
.hfb summary{cursor:pointer;color:var(--hfb-dim);font-size:12px}
.hfb summary+.hfb-tiles{margin-top:10px}
.hfb summary:hover{color:var(--hfb-fg)}
.hfb .hfb-view table{width:100%;margin:12px 0 0;border-collapse:collapse;border:0;font-size:12px;table-layout:auto;
 color:inherit}
.hfb .hfb-view table.hfb-narrow{width:auto}
.hfb .hfb-fact{color:var(--hfb-dim);white-space:nowrap}
.hfb .hfb-view thead{border:0}
.hfb .hfb-view tr,.hfb .hfb-view tbody tr:nth-child(n){background:transparent}
.hfb .hfb-view tbody tr:nth-child(n):hover{background:color-mix(in srgb,var(--hfb-fg) 5%,transparent)}
.hfb .hfb-view th,.hfb .hfb-view td{padding:5px 14px 5px 0;border:0;border-bottom:1px solid var(--hfb-line);
 text-align:left;vertical-align:top;font-weight:400;line-height:1.4;background:transparent;color:inherit;
 white-space:normal;max-width:none}
.hfb .hfb-view th{color:var(--hfb-dim);white-space:nowrap}
.hfb .hfb-view tr>:last-child{padding-right:2px}
.hfb .hfb-view tbody tr:last-child>*{border-bottom:0}
.hfb .hfb-view .hfb-num{text-align:right;white-space:nowrap}
.hfb .hfb-view .hfb-text{unicode-bidi:plaintext;overflow-wrap:anywhere;white-space:pre-wrap;
 text-align:start}
.hfb .hfb-clamp{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:4;overflow:hidden}
.hfb .hfb-nl{color:var(--hfb-dim);opacity:.75;font-size:11px}
.hfb .hfb-why{display:inline-block;padding:0 7px;border-radius:9px;font-size:11px;line-height:16px;
 border:1px solid var(--hfb-line);white-space:nowrap}
.hfb .hfb-error{color:var(--hfb-bad);border-color:currentColor}
.hfb .hfb-view .hfb-rows td{border-bottom:0}
.hfb .hfb-view .hfb-rows tr:nth-child(n+2).hfb-group td,.hfb .hfb-view .hfb-rows .hfb-more td{
 border-top:1px solid var(--hfb-line)}
.hfb .hfb-view .hfb-rows .hfb-prompt{width:34%}
.hfb .hfb-view .hfb-rows .hfb-answer{width:52%}
.hfb .hfb-start{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:1;overflow:hidden;
 overflow-wrap:anywhere;white-space:pre-wrap;unicode-bidi:plaintext;text-align:start}
.hfb .hfb-bad{color:var(--hfb-bad)}
.hfb .hfb-images{display:flex;flex-wrap:wrap;gap:4px;align-items:center;margin:0 0 3px}
.hfb .hfb-view img.hfb-thumb{height:36px;width:auto;max-width:84px;margin:0;border-radius:3px;
 border:1px solid var(--hfb-line)}
.hfb .hfb-image{font-size:11px;color:var(--hfb-dim);border:1px solid var(--hfb-line);border-radius:3px;padding:0 4px}
.hfb .hfb-ids{font-family:var(--jp-code-font-family,var(--vscode-editor-font-family,monospace));font-size:11px;
 color:var(--hfb-dim);overflow-wrap:anywhere}
.hfb .hfb-view .hfb-scores td{border-bottom:0}
.hfb .hfb-view .hfb-scores tr:nth-child(n+2).hfb-group td,.hfb .hfb-view .hfb-scores .hfb-more td{
 border-top:1px solid var(--hfb-line)}
.hfb .hfb-view .hfb-scores .hfb-context{width:38%}
.hfb .hfb-view .hfb-scores .hfb-said-choice{overflow-wrap:anywhere}
.hfb .hfb-among{display:inline-block;width:64px;height:8px;margin-right:8px;border-radius:2px;overflow:hidden;
 background:color-mix(in srgb,var(--hfb-line) 55%,transparent)}
.hfb .hfb-share{display:inline-block;min-width:60px}
.hfb .hfb-among i{display:block;height:100%}
.hfb .hfb-more td{color:var(--hfb-dim);text-align:center}
@container (max-width:560px){
.hfb .hfb-tiles{gap:8px 12px}
.hfb .hfb-tile b{font-size:16px}
.hfb .hfb-key{gap:2px 8px}
.hfb .hfb-tile span{font-size:11px}
.hfb .hfb-wide,.hfb .hfb-among{display:none}
.hfb .hfb-view th,.hfb .hfb-view td{padding-right:9px}
.hfb .hfb-view th{white-space:normal;vertical-align:bottom}
.hfb .hfb-view .hfb-rows thead{display:none}
.hfb .hfb-view .hfb-rows tr{display:grid;grid-template:"at ask ask" "of say say" ". why new" / auto 1fr auto;
 gap:4px 10px;padding:6px 0}
.hfb .hfb-view .hfb-rows tr:nth-child(n+2).hfb-group{border-top:1px solid var(--hfb-line)}
.hfb .hfb-view .hfb-rows td{display:block;width:auto!important;padding:0!important;border:0!important;min-width:16px}
.hfb .hfb-view .hfb-rows .hfb-at{grid-area:at}
.hfb .hfb-view .hfb-rows .hfb-prompt{grid-area:ask;color:var(--hfb-dim)}
.hfb .hfb-view .hfb-rows .hfb-sample{grid-area:of}
.hfb .hfb-view .hfb-rows .hfb-answer{grid-area:say}
.hfb .hfb-view .hfb-rows .hfb-ended{grid-area:why}
.hfb .hfb-view .hfb-rows .hfb-new{grid-area:new}
.hfb .hfb-view .hfb-rows .hfb-new:after{content:" tokens";color:var(--hfb-dim)}
.hfb .hfb-view .hfb-rows .hfb-more,.hfb .hfb-view .hfb-named .hfb-more{display:block}
.hfb .hfb-view .hfb-named tr{display:grid;grid-template:"at ask ask" ". say fig" / 30px 1fr auto;gap:3px 8px;
 padding:1px 0}
.hfb .hfb-view .hfb-named td,.hfb .hfb-view .hfb-named th{display:block;width:auto!important;padding:0!important;
 border:0!important;grid-row:2}
.hfb .hfb-view .hfb-named .hfb-num:not(.hfb-at){grid-area:fig}
.hfb .hfb-view .hfb-named .hfb-said-choice,.hfb .hfb-view .hfb-named th:nth-child(2){grid-area:say}
.hfb .hfb-view .hfb-named .hfb-at{grid-area:at}
.hfb .hfb-view .hfb-named .hfb-context{grid-area:ask;color:var(--hfb-dim)}
.hfb .hfb-view .hfb-named .hfb-wide,.hfb .hfb-view .hfb-named th:first-child{display:none}
.hfb .hfb-view .hfb-named .hfb-group{padding-top:6px}
.hfb .hfb-view .hfb-named tr:nth-child(n+2).hfb-group{border-top:1px solid var(--hfb-line)}
}
"""


def _style() -> str:
    colours = (
        f".hfb{{{_LIGHT}}}"
        f"@media (prefers-color-scheme:dark){{:where(:root:not(:is({_SAYS_LIGHT}))) "
        f":where(body:not(:is({_SAYS_LIGHT}))) .hfb{{{_DARK}}}}}"
        f":is([data-jp-theme-light=false],[theme=dark],[data-theme=dark]) .hfb{{{_DARK}}}"
        f":is(.vscode-light,.vscode-high-contrast-light) .hfb{{{_CODE_LIGHT}}}"
        f":is(.vscode-dark,.vscode-high-contrast:not(.vscode-high-contrast-light)) .hfb{{{_CODE_DARK}}}"
    )
    fills = "".join(
        f".hfb .hfb-s{at}{{fill:var(--hfb-s{at});background:var(--hfb-s{at})}}.hfb .hfb-i{at}{{color:var(--hfb-i{at})}}"
        for at in range(1, SHADES + 1)
    )
    fills += "".join(
        f".hfb .hfb-c{at}{{fill:var(--hfb-c{at});background:var(--hfb-c{at})}}"
        f".hfb .hfb-l{at}{{fill:none;stroke:var(--hfb-c{at});stroke-width:1.5;vector-effect:non-scaling-stroke}}"
        for at in range(SERIES)
    )
    return colours + fills + _RULES.replace("\n ", " ").replace("\n", "")


STYLE = f"<style>{_style()}</style>"
