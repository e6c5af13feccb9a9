"use strict";
// Draws the recorded groups id by id, with text nodes only, so that nothing in the data can run.
const data = JSON.parse(document.getElementById("attempts").textContent);
const box = document.getElementById("browser");

function make(tag, parent, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return parent.appendChild(node);
}

const missing = value => value === null || value === undefined;
const shown = (value, digits) => missing(value) ? "-" : typeof value === "number" ? value.toFixed(digits) : String(value);
const tint = value => `rgba(${value > 0 ? "31,140,70" : "200,50,40"},${Math.min(1, Math.abs(value)) * 0.75})`;

// The hash of the address keeps what is shown when a live page reloads.
let [step, task, attempt, colour] = decodeURIComponent(location.hash.slice(1)).split("|");
const bar = make("p", box), groups = make("select", bar), colours = make("select", bar);
const about = make("p", box), table = make("table", make("div", box, undefined, "wide"));
const legend = make("p", box, "", "note"), text = make("pre", box);
groups.ariaLabel = "group";
colours.ariaLabel = "colour";
data.groups.forEach((group, i) => { make("option", groups, `${group.phase}, step ${group.step}: ${group.task}`).value = i; });
for (const name of ["mask", "ratio", "advantage"]) make("option", colours, `colour: ${name}`).value = name;
const start = data.groups.findIndex(group => String(group.step) === step && group.task === task);
groups.value = start < 0 ? data.groups.length - 1 : start;
colours.value = colour || "mask";
attempt = start < 0 ? 0 : Number(attempt);

function draw() {
  const group = data.groups[groups.value];
  attempt = Math.min(attempt, group.attempts.length - 1);
  history.replaceState(null, "", "#" + encodeURIComponent([group.step, group.task, attempt, colours.value].join("|")));
  about.textContent = `${group.question} ${group.preference ? "(" + group.preference + ")" : ""}`;
  table.replaceChildren();
  const head = make("tr", table);
  for (const title of ["attempt", "reward", "outcome", "cost, m$", "latency, s", "calls", "advantage", "ended", "answer"]) make("th", head, title);
  group.attempts.forEach((one, i) => {
    const line = make("tr", table, undefined, i === attempt ? "chosen" : "");
    line.tabIndex = 0;
    for (const cell of [i + 1, shown(one.reward, 3), shown(one.outcome, 0), shown(1000 * one.cost_usd, 3), shown(one.latency_s, 2),
                        one.calls, shown(one.advantage, 3), one.status, (one.answer || "").slice(0, 40)]) make("td", line, String(cell));
    line.onclick = () => { attempt = i; draw(); };
    line.onkeydown = event => { if (event.key === "Enter") line.onclick(); };
  });
  drawIds(group.attempts[attempt], colours.value);
}

function drawIds(one, by) {
  const gaps = one.gaps.filter(gap => !missing(gap)), widest = Math.max(0.01, ...gaps.map(Math.abs));
  legend.textContent = by === "mask" ? "Blue: sampled by the model. Grey: given to it."
    : by === "advantage" ? "Green: made more likely. Red: less likely. Full colour at 3."
    : gaps.length ? `Trainer's probability divided by the sampler's. Green: above 1. Red: below. Full colour at ${Math.exp(widest).toFixed(4)}.`
    : "The trainer did not train on this attempt: there is no ratio.";
  text.replaceChildren();
  let n = 0;
  one.ids.forEach((id, i) => {
    const piece = data.pieces[id], node = make("span", text, piece.replaceAll("\n", "\u21b5\n") || "\u2205");
    if (one.mask[i] === "0") {
      if (by === "mask") node.className = "given";
      node.title = `id ${id}, given`;
      return;
    }
    const gap = one.gaps[n];
    node.title = `id ${id}, sampled by version ${one.versions[n]}\nlog-probability ${shown(one.logprobs[n], 4)}\n` +
      `ratio ${missing(gap) ? "-" : Math.exp(gap).toFixed(7)}\nadvantage ${shown(one.advantage, 3)}`;
    if (by === "mask") node.className = "sampled";
    else if (by === "advantage") node.style.background = tint((one.advantage || 0) / 3);
    else if (gap) node.style.background = tint(gap / widest);
    n += 1;
  });
}

groups.onchange = colours.onchange = draw;
draw();
