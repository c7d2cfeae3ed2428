"""The report's page: one style sheet for light, dark and paper, and a script for the pointer's read-out."""

from __future__ import annotations

from html import escape

__all__ = ["page"]

STYLE = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#161b26;--soft:#5b6577;--line:#e4e7ed;--hair:#eef0f4;
--c1:#2f5bea;--c2:#e0672c;--c3:#0f9a7d;--c4:#9a4fd0;--c5:#c79a12;--c6:#8a94a6;--glow:#2f5bea14;
--shadow:0 1px 2px #1018280a,0 6px 20px #1018280a}
@media(prefers-color-scheme:dark){:root{--bg:#0d1016;--card:#151a22;--ink:#e9edf5;--soft:#97a2b5;--line:#262e3b;
--hair:#1f2631;
--c1:#7d9dff;--c2:#ff9d63;--c3:#45d3ae;--c4:#c792f2;--c5:#e6c255;--c6:#8592a8;--glow:#7d9dff1a;--shadow:none}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
"Liberation Sans",sans-serif;font-variant-numeric:tabular-nums;-webkit-font-smoothing:antialiased}
main{max-width:1160px;margin:0 auto;padding:40px 24px 56px}
header{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:end;gap:8px 24px;margin-bottom:22px}
h1{font-size:27px;line-height:1.2;letter-spacing:-.02em;margin:0;font-weight:680}
header p{margin:5px 0 0;color:var(--soft)}
header .when{font-size:13px;white-space:nowrap}
h2{font-size:12px;letter-spacing:.09em;text-transform:uppercase;color:var(--soft);font-weight:640;
margin:34px 2px 12px}
.card{background:var(--card);border:1px solid var(--line);border-radius:14px;box-shadow:var(--shadow);
padding:20px 22px;min-width:0}
.hero{display:grid;grid-template-columns:minmax(250px,1.15fr) 2fr;padding:0;overflow:hidden}
.lead{padding:24px 26px 26px;background:linear-gradient(160deg,var(--glow),transparent 70%);
border-right:1px solid var(--line)}
.lead .value{font-size:58px;line-height:1.05;font-weight:700;letter-spacing:-.035em;color:var(--c1);margin-top:3px}
.label{font-size:13px;color:var(--soft)}
.note{font-size:12.5px;color:var(--soft)}
.gauge{margin-top:16px}
.gauge .track{position:relative;height:8px;border-radius:4px;background:var(--line);margin-bottom:7px}
.gauge .track i{position:absolute;inset:0 auto 0 0;border-radius:4px;background:var(--c1)}
.gauge .ends{display:flex;justify-content:space-between;font-size:12px;color:var(--soft)}
.facts{display:grid;grid-template-columns:repeat(3,1fr);align-content:stretch}
.facts div{padding:18px 20px;box-shadow:0 0 0 .5px var(--line)}
.facts .value{font-size:25px;font-weight:640;letter-spacing:-.02em;line-height:1.25}
.grid2{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.grid3{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:16px}
.split{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:16px;align-items:start}
.wide{grid-column:1/-1}
figure{margin:0}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 14px;margin-bottom:14px;
align-items:baseline}
figcaption b{font-weight:640}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--soft)}
.key{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px;vertical-align:-.5px;
background:currentColor}
.area{position:relative;height:220px;margin:0 10px 24px 46px;border-bottom:1px solid var(--line);touch-action:pan-y}
.wide .area{height:270px}
.small .area{height:150px}
.square .area{height:auto;aspect-ratio:1;max-height:420px;border-left:1px solid var(--line)}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:hidden}
.area path{fill:none;stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round;
stroke-linecap:round}
.area path.raw{stroke-width:1;opacity:.28}
.area path.error{stroke-width:1.5;opacity:.55}
.area path.grid{stroke:var(--hair);stroke-width:1}
.area path.mark,.area path.ideal{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:4 4;opacity:.75}
.yt,.xt{position:absolute;font-size:11.5px;color:var(--soft);line-height:1;white-space:nowrap}
.yt{right:100%;transform:translateY(50%);padding-right:8px}
.xt{top:100%;transform:translateX(-50%);padding-top:8px}
.x-name{font-size:11.5px;color:var(--soft);text-align:right;margin:-2px 10px -6px 0}
.dot{position:absolute;width:7px;height:7px;border-radius:50%;background:currentColor;transform:translate(-50%,50%);
box-shadow:0 0 0 2px var(--card)}
.dot.big{width:10px;height:10px}
.mark-label{position:absolute;font-size:11.5px;color:var(--soft);background:var(--card);padding:0 5px;
line-height:1.5;white-space:nowrap}
.mark-label.over{transform:translateY(-2px)}
.mark-label.under{transform:translateY(calc(100% + 2px))}
.mark-label.event{margin:0 4px}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
.c6{color:var(--c6)}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);opacity:.5;pointer-events:none}
.tip{position:absolute;top:-6px;z-index:3;background:var(--ink);color:var(--card);border-radius:8px;
padding:7px 10px;font-size:12px;line-height:1.45;
pointer-events:none;white-space:nowrap;box-shadow:0 4px 16px #0004}
.tip b{font-weight:640}
.stack{display:flex;height:22px;border-radius:6px;overflow:hidden;gap:2px;margin-bottom:14px}
.stack i{background:currentColor;min-width:2px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
td,th{padding:6px 0 6px 16px;text-align:right;border-top:1px solid var(--hair);white-space:nowrap}
td:first-child,th:first-child{text-align:left;padding-left:0}
th{font-weight:600;color:var(--soft);font-size:12px;border-top:0}
.stages tr:first-child td{border-top:0}
.scroll{overflow-x:auto}
.facts p,.note{margin:0}
.note.words{margin-top:8px}
.note.total{margin-bottom:10px}
.column{display:grid;gap:16px;min-width:0}
.meter b{display:inline-block;min-width:50px;font-weight:400}
.meter span{display:inline-block;width:84px;height:6px;border-radius:3px;background:var(--line);margin-right:10px;
vertical-align:2px;overflow:hidden}
.meter i{display:block;height:100%;background:var(--c3);border-radius:3px;min-width:1px}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:0 28px;margin:0;font-size:13.5px}
dl div{display:flex;justify-content:space-between;gap:12px;border-top:1px solid var(--hair);padding:5px 0;
min-width:0}
dt{color:var(--soft);white-space:nowrap}
dd{margin:0;text-align:right;overflow-wrap:anywhere;min-width:0}
footer{margin-top:30px;font-size:12.5px;color:var(--soft);text-align:center}
@media screen and (max-width:820px){main{padding:24px 14px 40px}.hero{grid-template-columns:1fr}.lead{border-right:0;
border-bottom:1px solid var(--line)}
.facts{grid-template-columns:repeat(2,1fr)}.grid2,.grid3,.split{grid-template-columns:minmax(0,1fr)}
.card{padding:16px}.hero.card{padding:0}
h1{font-size:23px}.facts .value{font-size:21px}.facts div{padding:14px 16px}.wide .area{height:220px}}
@media print{:root{--bg:#fff;--shadow:none}body{font-size:12px;print-color-adjust:exact;
-webkit-print-color-adjust:exact}main{padding:0;max-width:none}
.card:not(.long),figure{break-inside:avoid}h2{break-after:avoid}.area{height:180px}}
"""

SCRIPT = """
for(const figure of document.querySelectorAll('[data-chart]')){
  const data=JSON.parse(figure.dataset.chart),area=figure.querySelector('.area'),extra=[];
  const clear=()=>{while(extra.length)extra.pop().remove()};
  const add=(tag,cls)=>{const e=document.createElement(tag);e.className=cls;area.append(e);extra.push(e);return e};
  const nearest=(xs,x)=>{let low=0,high=xs.length-1;while(high-low>1){const mid=low+high>>1;xs[mid]<x?low=mid:high=mid}
    return Math.abs(xs[low]-x)<=Math.abs(xs[high]-x)?low:high};
  area.addEventListener('pointerleave',clear);
  area.addEventListener('pointermove',event=>{
    clear();
    const box=area.getBoundingClientRect(),[x0,x1]=data.x,[y0,y1]=data.y;
    const want=x0+(x1-x0)*(event.clientX-box.left)/box.width;
    const found=data.series.map(s=>({s,i:nearest(s.x,want)}));
    const at=found.map(({s,i})=>s.x[i]).reduce((a,b)=>Math.abs(a-want)<=Math.abs(b-want)?a:b);
    const left=100*(at-x0)/(x1-x0);
    add('div','cursor').style.left=left+'%';
    const tip=add('div','tip');
    tip.style[left>55?'right':'left']=`calc(${left>55?100-left:left}% + 12px)`;
    const head=document.createElement('b');
    head.textContent='step '+Math.round(at).toLocaleString('en');tip.append(head);
    for(const {s,i} of found){
      if(Math.abs(s.x[i]-at)>(x1-x0)*.03)continue;
      const dot=add('i','dot '+s.c);dot.style.left=100*(s.x[i]-x0)/(x1-x0)+'%';
      dot.style.bottom=Math.min(100,Math.max(0,100*(s.y[i]-y0)/(y1-y0)))+'%';
      const line=document.createElement('div');
      const y=s.y[i];
      line.textContent=s.name+' '+(Math.abs(y)>=1000?Math.round(y).toLocaleString('en'):y.toFixed(data.digits));
      tip.append(line);
    }
  });
}
const root=document.documentElement;
root.dataset.width=root.scrollWidth;root.dataset.window=innerWidth;
addEventListener('load',()=>{root.dataset.requests=performance.getEntriesByType('resource').length});
"""

# Nothing may be fetched, whatever a configuration value contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, body: str) -> str:
    """A complete HTML document that needs no other file."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )
