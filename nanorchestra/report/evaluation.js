// Draws the tables and the attempts of an evaluation from the JSON in #data. All text is set as text.
const { summary, titles, attempts } = JSON.parse(document.getElementById("data").textContent);

function add(parent, tag, text, style) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  parent.append(made);
  return made;
}

function table(parent, heads, rows, chosen = 0) {
  const made = add(add(parent, "div", undefined, "wide"), "table");
  const head = add(made, "tr");
  heads.forEach(text => add(head, "th", text));
  rows.forEach((texts, i) => {
    const row = add(made, "tr", undefined, i === chosen ? "chosen" : "");
    texts.forEach(text => add(row, "td", text));
  });
}

const label = name => titles.routers[name] || name.split("/").slice(-2).join("/");
const digits = value => {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : value.toFixed(size ? Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(size)))) : 2);
};
const signed = value => (value < 0 ? "" : "+") + digits(value);

function cell(scores, key) {
  const [, factor, decimals] = titles.columns[key];
  const text = value => (decimals === null ? digits(value) : value.toFixed(decimals));
  if (scores[key] === null || scores[key] === undefined) return "-";
  const ends = (scores.intervals || {})[key];
  return text(factor * scores[key]) + (ends ? ` ±${text((factor * (ends[1] - ends[0])) / 2)}` : "");
}

const tables = document.getElementById("tables");
const worlds = Object.entries(summary.worlds);
const section = (parent, title, note) => {
  add(parent, "h2", title);
  add(parent, "p", note, "note");
};

if (summary.partial) add(tables, "p", `Partial: ${summary.partial}`, "partial");
section(tables, "Summary", titles.evaluation.summary);
const names = [...new Set(worlds.flatMap(([, found]) => Object.keys(found)))];
const mean = (name, key) => {
  const known = worlds.map(([, found]) => found[name]).filter(Boolean);
  return known.reduce((sum, scores) => sum + scores[key], 0) / known.length;
};
table(
  tables,
  ["", ...worlds.map(([world]) => `${world}, %`), "cost, cents", "latency, min"],
  names.map(name => [
    label(name),
    ...worlds.map(([, found]) => (found[name] ? (100 * found[name].accuracy).toFixed(1) : "-")),
    digits(100 * mean(name, "cost_usd")),
    digits(mean(name, "latency_s") / 60),
  ])
);

for (const [world, found] of worlds) {
  const keys = Object.keys(titles.columns);
  section(tables, world, titles.evaluation.world);
  table(
    tables,
    ["", ...keys.map(key => titles.columns[key][0]), "appendix L", "tasks", "failed"],
    Object.entries(found).map(([name, scores]) => [
      label(name),
      ...keys.map(key => cell(scores, key)),
      digits(scores.published),
      scores.tasks,
      scores.failed,
    ])
  );
  const passed = Object.entries(found).filter(([, scores]) => scores.pass_hat.length > 1);
  if (passed.length) {
    add(tables, "p", "pass^k: the probability that k attempts at a task are all right, %", "note");
    table(
      tables,
      ["k", ...passed[0][1].pass_hat.map((_, i) => i + 1)],
      passed.map(([name, scores]) => [label(name), ...scores.pass_hat.map(p => (100 * p).toFixed(1))])
    );
  }
  add(tables, "p", titles.evaluation.differences, "note");
  const measures = Object.entries(titles.differences);
  table(
    tables,
    ["minus", ...measures.map(([, [title]]) => title)],
    Object.entries(found).slice(1).map(([name, { behind: given }]) => [
      label(name),
      ...measures.map(([key, [, factor]]) => {
        if (!given[key]) return "-";
        const [middle, low, high, p] = given[key];
        return `${signed(factor * middle)} [${signed(factor * low)}, ${signed(factor * high)}] p=${digits(p)}`;
      }),
    ]),
    -1
  );
}

if (attempts.length) {
  const parent = document.getElementById("attempts");
  section(parent, "Instructive attempts", titles.evaluation.attempts);
  for (const pair of attempts) {
    const card = add(parent, "div", undefined, "pair");
    add(card, "p", pair[0].wish);
    for (const side of pair) add(card, "pre", `${label(side.policy)}, reward ${side.reward.toFixed(3)}\n${side.tree}`);
  }
}
