// Draws the recorded groups id by id, with text nodes only, so that nothing in the data can run.
const tint = value => `rgba(${value > 0 ? "31,150,80" : "220,60,50"},${Math.min(1, Math.abs(value)) * 0.75})`;
const shown = (value, places) => (absent(value) ? "-" : value.toFixed(places));
const HEADS = ["", "reward", "right", "cost, m$", "latency, s", "calls", "advantage", "failure", "answer"];
const spread = ({ attempts }, key) => Math.max(...attempts.map(one => one[key])) - Math.min(...attempts.map(one => one[key]));
const gain = ({ phase, attempts: [before, after] }) => (phase === "held out" && after ? after.reward - before.reward : 0);

// What a group is filtered by: a title, and the answers by name. A group is shown if all chosen answers fit.
const KINDS = {
  "all groups": () => true,
  "GRPO groups": group => group.phase !== "held out",
  "held-out tasks, before and after": group => group.phase === "held out",
};
const REWARDS = {
  "any reward": () => true,
  "advantages differ": group => spread(group, "advantage") > 0,
  "after earns more": group => gain(group) > 0,
  "after earns less": group => gain(group) < 0,
  "all earn the same": group => group.attempts.length > 1 && spread(group, "reward") === 0,
  "nothing earned": group => group.attempts.every(one => one.reward <= 0),
};

