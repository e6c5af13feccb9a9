"use strict";
// Draws the tables of a report from the JSON in #data. All text is set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const { titles, summary } = data;

function add(parent, tag, text, style) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  return parent.appendChild(made);
}

// Rows of texts, the first of them a label; `style(i)` is the class of row i.
function table(parent, heads, rows, style = () => "") {
  const made = add(add(parent, "div", undefined, "wide"), "table"), head = add(made, "tr");
  heads.forEach(text => add(head, "th", text));
  rows.forEach((texts, i) => {
    const row = add(made, "tr", undefined, style(i));
    texts.forEach(text => add(row, "td", text));
  });
  return made;
}

const section = (parent, title, note) => {
  add(parent, "h2", title);
  add(parent, "p", note, "note");
};
const label = name => titles.names[name] || name.split("/").slice(-2).join("/");
const absent = value => value === null || value === undefined;
const digits = (given, factor = 1) => {
  if (absent(given)) return "-";
  const value = factor * given;
  const size = Math.abs(value), places = size ? 2 - Math.floor(Math.log10(size)) : 2;
  return value.toFixed(Math.min(6, Math.max(0, places)));
};
const rounded = (value, places) => (absent(value) ? "-" : places === null ? digits(value) : value.toFixed(places));
const chance = p => (absent(p) ? "-" : p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`);

function cell(scores, key) {
  const [, factor, decimals] = titles.columns[key], ends = (scores.intervals || {})[key];
  if (absent(scores[key])) return "-";
  const half = ends ? ` ±${rounded((factor * (ends[1] - ends[0])) / 2, decimals)}` : "";
  return rounded(factor * scores[key], decimals) + half;
}

function scored(parent, named, style) {
  const keys = Object.keys(titles.columns).filter(key => named.some(([, scores]) => !absent(scores[key])));
  table(parent, ["", ...keys.map(key => titles.columns[key][0])],
        named.map(([name, scores]) => [name, ...keys.map(key => cell(scores, key))]), style);
}

const first = i => (i ? "" : "chosen");

// Numbers as shades of blue, rows [name, values by column].
function heat(parent, note, rows) {
  const columns = [...new Set(rows.flatMap(([, values]) => Object.keys(values)))].sort();
  const most = Math.max(...rows.flatMap(([, values]) => Object.values(values)));
  add(parent, "p", note, "note");
  const made = table(parent, ["", ...columns],
    rows.map(([name, values]) => [name, ...columns.map(column => (values[column] || 0).toFixed(2))]));
  rows.forEach(([, values], i) => columns.forEach((column, k) => {
    const share = most > 0 ? (0.6 * (values[column] || 0)) / most : 0;
    made.children[i + 1].children[k + 1].style.background = `rgba(31, 99, 196, ${share})`;
  }));
}

// A run: what was trained, and its held-out scores.
function drawRun(parent, { facts, held_out: sides, live }) {
  const list = add(parent, "dl");
  for (const [name, text] of Object.entries(facts)) {
    const item = add(list, "div");
    add(item, "dt", name);
    add(item, "dd", text);
  }
  const named = Object.entries(sides);
  section(parent, "On held-out tasks", named.length ? titles.notes.scores : "No results yet.");
  if (named.length) scored(parent, named.map(([name, scores]) => [label(name), scores]), i => (named[i][0] === "after" ? "chosen" : ""));
  const parts = ["before", "after"].flatMap(side => ["by_preference", "by_kind"].flatMap(split =>
    Object.entries((sides[side] || {})[split] || {}).map(([name, scores]) => [`${name}, ${side}`, scores, side])));
  const splits = document.getElementById("splits");
  if (parts.length) scored(splits, parts, i => (parts[i][2] === "after" ? "chosen" : ""));
  else splits.replaceChildren();
  if (live) setTimeout(() => location.reload(), 30000);
}

// An evaluation in the layout of the paper's Table 1.
function drawSummary(parent, worlds) {
  if (summary.partial) add(parent, "p", `Partial: ${summary.partial}`, "partial");
  section(parent, "Summary", titles.notes.summary);
  const names = [...new Set(worlds.flatMap(([, policies]) => Object.keys(policies)))];
  const mean = (name, key) => {
    const known = worlds.map(([, policies]) => policies[name]).filter(Boolean);
    if (known.some(scores => absent(scores[key]))) return null;  // a model without a price
    return known.reduce((sum, scores) => sum + scores[key], 0) / known.length;
  };
  table(parent, ["", ...worlds.map(([world]) => `${world}, %`), "cost, cents", "latency, min"],
    names.map(name => [
      label(name),
      ...worlds.map(([, policies]) => (policies[name] ? cell(policies[name], "accuracy") : "-")),
      digits(mean(name, "cost_usd"), 100),
      digits(mean(name, "latency_s") / 60),
    ]), first);
}

function drawWorld(parent, world, named) {
  section(parent, world, titles.notes.scores);
  scored(parent, named.map(([name, scores]) => [label(name), scores]), first);
  const more = named.map(([name, { tasks, failed, published, pass_hat: passed }]) => [
    label(name), tasks, failed, rounded(published, 3), ...(passed.length > 1 ? passed : []).map(p => (100 * p).toFixed(1)),
  ]);
  const trials = Math.max(...more.map(row => row.length)) - 4;
  add(parent, "p", titles.notes.more, "note");
  table(parent, ["", "tasks", "failed", "appendix L", ...Array.from({ length: trials }, (_, k) => `pass^${k + 1}, %`)], more, first);
  for (const [name, { failed, failure }] of named)
    if (failed) add(parent, "p", `${label(name)}, the first that failed: ${failure}`, "note");
  heat(parent, titles.notes.calls, named.map(([name, { calls }]) => [label(name), calls]));
  const rewards = named.map(([name, { by_preference: split }]) =>
    [label(name), Object.fromEntries(Object.entries(split).map(([preference, { reward }]) => [preference, reward]))]);
  heat(parent, titles.notes.preferences, rewards);
  if (named.length < 2) return;
  add(parent, "p", titles.notes.differences, "note");
  const measures = Object.entries(titles.differences);
  table(parent, [`${label(named[0][0])} minus`, ...measures.map(([, [title]]) => title)],
    named.slice(1).map(([name, { behind }]) => [
      label(name),
      ...measures.map(([key, [, factor, decimals]]) => {
        if (!behind[key]) return "-";
        const [middle, low, high, p] = behind[key].map((value, i) => (i < 3 && !absent(value) ? factor * value : value));
        const sign = value => (value > 0 ? "+" : "") + rounded(value, decimals);
        return `${sign(middle)} [${sign(low)}, ${sign(high)}] ${chance(p)}`;
      }),
    ]));
}

function drawPairs(parent, pairs) {
  section(parent, "Instructive attempts", titles.notes.attempts);
  for (const pair of pairs) {
    const card = add(parent, "div", undefined, "pair");
    add(card, "p", pair[0].preference);
    for (const side of pair) add(card, "pre", `${label(side.policy)}: reward ${side.reward.toFixed(3)}\n${side.tree}`);
  }
}

if (data.run) drawRun(document.getElementById("run"), data.run);
if (data.pairs) {
  const worlds = Object.entries(summary.worlds), box = document.getElementById("worlds");
  drawSummary(document.getElementById("summary"), worlds);
  for (const [world, policies] of worlds) drawWorld(box, world, Object.entries(policies));
  if (data.pairs.length) drawPairs(document.getElementById("pairs"), data.pairs);
}
