"""Contains the report page's style: light and dark, phone and desktop.

A constant in the page itself: the file is mailed and kept, and must not ask a server how it looks.
"""

from __future__ import annotations

from surefoot_operator.cli.report.markup import Markup

STYLE = Markup(
    """
:root{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#586474;--rule:#dde2e9;--band:#eef2f8;--band-odd:#e0e8f3;
--kept:#0b5cad;--undisturbed:#e8b25a;--discarded:#b3261e;--stall:#0b5cad;--mark:#b3261e;--planned:#4d5b6b;--good:#146c43;--bad:#b3261e;
--c1:#8a94a3;--c2:#5b8def;--c3:#e39b2f;--c4:#2f9e77;--c5:#b86fb0;--c6:#d9662b;--c7:#9fb3c8;--c8:#cfd6df;--c9:#c9b458;--c10:#b0b7c1;--on:#10151c}
@media (prefers-color-scheme:dark){:root{--ground:#11151b;--card:#1a2029;--ink:#e6eaf0;--soft:#a3aebd;--rule:#2e3743;--band:#1f2733;
--band-odd:#27313f;--kept:#7fb8ff;--undisturbed:#8a6420;--discarded:#ff9c93;--stall:#7fb8ff;--mark:#ff9c93;--planned:#aab6c5;--good:#6fd3a0;
--bad:#ff9c93;--c1:#8a94a3;--c2:#7aa5f5;--c3:#e6ad55;--c4:#55bd98;--c5:#cc92c5;--c6:#e88a5a;--c7:#7d94ad;--c8:#66727f;--c9:#d3c06b;--c10:#8b949f}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 48px}
header h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
header p{margin:2px 0;color:var(--soft);overflow-wrap:anywhere}
.outcome{display:inline-block;margin-left:10px;padding:2px 12px;border-radius:99px;border:1.5px solid currentColor;font-size:14px;font-weight:600;
vertical-align:middle;color:var(--soft)}
.outcome.good{color:var(--good)}.outcome.bad{color:var(--bad)}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 20px;margin-top:18px}
h2{font-size:18px;margin:0 0 10px}h3{font-size:15px;margin:0;overflow-wrap:anywhere}
p{margin:6px 0}.soft,.caption{color:var(--soft)}.caption{font-size:13.5px}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px;margin:18px 0 0;padding:0}
.figures div{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.figures dt{color:var(--soft);font-size:13px}.figures dd{margin:2px 0 0;font-size:20px;font-weight:600;line-height:1.25;overflow-wrap:anywhere}
.figures dd small{display:block;font-size:12.5px;font-weight:400;color:var(--soft)}
.chart{width:100%;height:auto;display:block}.narrow{display:none}
.chart text{fill:var(--soft);font-size:12px}.end{text-anchor:end}.middle,.band-label{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}.band{fill:var(--band)}.band.odd{fill:var(--band-odd)}
.curve{fill:none;stroke-linejoin:round;stroke-linecap:round}
.curve.kept{stroke:var(--kept);stroke-width:1.8}.curve.undisturbed{stroke:var(--undisturbed);stroke-width:7}
.curve.discarded{stroke:var(--discarded);stroke-width:4;stroke-dasharray:.1 6.5}.curve.stall{stroke:var(--stall);stroke-width:1.8}
.dot{fill:var(--kept)}.dot.undisturbed{fill:var(--undisturbed)}.dot.discarded{fill:var(--discarded)}
.mark line{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:5 4}.mark rect{fill:var(--mark)}.mark text{fill:var(--card);font-weight:700;text-anchor:middle}
.mark.planned line{stroke:var(--planned)}.mark.planned rect{fill:var(--planned)}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:8px 0 0;font-size:13.5px;color:var(--soft)}
.key li{display:flex;align-items:center;gap:7px}.key svg{width:30px;height:14px;flex:none}
.incident{border-top:1px solid var(--rule);padding:14px 0}.incident:first-of-type{border-top:0}
.incident header{display:flex;gap:10px;align-items:flex-start}
.number{flex:none;min-width:26px;height:26px;padding:0 6px;border-radius:13px;background:var(--mark);color:var(--card);font-weight:700;text-align:center;line-height:26px}
.number.planned{background:var(--planned);border-radius:4px}
.bar{width:100%;height:26px;display:block;margin:10px 0 8px}
.bar text{font-size:12px;font-weight:700;fill:var(--on);text-anchor:middle}
.c1{fill:var(--c1);background:var(--c1)}.c2{fill:var(--c2);background:var(--c2)}.c3{fill:var(--c3);background:var(--c3)}
.c4{fill:var(--c4);background:var(--c4)}.c5{fill:var(--c5);background:var(--c5)}.c6{fill:var(--c6);background:var(--c6)}.c7{fill:var(--c7);background:var(--c7)}.c8{fill:var(--c8);background:var(--c8)}
.c9{fill:var(--c9);background:var(--c9)}.c10{fill:var(--c10);background:var(--c10)}
.swatch{display:inline-block;min-width:20px;border-radius:3px;color:var(--on);font-weight:700;font-size:12px;text-align:center}
.bar rect{stroke:var(--card);stroke-width:1}
.table{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--soft);font-weight:500;font-size:13px}th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child td,tr:last-child th[scope=row]{border-bottom:0}.tight table{width:auto}.tight td,.tight th{white-space:nowrap;padding-right:26px}.pairs th{width:220px;padding-right:18px}h3+.table{margin-top:4px}.table+h3{margin-top:16px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12.5px;background:var(--ground);padding:10px;border-radius:6px;max-height:320px;overflow:auto}
details summary{cursor:pointer;color:var(--soft)}
footer{color:var(--soft);font-size:13px;margin-top:18px;overflow-wrap:anywhere}
@media (max-width:640px){main{padding:14px 10px 32px}section{padding:14px 12px}.wide{display:none}.narrow{display:block}header h1{font-size:21px}
.figures{grid-template-columns:repeat(2,1fr);gap:8px}.figures dd{font-size:17px}th,td{padding-right:10px}.tight td,.tight th{padding-right:16px}.pairs th{width:38%}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
)
