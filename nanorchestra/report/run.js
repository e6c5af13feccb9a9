// Draws the page of a run: scores, and curves by the library uPlot.
// A run: what was trained, and its held-out scores.
function drawRun(parent, { facts, held_out: sides, live }) {
  const list = add(parent, "dl");
  for (const [name, text] of Object.entries(facts)) {
    const item = add(list, "div");
    add(item, "dt", name);
    add(item, "dd", text);
  }
  if (live) {
    add(parent, "p", "The run goes on: this page looks for news every 30 seconds, unless it is in use.", "partial");
    let used = 0;
    for (const kind of ["pointermove", "pointerdown", "keydown", "scroll"]) addEventListener(kind, () => { used = Date.now(); }, { passive: true });
    setInterval(() => { if (Date.now() - used > 30000) location.reload(); }, 30000);
  }
  const named = Object.entries(sides);
  if (!named.length) return;
  section(parent, "On held-out tasks", titles.notes.scores);
  scored(parent, named.map(([name, scores]) => [explained(name), scores]), i => (named[i][0] === "after" ? "chosen" : ""));
  const { before, after } = sides;
  for (const [split, title] of [["by_preference", "By the user's preference"], ["by_kind", "By kind of question"]])
    if (before && after && before[split] && after[split]) drawSplit(parent, title, before[split], after[split]);
}

// The scores of each part of the held-out tasks before and after GRPO.
function drawSplit(parent, title, before, after) {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].sort();
  const keys = Object.keys(titles.columns).filter(key => names.some(name => !absent((after[name] || {})[key])));
  add(parent, "h3", `${title}, before \u2192 after GRPO`);
  table(parent, ["", ...keys.map(key => titles.columns[key][0])], names.map(name =>
    [name, ...keys.map(key => [before, after].map(side => cell(side[name] || {}, key)).join("\u00a0\u2192\u00a0").replace("-\u00a0\u2192\u00a0-", "-"))]));
}

const LATEST = 25;  // steps, of which a strong line is the mean, at most
const PALETTE = 12;  // colours of page.css
const DASHES = [[], [2, 3], [8, 3, 2, 3]], BORDERS = ["solid", "dotted", "dashed"];  // of lines, when the colours are all used
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const charts = [], shades = new Map();  // colours of names, the same in all charts of a part
let other = null;  // rows of another run, and its name

// The numbers of a row; those of an object inside it are named object/name.
function scalars(row, prefix = "") {
  return Object.entries(row).flatMap(([name, value]) =>
    typeof value === "number" ? [[prefix + name, value]]
      : value && typeof value === "object" && !Array.isArray(value) ? scalars(value, `${prefix}${name}/`) : []);
}

// Says whether a panel of these patterns, names or name/*, shows a key.
const shows = patterns => key => patterns.split(" ").some(name => (name.endsWith("/*") ? key.startsWith(name.slice(0, -1)) : key === name));

// Points by key: { steps, values, low, high }; low and high are the quartiles of the groups' means, if they are known.
function seriesOf(rows, factor, wanted) {
  const series = {};
  for (const row of rows)
    for (const [key, value] of scalars(row)) {
      if (!wanted(key)) continue;
      const one = (series[key] ||= { steps: [], values: [], low: [], high: [] });
      const [low, high] = (row.group_quartiles || {})[key] || [null, null];
      one.steps.push(row.step);
      one.values.push(factor * value);
      one.low.push(absent(low) ? null : factor * low);
      one.high.push(absent(high) ? null : factor * high);
    }
  return series;
}

// Each value becomes the mean of the last tenth of all, at most LATEST.
function smooth(values) {
  const window = Math.min(LATEST, Math.max(1, Math.floor(values.length / 10)));
  return values.map((_, n) => {
    const last = values.slice(Math.max(0, n + 1 - window), n + 1).filter(value => !absent(value));
    return last.length ? last.reduce((sum, value) => sum + value, 0) / last.length : null;
  });
}

