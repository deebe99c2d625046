"""The style of the page of dashboards, light and dark, phone and desktop, and how its elements are written."""

from __future__ import annotations

from markupsafe import Markup, escape


def element(name: str, /, *children: str | Markup | None, **attributes: str | float | None) -> Markup:
    """Builds one element; strings are escaped, None is left out.

    `class_` is the attribute class, `stroke_width` stroke-width; numbers have two decimals.
    """
    texts = {
        key.rstrip("_").replace("_", "-"): value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        for key, value in attributes.items()
        if value is not None
    }
    start = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in texts.items())
    inner = Markup("").join(escape(child) for child in children if child is not None)
    end = "" if name == "meta" else Markup("</{}>").format(name)
    return Markup("<{}{}>").format(name, start) + inner + end


STYLE = Markup(
    """
:root{color-scheme:light dark;--ground:#f4f5f7;--card:#fff;--ink:#1b2430;--soft:#566273;--rule:#dfe3ea;--notice:#fff4d6;
--s0:#146c43;--s1:#b7791f;--s2:#1f6fc4;--s3:#c2410c;--s4:#b3261e;--s5:#7a3fb5;--s6:#0f7f8c;--s7:#8a6d1d;--s8:#5a6b7d;--s9:#a8327a;
--green:#146c43;--orange:#b45309;--red:#b3261e;--blue:#1f6fc4;--text:#1b2430;--heat:#d9480f;--incident:#b3261e;--spell:#f59e0b}
@media (prefers-color-scheme:dark){:root{--ground:#111217;--card:#181b1f;--ink:#e3e6ec;--soft:#a2acba;--rule:#2c323b;--notice:#3a2f10;
--s0:#73bf69;--s1:#f2cc0c;--s2:#6ea8fe;--s3:#ff9830;--s4:#ff7383;--s5:#c58af9;--s6:#4fd1d9;--s7:#d6b656;--s8:#9fb0c3;--s9:#f07fc0;
--green:#73bf69;--orange:#ff9830;--red:#ff7383;--blue:#6ea8fe;--text:#e3e6ec;--heat:#ff8a3d;--incident:#ff7383;--spell:#ff9830}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1280px;margin:0 auto;padding:16px}
.notice{background:var(--notice);border-radius:6px;padding:10px 14px;margin:0 0 14px}
h1{font-size:22px;margin:0 0 4px}.grid+h1,details+h1{margin-top:32px}h2{grid-column:1/-1;font-size:16px;margin:14px 0 0}h3{font-size:14px;margin:0;font-weight:600}
.grid{display:grid;grid-template-columns:repeat(24,minmax(0,1fr));gap:8px}
.panel{background:var(--card);border:1px solid var(--rule);border-radius:4px;padding:8px 10px;min-width:0}
.about{color:var(--soft);font-size:12px;margin:0 0 4px;min-height:35px}
svg{width:100%;height:auto;display:block}.narrow{display:none}
svg text{fill:var(--soft);font-size:11px}.end{text-anchor:end}.middle{text-anchor:middle}
.rule{stroke:var(--rule);stroke-width:1}.line{fill:none;stroke-width:1.6;stroke-linejoin:round}.nothing{font-size:14px}
.area{fill-opacity:.75}.bound{stroke-width:1;stroke-dasharray:6 4}table{width:100%;border-collapse:collapse}td{padding:3px 0;border-bottom:1px solid var(--rule)}td+td{text-align:right}
.numbers{display:flex;flex-wrap:wrap;gap:4px 22px}details{margin-top:14px}summary{font-size:16px;font-weight:600;cursor:pointer;margin-bottom:8px}
.incident{stroke:var(--incident);stroke-width:1.2;stroke-dasharray:4 3}.spell{fill:var(--spell);fill-opacity:.16}.cell{fill:var(--heat)}
.key{display:flex;flex-wrap:wrap;gap:2px 12px;list-style:none;padding:0;margin:4px 0 0;font-size:12px;color:var(--soft);overflow-wrap:anywhere}
.key i{display:inline-block;width:12px;height:3px;margin-right:5px;vertical-align:middle}.key b{color:var(--ink);font-weight:500}
.number{font-size:26px;font-weight:600;line-height:1.15;overflow-wrap:anywhere}.number small{display:block;font-size:13px;font-weight:500}
@media (max-width:760px){main{padding:10px}.grid{grid-template-columns:repeat(2,minmax(0,1fr))}.panel{grid-column:1/-1!important}
.panel.stat{grid-column:span 1!important}.wide{display:none}.narrow{display:block}.about{min-height:0}}
"""
)
