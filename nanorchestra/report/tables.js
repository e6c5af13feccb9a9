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

// Rows of texts, the first of them a label; `style(i)` is the class of row i. A narrow screen shows a
// row as a card, in which the title of a column stands beside each text, two to a line unless a text
// is longer than SHORT characters.
const SHORT = 18;

function table(parent, heads, rows, style = () => "") {
  const made = add(add(parent, "div", undefined, "wide"), "table"), head = add(made, "tr");
  heads.forEach(text => add(head, "th", text));
  if (rows.some(([, ...texts]) => texts.some(text => String(text).length > SHORT))) made.className = "long";
  rows.forEach((texts, i) => {
    const row = add(made, "tr", undefined, style(i));
    texts.forEach((text, k) => { add(row, "td", text).dataset.title = heads[k]; });
  });
  return made;
}

const section = (parent, title, note) => {
  add(parent, "h2", title);
  add(parent, "p", note, "note");
};
const label = name => titles.names[name] || (name.includes("://")
  ? name.replace(/https?:\/\/([^\/]*)(\/[^:]*)?/, "$1")  // MODEL@HOST, and what was changed
  : name.split("/").slice(-2).join("/"));
const explained = name => label(name) + (titles.routers[name] ? ` (${titles.routers[name]})` : "");
const absent = value => value === null || value === undefined;
const digits = (given, factor = 1) => {
  if (absent(given)) return "-";
  const value = factor * given;
  const size = Math.abs(value), places = size ? 2 - Math.floor(Math.log10(size)) : 2;
  if (places > 6) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(Math.min(6, Math.max(0, places)));
};
const rounded = (value, places) => (absent(value) ? "-" : places === null ? digits(value) : value.toFixed(places));
const chance = p => (absent(p) ? "-" : p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`);

function cell(scores, key) {
  const [, factor, decimals] = titles.columns[key], ends = (scores.intervals || {})[key];
  if (absent(scores[key])) return "-";
  const half = ends ? `\u00a0±${rounded((factor * (ends[1] - ends[0])) / 2, decimals)}` : "";
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
    rows.map(([name, values]) => [name, ...columns.map(column => (values[column] || 0).toFixed(2).replace("-0.00", "0.00"))]));
  rows.forEach(([, values], i) => columns.forEach((column, k) => {
    const share = most > 0 ? (0.6 * (values[column] || 0)) / most : 0;
    made.children[i + 1].children[k + 1].style.background = `rgba(31, 99, 196, ${share})`;
  }));
}