// The lines of one chart: values by step, faint; their means, strong; quartiles, a band; the other run, dashed.
function chartLines(rows, patterns, factor) {
  const wanted = shows(patterns), ours = seriesOf(rows, factor, wanted);
  const theirs = other ? seriesOf(other.rows.filter(({ phase }) => phase === rows[0].phase), factor, wanted) : {};
  const keys = Object.keys(ours).sort(), lines = [], bands = [];
  const place = (style, { steps }, values) => lines.push({ ...style, points: new Map(steps.map((step, i) => [step, values[i]])) });
  keys.forEach((key, i) => {
    const one = ours[key], own = key.slice(key.lastIndexOf("/") + 1), named = keys.length > 1 ? own.replaceAll("_", " ") : "mean";
    if (patterns.endsWith("/*") && !shades.has(own)) shades.set(own, shades.size);
    const number = shades.get(own) ?? i, shade = `--c${number % PALETTE}`, turn = Math.floor(number / PALETTE) % DASHES.length;
    if (one.low.some(value => value !== null) && one.steps.length > 1) {
      bands.push({ series: [lines.length + 2, lines.length + 1], shade });
      place({ label: "", shade, kind: "edge" }, one, smooth(one.low));
      place({ label: "", shade, kind: "edge" }, one, smooth(one.high));
    }
    if (one.steps.length > 9) place({ label: "", shade, kind: "raw" }, one, one.values);
    place({ label: named, shade, turn, kind: "mean" }, one, smooth(one.values));
    if (theirs[key]) place({ label: `\u254c ${keys.length > 1 ? named : other.name}`, shade, turn, kind: "other" }, theirs[key], smooth(theirs[key].values));
  });
  const steps = [...new Set([...rows.map(({ step }) => step), ...lines.flatMap(({ points }) => [...points.keys()])])].sort((a, b) => a - b);
  return { lines, bands, steps };
}

const WIDTHS = { edge: 0, raw: 1, mean: 2, other: 1.5 };

function drawChart(parent, title, { lines, bands, steps }, phase) {
  const figure = add(parent, "figure"), head = add(figure, "button", title, "title");
  head.title = "larger or smaller";
  const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const step = { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4], space: 40, size: 28 };
  const last = steps.length - 1, numbers = (u, marks) => marks.map(mark => (Math.abs(mark) < 1e-12 ? "0" : Math.abs(mark) < 1e-3 ? mark.toExponential(1) : mark.toLocaleString("en-US", { maximumSignificantDigits: 8 })));
  const height = { ...axis, values: numbers, size: (u, texts) => Math.max(36, 14 + 7 * Math.max(0, ...(texts || []).map(text => text.length))) };
  const options = {
    width: figure.clientWidth || 320,
    height: 190,
    scales: { x: { time: false } },
    axes: [step, height],
    cursor: { sync: { key: phase }, points: { size: 6 } },
    legend: { markers: {
      width: (u, i) => (lines[i - 1].turn ? 2 : 0),
      dash: (u, i) => BORDERS[lines[i - 1].turn || 0],
      stroke: (u, i) => colour(lines[i - 1].shade),
      fill: (u, i) => (lines[i - 1].turn ? "transparent" : colour(lines[i - 1].shade)),
    } },
    hooks: { setLegend: [u => { if (u.legend.idx === null || u.legend.idx === undefined) u.setLegend({ idx: last }); }] },
    bands: bands.map(({ series, shade }) => ({ series, fill: () => colour(shade) + "26" })),
    series: [{ label: "step" }, ...lines.map(({ label: named, shade, turn, kind }) => ({
      label: named,
      class: kind,
      width: WIDTHS[kind],
      stroke: kind === "edge" ? undefined : () => colour(shade) + (kind === "raw" ? "55" : ""),
      dash: [...(kind === "other" ? [6, 4] : []), ...DASHES[turn || 0]],
      points: { show: kind === "mean" && steps.length < 10, size: 5, fill: () => colour(shade) },
      spanGaps: true,
      value: (u, value) => (absent(value) ? "-" : digits(value)),
    }))],
  };
  const chart = new uPlot(options, [steps, ...lines.map(({ points }) => steps.map(step => points.get(step) ?? null))], figure);
  chart.setLegend({ idx: last });
  head.onclick = () => { figure.classList.toggle("large"); fit(figure, chart); };
  charts.push([figure, chart]);
  if (last) zoomByTouch(chart, phase, steps[0], steps[last]);
}