function drawBrowser(box, { groups, pieces, count }) {
  section(box, "Attempts, id by id", titles.notes.browser);
  if (groups.length < count) add(box, "p", `${groups.length} of ${count} groups, evenly spaced, to keep this page small.`, "note");
  const wishes = { "any wish": () => true }, failures = { "any outcome": () => true };
  for (const wish of [...new Set(groups.map(group => group.wish))].sort()) wishes[`wish: ${wish}`] = group => group.wish === wish;
  for (const name of [...new Set(groups.flatMap(group => group.attempts.flatMap(one => one.failures)))].sort())
    failures[name] = group => group.attempts.some(one => one.failures.includes(name));
  failures["nothing went wrong"] = group => group.attempts.every(one => !one.failures.length);

  // The hash of the address keeps what is shown when a live page reloads.
  const [step, task, kept, by] = decodeURIComponent(location.hash.slice(1)).split("|");
  let last = groups.findIndex(group => String(group.step) === step && group.task_id === task), panes = null;
  if (last >= 0 && kept) panes = kept.split(",").map(Number);
  if (last < 0) last = groups.findLastIndex(group => group.phase === "grpo" && spread(group, "advantage") > 0);
  if (last < 0) last = groups.length - 1;

  const bar = add(box, "p", undefined, "bar");
  const pick = (name, answers) => {
    const made = add(bar, "select");
    made.ariaLabel = name;
    for (const [answer, fits] of Object.entries(answers)) {
      const fitting = groups.filter(fits).length;
      if (fitting) add(made, "option", `${answer} (${fitting})`).value = answer;
    }
    made.value = Object.keys(answers)[0];
    made.onchange = list;
    return made;
  };
  const filters = [[pick("kind of group", KINDS), KINDS], [pick("reward", REWARDS), REWARDS], [pick("wish", wishes), wishes], [pick("failure", failures), failures]];
  const way = add(box, "p", undefined, "bar"), back = add(way, "button", "\u2039"), chosen = add(way, "select", undefined, "group"), on = add(way, "button", "\u203a"), colours = add(way, "select");
  [back.title, on.title, chosen.ariaLabel, colours.ariaLabel] = ["the group before", "the next group", "group", "colour"];
  for (const name of ["advantage", "mask", "ratio"]) add(colours, "option", `colour: ${name}`).value = name;
  colours.value = by || "advantage";
  const about = add(box, "div"), attempts = add(box, "div"), legend = add(box, "p", "", "note"), view = add(box, "div", undefined, "pair");

  // The groups that fit the filters.
  function list() {
    chosen.replaceChildren();
    const fitting = groups.map((_, i) => i).filter(i => filters.every(([made, answers]) => answers[made.value](groups[i])));
    for (const i of fitting) {
      const { phase, step, task_id: id, question } = groups[i];
      add(chosen, "option", `${phase === "held out" ? "held out" : `${phase}, step ${step}`}: ${id} ${question}`.slice(0, 90)).value = i;
    }
    if (!fitting.length) add(chosen, "option", "no group fits the filters").value = -1;
    if (!fitting.includes(last)) { last = fitting.length ? fitting[fitting.length - 1] : -1; panes = null; }
    chosen.value = last;
    show();
  }

  // The two attempts to begin with: before and after, or the highest and the lowest advantage.
  function firstPanes({ phase, attempts: all }) {
    if (phase === "held out" || all.length < 2) return all.map((_, i) => i);
    const order = all.map((_, i) => i).sort((a, b) => all[b].advantage - all[a].advantage || all[b].reward - all[a].reward);
    return [order[0], order[order.length - 1]];
  }

  function show() {
    for (const part of [about, attempts, view]) part.replaceChildren();
    legend.textContent = "";
    if (last < 0) return;
    const group = groups[last];
    panes = (panes || firstPanes(group)).filter(i => i < group.attempts.length);
    history.replaceState(null, "", "#" + encodeURIComponent([group.step, group.task_id, panes, colours.value].join("|")));
    add(about, "p", group.question, "question");
    if (group.preference) add(about, "p", `${group.wish}: ${group.preference}`, "note");
    const made = table(attempts, HEADS, group.attempts.map((one, i) => [
      one.side || `attempt ${i + 1}`, shown(one.reward, 3), shown(one.outcome, one.outcome % 1 ? 2 : 0), shown(1000 * one.cost_usd, 3), shown(one.latency_s, 2),
      String(Object.values(one.calls).reduce((sum, n) => sum + n, 0)), one.side ? "-" : shown(one.advantage, 3),
      one.failures.join(", ") || "-", (one.answer || "-").slice(0, 40)]), i => (panes.includes(i) ? "chosen" : ""));
    [...made.children].slice(1).forEach((line, i) => {
      line.tabIndex = 0;
      line.onclick = () => { panes = panes.includes(i) ? panes : [...panes, i].slice(-2); show(); };
      line.onkeydown = event => { if (event.key === "Enter") line.onclick(); };
    });
    // Before and after the training there is no advantage.
    const way = group.phase === "held out" && colours.value === "advantage" ? "mask" : colours.value;
    if (group.prompt.length) {
      const prompt = add(add(view, "details"), "pre");
      add(prompt.parentNode, "summary", `what all of them read first: ${group.prompt.length} ids`);
      prompt.parentNode.ontoggle = () => { if (!prompt.children.length) group.prompt.forEach(id => drawId(prompt, id, null)); };
    }
    const widest = Math.max(0.01, ...panes.flatMap(i => group.attempts[i].gaps.filter(gap => gap !== null).map(Math.abs)));
    for (const i of panes) drawAttempt(add(view, "div", undefined, "pane"), group.attempts[i], i, way, widest);
    const known = panes.some(i => group.attempts[i].gaps.length);
    legend.textContent = way === "mask" ? "Blue: sampled by the model. Grey: given to it."
      : way === "advantage" ? "Green: GRPO makes these ids more likely. Red: less likely. Full colour at an advantage of 3."
      : known ? `Trainer's probability divided by the sampler's. Green: above 1. Red: below. Full colour at ${Math.exp(widest).toFixed(4)}.`
      : "The trainer did not train on these attempts: there is no ratio.";
  }

  function drawAttempt(pane, one, i, way, widest) {
    const worth = one.side ? "" : `, advantage ${shown(one.advantage, 3)}`;
    add(pane, "h4", `${one.side || `attempt ${i + 1}`}: reward ${shown(one.reward, 3)}${worth}`);
    add(pane, "pre", one.tree.slice(one.tree.indexOf("\n") + 1), "tree");  // without the question
    const text = add(pane, "pre");
    const versions = one.versions.flatMap(([version, n]) => Array(n).fill(version));
    let place = 0, n = 0, sampled = false;
    for (const length of one.runs) {
      for (const id of one.ids.slice(place, place + length)) {
        if (!sampled) { drawId(text, id, way); continue; }
        const gap = one.gaps[n];
        const node = drawId(text, id, null, `sampled by version ${versions[n]}\nlog-probability ${shown(one.logprobs[n], 4)}\n` +
          `ratio ${absent(gap) ? "-" : Math.exp(gap).toFixed(7)}\nadvantage ${shown(one.advantage, 3)}`);
        if (way === "mask") node.className = "sampled";
        else if (way === "advantage") node.style.background = tint((one.advantage || 0) / 3);
        else if (gap) node.style.background = tint(gap / widest);
        n++;
      }
      place += length;
      sampled = !sampled;
    }
  }

  function drawId(parent, id, way, title = "given") {
    const node = add(parent, "span", pieces[id].replaceAll("\n", "\u21b5\n") || "\u2205");
    if (way === "mask") node.className = "given";
    node.title = `id ${id}, ${title}`;
    return node;
  }

  const go = by => {
    const places = [...chosen.children].map(option => Number(option.value)), next = places[places.indexOf(last) + by];
    if (next !== undefined) { chosen.value = next; chosen.onchange(); }
  };
  chosen.onchange = () => { last = Number(chosen.value); panes = null; show(); };
  back.onclick = () => go(-1);
  on.onclick = () => go(1);
  colours.onchange = show;
  list();
}

if (data.browser && data.browser.count) drawBrowser(document.getElementById("browser"), data.browser);
