"""The page's looks, light and dark, and the few lines of script that read a moment off the picture."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1a1f26;--soft:#5a6472;--rule:#d9dee5;--panel:#f5f7f9;--accent:#0059a8;
--good:#00704f;--bad:#b3370a;--limit:#b00020}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--ink:#e8ecf1;--soft:#a3aebb;--rule:#39424d;--panel:#1d232a;
--accent:#6fb7f0;--good:#4cc79c;--bad:#ff9466;--limit:#ff7a8c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:70rem;margin:0 auto;padding:1rem 1rem 3rem}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--rule)}
p{margin:.4rem 0;max-width:46rem;overflow-wrap:anywhere}
.sub,.axis,.note{color:var(--soft)}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;margin:1rem 0;padding:0}
.facts div{background:var(--panel);border-radius:.4rem;padding:.5rem .75rem;min-width:0}
.facts dt{color:var(--soft);font-size:.85rem}.facts dd{margin:0;font-size:1.1rem;font-weight:600;overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:minmax(0,1.7fr) minmax(0,1fr);gap:1.5rem;align-items:start}
.pair.even{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}
.pair>div,.stack>*{min-width:0}
.chart{padding:1.4rem .5rem 0 4.4rem}
.chart.bare{padding:0}
.plot{position:relative;height:20rem}
.plot.strip{height:2.6rem;margin-bottom:1.5rem}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot.strip rect{stroke:var(--bg);stroke-width:1px;vector-effect:non-scaling-stroke}
.grid,.border,.limit,.peakline,.leader{vector-effect:non-scaling-stroke;stroke:var(--rule);stroke-width:1px}
.border{stroke:var(--ink);stroke-opacity:.45;stroke-dasharray:2 3}
.limit{stroke:var(--limit);stroke-width:2px}.limit.allowed{stroke-dasharray:8 4}.limit.reserved{stroke-dasharray:2 3}
.peakline{stroke:var(--ink);stroke-opacity:.7}
.peakring,.peakdot,.mark{vector-effect:non-scaling-stroke;stroke-linecap:round;fill:none}
.peakring{stroke:var(--bg);stroke-width:13px}.peakdot{stroke:var(--ink);stroke-width:9px}
.peaklabel{position:absolute;margin:0 .5rem .45rem;padding:.05rem .4rem;border-radius:.3rem;background:var(--ink);
color:var(--bg);font-size:.85rem;font-weight:600;white-space:nowrap}
.tick{position:absolute;color:var(--soft);font-size:.78rem;white-space:nowrap}
.tick.y{right:calc(100% + .4rem);transform:translateY(50%)}
.tick.x{top:calc(100% + .15rem);transform:translateX(-50%)}
.axis{font-size:.8rem;text-align:right;margin:1.4rem 0 0;max-width:none}
.phase,.run{position:absolute;font-size:.78rem;text-align:center;white-space:nowrap}
.phase{bottom:calc(100% + .1rem);overflow:hidden}.run{top:calc(100% + .1rem);color:var(--soft)}
.reading{font-size:.85rem;background:var(--panel);border-radius:.3rem;padding:.2rem .5rem;max-width:none;
min-height:3.4em}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem .9rem;margin:.5rem 0;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:.4rem}
.chip{width:.85rem;height:.85rem;border-radius:.15rem;border:1px solid var(--soft)}
.stroke{width:1.6rem;border-top:2px dashed var(--limit)}.stroke.reserved{border-top-style:dotted}
.leader{stroke:var(--soft)}
.mark.outer{stroke:var(--accent);stroke-width:11px}.mark.inner{stroke:var(--accent);stroke-width:6px}
.mark.inner.large{stroke:var(--bg)}.mark.outer.large{stroke:var(--bad)}
.mark.outer.chosen{stroke:var(--good);stroke-width:17px}.mark.inner.chosen{stroke:var(--bg);stroke-width:8px}
.key{width:.85rem;height:.85rem;border-radius:50%;background:var(--accent)}
.key.large{background:var(--bg);border:3px solid var(--bad)}
.key.chosen{background:var(--bg);border:4px solid var(--good)}
.label{position:absolute;transform:translate(-50%,50%);font-size:.8rem;line-height:1;font-weight:600;padding:0 .12rem;
background:var(--bg)}
.label.chosen{color:var(--good)}.label.large{color:var(--bad)}
.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.88rem;margin:0 0 1rem}
caption{text-align:left;color:var(--soft);font-size:.85rem;padding-bottom:.2rem}
th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--rule);font-weight:400}
th,td{vertical-align:top}
thead th{color:var(--soft);font-size:.8rem}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
code{font:.88em ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
footer{margin-top:2.5rem;color:var(--soft);font-size:.85rem}
@media(max-width:62rem){.pair.even{grid-template-columns:minmax(0,1fr)}}
@media(max-width:46rem){.pair,.pair.even{grid-template-columns:minmax(0,1fr);gap:.5rem}.plot{height:17rem}}
@media print{.scroll{overflow:visible}}
"""

# Without it the page only lacks the line that names the moment under the pointer.
SCRIPT = """
document.querySelectorAll('.plot.area').forEach(function(plot){
  var moments=JSON.parse(plot.dataset.moments),line=plot.parentNode.querySelector('.reading');
  line.hidden=false;line.textContent='Point at the picture to read a moment off it.';
  plot.addEventListener('pointermove',function(event){
    var box=plot.getBoundingClientRect(),x=(event.clientX-box.left)/box.width,best=moments[0];
    moments.forEach(function(m){if(Math.abs(m[0]-x)<Math.abs(best[0]-x))best=m;});
    line.textContent=(best[1]/1073741824).toFixed(2)+' GiB in '+best[2]+(best[3]?', '+best[3]:'');
  });
});
"""