// One finger drawn over steps, or two fingers apart, show these steps larger in all charts of the phase; two taps show all.
function zoomByTouch(chart, phase, first, last) {
  const fingers = new Map(), at = event => event.clientX - chart.over.getBoundingClientRect().left;
  let begun = null, tapped = -Infinity;
  const show = (from, to) => {
    const room = Math.max(0, 1 - (to - from)) / 2, min = Math.max(first, from - room), max = Math.min(last, to + room);
    if (max > min) uPlot.sync(phase).plots.forEach(one => one.setScale("x", { min, max }));
  };
  const select = (left, width) => chart.setSelect({ left, width, top: 0, height: width && chart.over.clientHeight }, false);
  const begin = () => { begun = { places: [...fingers.values()], min: chart.scales.x.min, max: chart.scales.x.max, left: 0, width: 0 }; };
  const down = event => {
    if (event.pointerType !== "touch") return;
    fingers.set(event.pointerId, at(event));
    begin();
  };
  const move = event => {
    if (!fingers.has(event.pointerId)) return;
    fingers.set(event.pointerId, at(event));
    const places = [...fingers.values()], { places: [a, b], min, max } = begun;
    if (begun.places.length === 1) {
      begun.left = Math.max(0, Math.min(a, places[0]));
      begun.width = Math.min(chart.over.clientWidth, Math.max(a, places[0])) - begun.left;
      if (begun.width > 10) select(begun.left, begun.width);
    } else if (places.length === 2 && Math.abs(a - b) > 10 && (places[0] - places[1]) * (a - b) > 100) {
      const each = ((max - min) / chart.over.clientWidth) * ((a - b) / (places[0] - places[1]));  // steps of a pixel
      const from = min + (a / chart.over.clientWidth) * (max - min) - places[0] * each;
      select(0, 0);
      show(from, from + chart.over.clientWidth * each);
    }
  };
  const up = event => {
    if (!fingers.delete(event.pointerId) || begun.places.length > 1) return;
    const { left, width } = begun;
    select(0, 0);
    if (event.type === "pointercancel") return;  // the page is scrolled
    if (width > 10) show(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
    else if (event.timeStamp - tapped < 400) show(first, last);
    tapped = width > 10 ? -Infinity : event.timeStamp;
  };
  for (const [kind, heard] of Object.entries({ pointerdown: down, pointermove: move, pointerup: up, pointercancel: up })) chart.over.addEventListener(kind, heard);
}

const fit = (figure, chart) => chart.setSize({ width: figure.clientWidth, height: figure.classList.contains("large") ? 380 : 190 });

function drawCurves(parent) {
  const rows = { warm_start: [], grpo: [] };
  for (const row of data.metrics) if (rows[row.phase]) rows[row.phase].push(row);
  charts.splice(0).forEach(([, chart]) => chart.destroy());
  parent.replaceChildren();
  if (!data.metrics.length) return void section(parent, "Curves", "No step is recorded yet.");
  section(parent, "Curves", titles.notes.curves);
  drawOverlay(parent);
  for (const [part, { title, phase, panels }] of Object.entries(titles.panels)) {
    if (!rows[phase].length) continue;
    shades.clear();
    const drawn = panels.map(([name, patterns, factor]) => [name, chartLines(rows[phase], patterns, factor)]).filter(([, { lines }]) => lines.length);
    const moving = drawn.filter(([, { lines, steps }]) => steps.length < 4 || lines.some(changes)), still = drawn.filter(panel => !moving.includes(panel));
    if (!drawn.length) continue;
    add(parent, "h3", title);
    const grid = add(parent, "div", undefined, `charts ${part}`);
    for (const [name, lines] of moving) drawChart(grid, name, lines, phase);
    const words = still.map(([name, { lines }]) => `${name}: ${digits([...lines[0].points.values()][0])}`);
    if (words.length) add(parent, "p", `The same at every step: ${words.join("; ")}.`, "note");
  }
}

const changes = ({ points }) => new Set(points.values()).size > 1;

// A file of another run is read by the page itself: nothing is sent or loaded.
function drawOverlay(parent) {
  const line = add(parent, "p"), name = add(line, "label", "Lay another run over the curves: its metrics.jsonl or report.html "), file = add(name, "input");
  file.type = "file";
  file.accept = ".jsonl,.html";
  file.onchange = async () => {
    const [chosen] = file.files, said = readRun(chosen.name, await chosen.text());
    if (!said) return void add(line, "strong", ` ${chosen.name} has no rows of metrics.`);
    other = said;
    try { sessionStorage.setItem(location.pathname, JSON.stringify(other)); } catch { /* too long to be kept when the page reloads */ }
    drawCurves(parent);
  };
  if (!other) return;
  add(line, "strong", ` dashed: ${other.name} `);
  add(line, "button", "remove").onclick = () => {
    other = null;
    try { sessionStorage.removeItem(location.pathname); } catch { /* none is kept */ }
    drawCurves(parent);
  };
}

// The rows of a log, or of the page of another run; null if there are none.
function readRun(name, text) {
  try {
    const page = text.match(/id="data">(.*?)<\/script>/s), title = text.match(/<h1>(.*?)<\/h1>/);
    const rows = page ? JSON.parse(page[1]).metrics : text.split("\n").filter(Boolean).map(line => JSON.parse(line));
    if (!rows.length || rows.some(row => typeof row.step !== "number")) return null;
    return { name: page && title ? title[1] : name, rows };
  } catch {
    return null;
  }
}

drawRun(document.getElementById("run"), data.run);
const { before, after, ...rest } = data.run.held_out;
drawFrontiers(document.getElementById("frontier"), { ...(after && { after }), ...(before && { before }), ...rest });
try { other = JSON.parse(sessionStorage.getItem(location.pathname)); } catch { other = null; }
drawCurves(document.getElementById("curves"));
new ResizeObserver(() => charts.forEach(([figure, chart]) => { if (figure.clientWidth !== chart.width) fit(figure, chart); })).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCurves(document.getElementById("curves")));
