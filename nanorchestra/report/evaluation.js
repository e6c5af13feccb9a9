// Draws the page of an evaluation.
// An evaluation in the layout of the paper's Table 1.
function drawSummary(parent, worlds) {
  if (summary.partial) add(parent, "p", `Partial: ${summary.partial}`, "partial");
  const names = [...new Set(worlds.flatMap(([, policies]) => Object.keys(policies)))];
  const tasks = worlds.map(([world, policies]) => `${Math.max(...Object.values(policies).map(scores => scores.tasks))} tasks of ${world}`);
  add(parent, "p", `${names.length} ${names.length > 1 ? "policies at the same" : "policy at"} held-out tasks: ${tasks.join(", ")}.`, "note");
  section(parent, "Summary", titles.notes.summary);
  const mean = (name, key) => {
    const known = worlds.map(([, policies]) => policies[name]).filter(Boolean);
    if (known.some(scores => absent(scores[key]))) return null;  // a model without a price
    return known.reduce((sum, scores) => sum + scores[key], 0) / known.length;
  };
  table(parent, ["", ...worlds.map(([world]) => `${world}, %`), "cost, cents", "latency, min"],
    names.map(name => [
      explained(name),
      ...worlds.map(([, policies]) => (policies[name] ? cell(policies[name], "accuracy") : "-")),
      digits(mean(name, "cost_usd"), 100),
      digits(mean(name, "latency_s") / 60),
    ]), first);
}

function drawWorld(parent, world, named) {
  section(parent, world, titles.notes.scores);
  scored(parent, named.map(([name, scores]) => [explained(name), scores]), first);
  const more = named.map(([name, { tasks, failed, published, pass_hat: passed }]) => [
    label(name), tasks, failed, rounded(published, 3), ...(passed.length > 1 ? passed : []).map(p => (100 * p).toFixed(1)),
  ]);
  const trials = Math.max(...more.map(row => row.length)) - 4;
  add(parent, "p", titles.notes.more, "note");
  table(parent, ["", "tasks", "failed", "appendix L", ...Array.from({ length: trials }, (_, k) => `pass^${k + 1}, %`)], more, first);
  for (const [name, { failed, failure }] of named)
    if (failed) add(parent, "p", `${label(name)}, the first that failed: ${failure}`, "note");
  heat(parent, titles.notes.calls, named.map(([name, { calls }]) => [label(name), calls]));
  if (named.some(([, { seconds_by: by }]) => by))
    heat(parent, titles.notes.seconds, named.map(([name, { seconds_by: by }]) => [label(name), by || {}]));
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

// For each wish the task that the first policy wins by most, and the one that it loses by most.
function drawPairs(parent, pairs) {
  section(parent, "Instructive attempts, one a wish", titles.notes.attempts);
  for (const { wish, preference, won, sides } of pairs) {
    const card = add(parent, "div", undefined, "pair");
    add(card, "h3", `${wish}: ${label(sides[0].policy)} earns ${won ? "more" : "less"}`);
    if (preference) add(card, "p", preference);
    for (const side of sides) {
      const box = add(card, "div", undefined, "pane");
      add(box, "h4", `${label(side.policy)}: reward ${side.reward.toFixed(3)}`);
      add(box, "pre", side.tree);
    }
  }
}

const worlds = Object.entries(summary.worlds);
drawSummary(document.getElementById("summary"), worlds);
for (const [world, policies] of worlds) drawFrontiers(document.getElementById("frontier"), policies, world);
for (const [world, policies] of worlds) drawWorld(document.getElementById("worlds"), world, Object.entries(policies));
if (data.pairs.length) drawPairs(document.getElementById("pairs"), data.pairs);
