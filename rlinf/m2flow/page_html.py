"""How the page of a run looks: HTML and script in one text without network. ``@DATA@`` is `page_data` as JSON."""

_STYLE = """
:root { color-scheme: light dark;
  --bg: #ffffff; --fg: #1c2024; --soft: #60646c; --line: #d9dbe0; --panel: #f6f7f9; --band: #f1f2f5;
  --rows: #9aa3b2; --lease: #e0a100; --weights: #b36ae2; --other: #c9ccd3; --over: #e3e5e9;
  --busy: #3d8f5f; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #15171a; --fg: #e8eaed; --soft: #9ba1aa; --line: #33373e; --panel: #1d2024; --band: #1b1e22;
  --rows: #7b8494; --lease: #d9a514; --weights: #b983e6; --other: #4a4f58; --over: #2b2f36;
  --busy: #4aa370; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 18px 22px 40px; background: var(--bg); color: var(--fg);
  font: 14px/1.45 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
h1 { font-size: 19px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 26px 0 8px; }
.soft { color: var(--soft); } .num { font-variant-numeric: tabular-nums; }
details { margin: 2px 0 10px; } summary { cursor: pointer; color: var(--soft); }
pre { margin: 6px 0; padding: 10px 12px; background: var(--panel); border-radius: 6px; overflow-x: auto; }
.bar { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; margin: 8px 0; }
select, button { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 9px; } button { cursor: pointer; } button:disabled { opacity: .45; }
label { display: inline-flex; gap: 5px; align-items: center; }
#legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0; font-size: 13px; }
#legend i { display: inline-block; width: 14px; height: 12px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; } #legend i.thin { height: 4px; vertical-align: 3px; }
#chart { border: 1px solid var(--line); border-radius: 6px; position: relative; }
#axis { position: sticky; top: 0; background: var(--bg); z-index: 1; border-bottom: 1px solid var(--line);
  border-radius: 6px 6px 0 0; } canvas { display: block; width: 100%; } #lanes { cursor: crosshair; }
#tip { position: fixed; pointer-events: none; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 7px 10px; box-shadow: 0 3px 14px #0004; z-index: 5; max-width: 380px; display: none;
  font-size: 13px; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.num { white-space: nowrap; }
td.share { width: 34%; min-width: 180px; } .stack { display: flex; height: 13px; border-radius: 3px; overflow: hidden;
  background: var(--over); margin: 3px 0; } .stack.p { height: 6px; opacity: .75; }
.stack span { min-width: 0; }
"""

_BODY = """
<h1 id="title"></h1>
<details><summary>plan and sizes</summary><pre id="about"></pre></details>
<div class="bar">
  <button id="prev" title="earlier">&#9664;</button>
  <select id="which" aria-label="iteration"></select>
  <button id="next" title="later">&#9654;</button>
  <label>order <select id="order"><option value="group">by group</option><option value="device">by device</option>
  </select></label>
  <label><input type="checkbox" id="guess" checked> predicted</label>
  <label><input type="checkbox" id="wait" checked> waits</label>
  <button id="reset" disabled>whole iteration</button>
  <span class="soft">drag across the chart to zoom</span>
</div>
<div id="sum"></div>
<div id="legend"></div>
<div id="chart"><div id="axis"><canvas id="ticks"></canvas></div><canvas id="lanes"></canvas></div>
<div id="left" class="soft"></div>
<h2>Devices: how much of the iteration each one stood still, and why</h2>
<table><thead><tr><th>device</th><th>groups</th><th>idle</th><th></th><th>why</th></tr></thead>
<tbody id="devices"></tbody></table>
<div id="tip"></div>
"""

