// Draws right answers against cost, and against allowed turns where a policy was played with several.
const SVG = "http://www.w3.org/2000/svg";
const SHAPES = ["M-4,-4h8v8h-8z", "M0,-5L5,4H-5z", "M0,5L5,-4H-5z", "M0,-5.5L5.5,0L0,5.5L-5.5,0z"];
const OTHERS = [1, 2, 3, 4, 5, 7, 8, 9, 10, 11];  // colours of all but the first two
const DOT = "M-6,0a6,6 0 1,0 12,0a6,6 0 1,0 -12,0z";

function draw(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

const headed = (world, text) => (world ? `${world}: ${text}` : text[0].toUpperCase() + text.slice(1));

// Round numbers from `low` to `high`, seven or fewer.
function ticks(low, high) {
  const rough = (high - low || 1) / 7, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) found.push(Number((n * step).toPrecision(6)));
  return found;
}

function drawFrontiers(parent, policies, world = "") {
  const priced = Object.entries(policies).filter(([, scores]) => !absent(scores.cost_usd));
  if (priced.length) drawFrontier(parent, Object.keys(policies), priced, headed(world, "right answers and cost per task"), "cost per task, m$",
    (name, scores) => ({ value: 1000 * scores.cost_usd, ends: (scores.intervals || {}).cost_usd, factor: 1000 }));
  const swept = Object.entries(policies).filter(([name]) => name.includes(":turns="));
  if (swept.length) drawFrontier(parent, Object.keys(policies), swept, headed(world, "right answers and allowed turns"), "turns allowed",
    name => ({ value: Number(name.split(":turns=")[1].split(":")[0]) }));
}

// `at` is the place of a policy on the horizontal axis. The first two policies are drawn larger.
function drawFrontier(parent, names, policies, title, axis, at) {
  const points = policies.map(([name, scores]) => {
    const { value, ends, factor } = at(name, scores), rank = names.indexOf(name), own = rank < 2;
    const [left, right] = ends ? ends.map(end => factor * end) : [value, value];
    const [low, high] = ((scores.intervals || {}).accuracy || [scores.accuracy, scores.accuracy]).map(end => 100 * end);
    return { name, x: value, y: 100 * scores.accuracy, left, right, low, high, own,
             shape: own ? DOT : SHAPES[rank % SHAPES.length], shade: `var(--c${own ? [0, 6][rank] : OTHERS[(rank - 2) % OTHERS.length]})` };
  });
  section(parent, title, "Whiskers: 95% intervals. Dashed: nothing to the left is right as often.");
  const box = add(parent, "div", undefined, "frontier"), figure = add(box, "div"), list = add(box, "ul");
  for (const { name, x, y, shape, shade } of points) {
    const item = add(list, "li"), mark = draw(item, "svg", { width: 16, height: 16, viewBox: "-8 -8 16 16" });
    draw(mark, "path", { d: shape, style: `fill: ${shade}` });
    add(item, "span", `${label(name)}: ${y.toFixed(1)}% at ${digits(x)}`);
    item.onpointerenter = () => figure.querySelectorAll("g").forEach(one => one.classList.toggle("faint", one.dataset.name !== name));
    item.onpointerleave = () => figure.querySelectorAll("g").forEach(one => one.classList.remove("faint"));
  }
  const paint = () => paintFrontier(figure, points, title, axis);
  new ResizeObserver(paint).observe(box);
}

function paintFrontier(figure, points, title, axis) {
  const wide = figure.clientWidth || 320, high = 300, edge = { left: 40, right: 14, top: 22, bottom: 40 };
  const most = 1.04 * Math.max(...points.flatMap(({ x, right }) => [x, right])) || 1;
  const least = Math.max(0, Math.min(...points.flatMap(({ y, low }) => [y, low])) - 2);
  const top = Math.min(100, Math.max(...points.flatMap(({ y, high }) => [y, high])) + 2);
  const x = value => edge.left + (value / most) * (wide - edge.left - edge.right);
  const y = value => high - edge.bottom - ((value - least) / (top - least || 1)) * (high - edge.top - edge.bottom);
  figure.replaceChildren();
  const svg = draw(figure, "svg", { width: wide, height: high, role: "img", "aria-label": title });
  for (const value of ticks(0, most)) {
    draw(svg, "line", { x1: x(value), x2: x(value), y1: edge.top, y2: high - edge.bottom, class: "grid" });
    draw(svg, "text", { x: x(value), y: high - edge.bottom + 16, "text-anchor": "middle" }, String(value));
  }
  for (const value of ticks(least, top)) {
    draw(svg, "line", { x1: edge.left, x2: wide - edge.right, y1: y(value), y2: y(value), class: "grid" });
    draw(svg, "text", { x: edge.left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value));
  }
  draw(svg, "text", { x: edge.left, y: 12 }, "right, %");
  draw(svg, "text", { x: wide - edge.right, y: high - 6, "text-anchor": "end" }, axis);
  const best = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.y - a.y))
    if (!best.length || point.y > best[best.length - 1].y) best.push(point);
  draw(svg, "polyline", { points: best.map(point => `${x(point.x)},${y(point.y)}`).join(" "), class: "best" });
  for (const point of points) {
    const group = draw(svg, "g", { style: `--shade: ${point.shade}` });
    group.dataset.name = point.name;
    draw(group, "line", { x1: x(point.left), x2: x(point.right), y1: y(point.y), y2: y(point.y) });
    draw(group, "line", { x1: x(point.x), x2: x(point.x), y1: y(point.low), y2: y(point.high) });
    draw(group, "path", { d: point.shape, transform: `translate(${x(point.x)},${y(point.y)})` });
    draw(group, "title", {}, `${label(point.name)}: right ${point.y.toFixed(1)}% [${point.low.toFixed(1)}, ${point.high.toFixed(1)}], ${axis} ${digits(point.x)}`);
  }
}
