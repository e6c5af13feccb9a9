// Draws the recorded groups id by id, with text nodes only, so that nothing in the data can run.
const shown = (value, places) => absent(value) ? "-" : typeof value === "number" ? value.toFixed(places) : String(value);
const tint = value => `rgba(${value > 0 ? "31,140,70" : "200,50,40"},${Math.min(1, Math.abs(value)) * 0.75})`;
const HEADS = ["attempt", "reward", "outcome", "cost, m$", "latency, s", "calls", "advantage", "ended", "answer"];

function drawBrowser(box, { groups, pieces, count }) {
  section(box, "Trajectories, id by id",
    `${groups.length} of the last ${count} groups. Point at an id for its numbers; click on an attempt to see it.`);
  // The hash of the address keeps what is shown when a live page reloads.
  let [step, task, attempt, colour] = decodeURIComponent(location.hash.slice(1)).split("|");
  const bar = add(box, "p"), chosen = add(bar, "select"), colours = add(bar, "select");
  const about = add(box, "p"), attempts = add(add(box, "div", undefined, "wide"), "table");
  const legend = add(box, "p", "", "note"), text = add(box, "pre");
  chosen.ariaLabel = "group";
  colours.ariaLabel = "colour";
  groups.forEach(([{ phase, step, task_id }], i) => { add(chosen, "option", `${phase}, step ${step}: ${task_id}`).value = i; });
  for (const name of ["mask", "ratio", "advantage"]) add(colours, "option", `colour: ${name}`).value = name;
  const start = groups.findIndex(([row]) => String(row.step) === step && row.task_id === task);
  chosen.value = start < 0 ? groups.length - 1 : start;
  colours.value = colour || "mask";
  attempt = start < 0 ? 0 : Number(attempt);

  function draw() {
    const group = groups[chosen.value], [row] = group;
    attempt = Math.min(attempt, group.length - 1);
    history.replaceState(null, "", "#" + encodeURIComponent([row.step, row.task_id, attempt, colours.value].join("|")));
    about.textContent = `${row.question} ${row.preference ? "(" + row.preference + ")" : ""}`;
    attempts.replaceChildren();
    const head = add(attempts, "tr");
    for (const title of HEADS) add(head, "th", title);
    group.forEach((one, i) => {
      const line = add(attempts, "tr", undefined, i === attempt ? "chosen" : ""), calls = Object.values(one.calls);
      line.tabIndex = 0;
      for (const cell of [i + 1, shown(one.reward, 3), shown(one.outcome, 0), shown(1000 * one.cost_usd, 3), shown(one.latency_s, 2),
                          calls.reduce((sum, n) => sum + n, 0), shown(one.advantage, 3), one.status, (one.answer || "").slice(0, 40)]) add(line, "td", String(cell));
      line.onclick = () => { attempt = i; draw(); };
      line.onkeydown = event => { if (event.key === "Enter") line.onclick(); };
    });
    drawIds(group[attempt], colours.value);
  }

  function drawIds(one, by) {
    const trained = one.trainer_logprobs || [];
    const places = one.ids.map((_, i) => i).filter(i => one.sampled[i]);  // trained has an entry for each
    const gaps = places.map((i, n) => absent(trained[n]) || absent(one.logprobs[i]) ? null : Math.round(1e7 * (trained[n] - one.logprobs[i])) / 1e7);
    const known = gaps.filter(gap => gap !== null), widest = Math.max(0.01, ...known.map(Math.abs));
    legend.textContent = by === "mask" ? "Blue: sampled by the model. Grey: given to it."
      : by === "advantage" ? "Green: made more likely. Red: less likely. Full colour at 3."
      : known.length ? `Trainer's probability divided by the sampler's. Green: above 1. Red: below. Full colour at ${Math.exp(widest).toFixed(4)}.`
      : "The trainer did not train on this attempt: there is no ratio.";
    text.replaceChildren();
    let n = 0;
    one.ids.forEach((id, i) => {
      const node = add(text, "span", pieces[id].replaceAll("\n", "\u21b5\n") || "\u2205");
      if (!one.sampled[i]) {
        if (by === "mask") node.className = "given";
        node.title = `id ${id}, given`;
        return;
      }
      const gap = gaps[n++];
      node.title = `id ${id}, sampled by version ${one.weight_versions[i]}\nlog-probability ${shown(one.logprobs[i], 4)}\n` +
        `ratio ${absent(gap) ? "-" : Math.exp(gap).toFixed(7)}\nadvantage ${shown(one.advantage, 3)}`;
      if (by === "mask") node.className = "sampled";
      else if (by === "advantage") node.style.background = tint((one.advantage || 0) / 3);
      else if (gap) node.style.background = tint(gap / widest);
    });
  }

  chosen.onchange = colours.onchange = draw;
  draw();
}

if (data.browser && data.browser.count) drawBrowser(document.getElementById("browser"), data.browser);