_SCRIPT = r"""
'use strict';
const data = JSON.parse(document.getElementById('data').textContent), $ = id => document.getElementById(id);
const COLORS = ['#4c78a8', '#f58518', '#54a24b', '#e45756', '#8f6bc2', '#3fa7a0', '#c9a227', '#a0694b', '#d472a5',
  '#6b8e23', '#2f9bd6', '#b5534e'];
const MOVES = { sync: '#7a869a', onload: '#5f9e8f', offload: '#8f7f5f' };
const WORDS = { run: 'runs', rows: 'waits for rows', lease: 'waits for its turn', weights: 'waits for weights',
  sync: 'moves weights', onload: 'comes to the device', offload: 'leaves the device' };
const el = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls; return e; };
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const kindOf = s => data.kinds[s[1]], isWait = s => data.waits[s[1]];
const stageColor = name => COLORS[Math.max(data.stages.indexOf(name), 0) % COLORS.length];
const waitColor = kind => css('--' + (['rows', 'lease', 'weights'].includes(kind) ? kind : 'other'));
function color(s) { const kind = kindOf(s);
  return kind === 'run' ? stageColor(data.names[s[2]]) : isWait(s) ? waitColor(kind) : MOVES[kind] || css('--other'); }
function causeKind(cause) { return cause.startsWith('rows of') ? 'rows' : cause === 'its turn' ? 'lease' :
  /weights/.test(cause) ? 'weights' : cause === 'nothing left to do' ? 'over' : 'other'; }
function time(t) { const a = Math.abs(t); return a >= 100 ? t.toFixed(0) + ' s' : a >= 1 ? t.toFixed(2) + ' s' :
  a >= 1e-3 || a === 0 ? (t * 1e3).toFixed(a >= 0.1 ? 0 : 1) + ' ms' : (t * 1e6).toFixed(0) + ' \u00b5s'; }
const shade = paint => { const n = parseInt(paint.slice(1), 16);  // dark text on light bars
  return .3 * (n >> 16) + .59 * (n >> 8 & 255) + .11 * (n & 255) > 150 ? '#16181b' : '#fff'; };
const percent = x => (100 * x).toFixed(x && x < 0.1 ? 1 : 0) + '%';

let now = data.executions.findLastIndex(e => e.phase === 'train'), view = [0, 1], hits = [], drag = null;
const run = () => data.executions[now];
const full = () => Math.max(run().measured.seconds, run().predicted && $('guess').checked ? run().predicted.seconds : 0)
  * 1.005 || 1;

function order() {
  const all = data.ranks.map((r, i) => i);
  if ($('order').value === 'group') return all;
  const key = i => data.ranks[i].devices.length ? data.ranks[i].devices[0] : 1e9;
  return all.sort((a, b) => key(a) - key(b) || a - b);
}
function label(i, narrow) { const r = data.ranks[i];
  const where = r.devices.length ? ' \u00b7 device ' + r.devices.join(',') : '';
  return r.group + ' ' + r.rank + (narrow ? '' : where); }

function context(canvas, height) {
  const width = $('chart').clientWidth, scale = window.devicePixelRatio || 1;
  canvas.style.height = height + 'px'; canvas.width = width * scale; canvas.height = height * scale;
  const c = canvas.getContext('2d'); c.setTransform(scale, 0, 0, scale, 0, 0); c.clearRect(0, 0, width, height);
  c.font = '12px system-ui, sans-serif'; c.textBaseline = 'middle'; return [c, width]; }

function ticks(span, most) { const raw = span / most, p = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(m => m * p).find(s => s >= raw); }

function tick(t, step) { const [f, unit] = step >= 0.5 ? [1, ' s'] : step >= 5e-4 ? [1e3, ' ms'] : [1e6, ' \u00b5s'];
  return (t * f).toFixed(step * f >= 1 ? 0 : 1) + unit; }

function draw() {
  const e = run(), guess = $('guess').checked && e.predicted, rows = order(), n = rows.length;
  const high = n <= 24, tall = high ? 17 : 10, thin = guess ? (high ? 8 : 5) : 0, gap = high ? 9 : 4;
  const lane = tall + thin + gap, left = Math.min(170, $('chart').clientWidth * 0.25);
  const [c, width] = context($('lanes'), n * lane + 6), x = t => left + (t - view[0]) / (view[1] - view[0]) *
    (width - left - 8);
  const [a] = context($('ticks'), 26), step = ticks(view[1] - view[0], Math.max((width - left) / 90, 2));
  a.fillStyle = css('--soft'); a.strokeStyle = c.strokeStyle = css('--line'); c.lineWidth = 1;
  const y = new Map(); let last = null, band = false;
  rows.forEach((r, k) => { const top = 3 + k * lane; y.set(r, top); const of = $('order').value === 'group' ?
      data.ranks[r].group : String(data.ranks[r].devices[0]);
    if (of !== last) { band = !band; last = of; }
    if (band) { c.fillStyle = css('--band'); c.fillRect(0, top, width, lane); } });
  for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) { const at = Math.round(x(t)) + .5;
    a.textAlign = at > width - 40 ? 'right' : at < left + 14 ? 'left' : 'center'; a.fillText(tick(t, step), at, 13);
    c.beginPath(); c.moveTo(at, 0); c.lineTo(at, n * lane + 6); c.stroke(); }
  c.textAlign = 'left';
  rows.forEach(r => { c.fillStyle = css('--fg'); c.fillText(label(r, left < 150), 8, y.get(r) + (lane - gap) / 2 + 2,
    left - 14); });
  c.save(); c.beginPath(); c.rect(left, 0, width - left, n * lane + 6); c.clip();
  hits = [];
  const bars = (spans, off, h, soft, words) => { for (const s of spans) {
    if (isWait(s) && !$('wait').checked) continue;
    const top = y.get(s[0]) + off, from = x(s[3]), wide = Math.max(x(s[4]) - from, .6);
    if (from > width || from + wide < left) continue;
    c.globalAlpha = soft; c.fillStyle = color(s);
    const thick = isWait(s) ? Math.max(h / 4, 2) : h;
    c.fillRect(from, top + (h - thick) / 2, wide > 3 && !isWait(s) ? wide - .6 : wide, thick); c.globalAlpha = 1;
    hits.push([from, from + wide, top - 1, top + h + 1, s, words]);
    if (h > thin && soft === 1 && high && !isWait(s) && wide > 30) {
      const text = data.names[s[2]].replace(/^.*\./, '').replace(/ weights.*/, '') , w = c.measureText(text).width;
      if (w < wide - 6) { c.fillStyle = shade(color(s));
        c.fillText(text, Math.max(from, left) + 4, top + h / 2 + .5); } } } };
  if (guess) bars(e.predicted.around, 2, thin - 1, .2, 'predicted, another iteration');
  bars(e.measured.around, 2 + thin, tall, .28, 'measured, another iteration');
  if (guess) bars(e.predicted.spans, 2, thin - 1, .72, 'predicted');
  bars(e.measured.spans, 2 + thin, tall, 1, 'measured');
  const end = (t, dash) => { c.setLineDash(dash); c.strokeStyle = css('--fg'); c.beginPath();
    c.moveTo(x(t) + .5, 0); c.lineTo(x(t) + .5, n * lane + 6); c.stroke(); c.setLineDash([]); };
  end(e.measured.seconds, []); if (guess) end(e.predicted.seconds, [4, 3]);
  if (drag) { c.fillStyle = css('--fg'); c.globalAlpha = .12;
    c.fillRect(Math.min(drag[0], drag[1]), 0, Math.abs(drag[1] - drag[0]), n * lane + 6); }
  c.restore();
  draw.time = px => view[0] + (px - left) / (width - left - 8) * (view[1] - view[0]); draw.left = left;
}

function legend() {
  const box = $('legend'), seen = new Set(); box.replaceChildren();
  for (const side of [run().measured, run().predicted]) for (const s of side ? side.spans : [])
    seen.add(kindOf(s) === 'run' ? 'run ' + data.names[s[2]] : kindOf(s));
  const add = (paint, text, thin) => { const e = el('span'), i = el('i', undefined, thin ? 'thin' : '');
    i.style.background = paint; e.append(i, text); box.append(e); };
  for (const name of data.stages) if (seen.has('run ' + name)) add(stageColor(name), name);
  for (const kind in MOVES) if (seen.has(kind)) add(MOVES[kind], WORDS[kind]);
  for (const kind of ['rows', 'lease', 'weights']) if (seen.has(kind)) add(waitColor(kind), WORDS[kind], true);
  if (run().measured.around.length) box.append(el('span', 'faded: other iterations, under way meanwhile', 'soft'));
  if (run().predicted) box.append(el('span', 'thin bars above: predicted; dashed line: its end', 'soft'));
}

function devices() {
  const body = $('devices'), e = run(); body.replaceChildren();
  const stack = (d, seconds, cls) => { const s = el('div', undefined, 'stack ' + cls);
    const part = (t, paint, words) => { const p = el('span'); p.style.width = 100 * t / (seconds || 1) + '%';
      p.style.background = paint; p.title = words + ' ' + time(t); s.append(p); };
    part(d.busy, css('--busy'), 'busy');
    for (const [cause, t] of Object.entries(d.idle)) part(t, css('--' + causeKind(cause)), cause);
    return s; };
  const idle = d => { const t = Object.values(d.idle).reduce((a, b) => a + b, 0); return t / ((t + d.busy) || 1); };
  for (const d of e.measured.devices) { const row = el('tr'), share = el('td', undefined, 'share');
    const p = e.predicted && e.predicted.devices.find(o => o.device === d.device);
    row.append(el('td', d.device, 'num'), el('td', d.groups.join(', ')));
    const cell = el('td', percent(idle(d)), 'num');
    if (p) cell.append(el('div', 'predicted ' + percent(idle(p)), 'soft'));
    share.append(stack(d, e.measured.seconds, '')); if (p) share.append(stack(p, e.predicted.seconds, 'p'));
    const why = Object.entries(d.idle).sort((a, b) => b[1] - a[1]).filter(c => c[1] > .005 * e.measured.seconds)
      .map(([cause, t]) => cause + ' ' + percent(t / e.measured.seconds)).join('; ');
    row.append(cell, share, el('td', why || '\u2013')); body.append(row); }
}

function show() {
  const e = run(); view = [0, full()]; $('which').value = now; $('reset').disabled = true;
  $('prev').disabled = now === 0; $('next').disabled = now === data.executions.length - 1;
  const off = e.predicted ? e.predicted.seconds / e.measured.seconds - 1 : 0;
  $('sum').replaceChildren(el('b', time(e.measured.seconds) + ' measured'), e.predicted ? ', ' +
    time(e.predicted.seconds) + ' predicted (' + (off < 0 ? '\u2212' : '+') + percent(Math.abs(off)) + '). ' : '. ',
    el('span', e.why + ' Began ' + new Date(e.at * 1e3).toLocaleString() + '.', 'soft'));
  legend(); devices(); draw();
}

$('title').textContent = data.about[0] || 'Time line'; document.title = $('title').textContent;
$('about').textContent = data.about.slice(1).join('\n');
if (data.left_out) $('left').textContent = data.left_out + ' more ranks are not shown; trace.json has them all.';
data.executions.forEach((e, i) => { const o = el('option', e.label); o.value = i; $('which').append(o); });
$('which').onchange = () => { now = +$('which').value; show(); };
$('prev').onclick = () => { now--; show(); }; $('next').onclick = () => { now++; show(); };
$('reset').onclick = () => { view = [0, full()]; $('reset').disabled = true; draw(); };
for (const id of ['order', 'wait']) $(id).onchange = draw;
$('guess').onchange = () => { view = [0, full()]; draw(); };
const lanes = $('lanes');
lanes.onmousedown = e => { drag = [e.offsetX, e.offsetX]; };
window.addEventListener('mouseup', () => { if (!drag) return; const [p, q] = drag.map(draw.time).sort((a, b) => a - b);
  const wide = Math.abs(drag[1] - drag[0]) > 5; drag = null;
  if (wide) { view = [Math.max(p, 0), q]; $('reset').disabled = false; } draw(); });
lanes.ondblclick = () => $('reset').click();
lanes.onmouseleave = () => { $('tip').style.display = 'none'; };
lanes.onmousemove = e => {
  if (drag) { drag[1] = e.offsetX; draw(); }
  const found = e.offsetX < draw.left ? null : hits.findLast(h => e.offsetX >= h[0] - 1 && e.offsetX <= h[1] + 1 &&
    e.offsetY >= h[2] && e.offsetY <= h[3]), tip = $('tip');
  tip.style.display = found ? 'block' : 'none'; if (!found) return;
  const s = found[4], kind = kindOf(s), what = data.names[s[2]];
  const head = isWait(s) ? 'waits for ' + what : kind === 'run' || kind === 'sync' ? what : WORDS[kind] || what;
  tip.replaceChildren(el('b', head), el('div', label(s[0]), 'soft'),
    el('div', found[5] + ': ' + time(s[4] - s[3]) + ', from ' + time(s[3]) + ' to ' + time(s[4]), 'num'));
  if (s[5]) tip.append(el('div', s[5] + (s[5] === 1 ? ' row' : ' rows') + ', ' + time((s[4] - s[3]) / s[5]) +
    ' a row', 'num'));
  tip.style.left = Math.min(e.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + 'px';
  tip.style.top = Math.min(e.clientY + 16, window.innerHeight - tip.offsetHeight - 8) + 'px';
};
window.addEventListener('resize', draw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', show);
if (now < 0) now = data.executions.length - 1;
if (data.executions.length) show(); else $('sum').textContent = 'No iteration has ended yet.';
"""

HTML = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Time line</title>
<style>{_STYLE}</style>
</head>
<body>{_BODY}
<script type="application/json" id="data">@DATA@</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
