const S = (name) => DATA.series[name] || DATA.steps.map(() => null);
const TINTS = ["orange", "teal", "purple", "pink", "green", "amber"];
const FACTS = DATA.facts;
const FIRST = ["loss", "mismatch_kl", "ess", "entropy", "grad_norm", "kl", "clip", "ratio", "mismatch"];  // trainer metrics that people look at first

function header() {
  const theme = el("button", { type: "button", onclick: () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); } }, "light / dark");
  const facts = el("div", { class: "facts" });
  for (const [name, value] of FACTS.lines) facts.append(el("span", {}, name + " ", el("b", {}, value)));
  PAGE.append(el("header", {}, el("h1", {}, FACTS.name), el("span", { class: "pill " + FACTS.status }, FACTS.status), el("span", { class: "muted" }, FACTS.reason), el("span", { class: "spacer" }), theme), facts);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  for (const redraw of REDRAW) redraw();
}

function tile(label, value, note, from) {
  const shown = el("div", { class: "value" }, from ? el("span", { class: "from" }, from + " → ") : null, value);
  return el("div", { class: "card tile" }, el("div", { class: "label" }, term(label)), shown, el("div", { class: "note" }, note));
}

function tiles() {
  const last = (name) => S(name).filter((v) => v !== null).at(-1);
  const mean = (name) => { const known = S(name).filter((v) => v !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
  const most = (name) => S(name).reduce((m, v) => Math.max(m, v ?? 0), 0);
  const held = FACTS.heldout_start !== null;
  const sets = Object.keys(FACTS.heldout).length;
  PAGE.append(el("div", { class: "tiles" },
    held ? tile("held-out reward", fmt(FACTS.heldout_end), sets > 1 ? `sampled as trained, mean of ${sets} sets` : "sampled as trained", fmt(FACTS.heldout_start))
      : tile("reward", fmt(last("train/all/reward")), "mean of the last window", fmt(S("train/all/reward").find((v) => v !== null))),
    tile("goodput", fmt(FACTS.goodput, true), "of the training tokens sampled were trained on"),
    tile("tokens sampled", fmt(FACTS.tokens_sampled), `${count(FACTS.rollouts)} rollouts`),
    tile("throughput", fmt(mean("throughput/sampled")), "tokens/s sampled, mean over steps"),
    tile("staleness", fmt(mean("staleness/mean")), `optimizer steps, mean; at most ${fmt(most("staleness/max"))}`),
    tile("wall time", seconds(FACTS.wall_s), `${FACTS.steps} optimizer steps`)));
}

function tokensCard() {
  const totals = {};
  for (const line of DATA.account) for (const [place, n] of Object.entries(line.tokens)) totals[place] = (totals[place] || 0) + n;
  const all = Object.values(totals).reduce((a, b) => a + b, 0) || 1;
  const grid = el("div", { class: "fates" });
  const shown = DATA.places.filter((place) => totals[place]);
  const most = Math.max(...shown.map((place) => totals[place]), 1);
  for (const place of shown) {
    const bar = el("div", { class: "bar" });
    bar.style.width = (100 * totals[place]) / most + "%";
    bar.style.background = `var(--f-${place})`;
    grid.append(el("span", {}, term(words(place))), el("div", { class: "track" }, bar), el("span", { class: "num" }, fmt(totals[place])), el("span", { class: "num muted" }, fmt(totals[place] / all, true)));
  }
  const sum = (name) => DATA.account.reduce((total, line) => total + line[name], 0);
  const sampled = sum("sampled"), computed = sum("prefill"), cached = sum("prefill_cached"), again = sum("prefill_recomputed");
  if (computed + cached) {
    grid.append(el("div", { class: "rule" }, "Prompt tokens", el("span", { class: "unit" }, "as sent to engines")));
    for (const [name, n, tint] of [["cached", cached, "green"], ["computed", computed - again, "blue"], ["recomputed", again, "orange"]]) {
      const bar = el("div", { class: "bar" });
      bar.style.width = (100 * n) / Math.max(cached, computed) + "%";
      bar.style.background = `var(--${tint})`;
      grid.append(el("span", {}, term(name)), el("div", { class: "track" }, bar), el("span", { class: "num" }, fmt(n)), el("span", { class: "num muted" }, fmt(n / (computed + cached), true)));
    }
  }
  const missing = DATA.account.reduce((sum, line) => sum + Math.abs(line.missing_tokens) + Math.abs(line.missing_rollouts), 0);
  const law = el("div", { class: "law" }, `${count(sampled)} tokens sampled = the sum of these. `,
    missing ? el("span", { class: "bad" }, `Not conserved: ${count(missing)} unaccounted for.`) : el("span", { class: "good" }, "✓ conserved, in tokens and rollouts"));
  return card("s4", "Where every token went", "sampled tokens, whole run", law, grid);
}

function rewardCard(scope) {
  const series = [{ name: "train", tint: "blue", y: S(`train/${scope}/reward`), smooth: true }];
  const envs = DATA.evals.map((entry) => entry.env).filter((env) => scope === "all" || env === scope || !DATA.scopes.includes(env));
  envs.forEach((env, i) => {
    const entry = DATA.evals.find((e) => e.env === env);
    series.push({ name: envs.length > 1 ? `held-out ${env}` : "held-out", tint: TINTS[i % TINTS.length], x: entry.version, y: entry.reward, dots: true });
  });
  return chart("s8", { title: "Reward", unit: "mean of scored rollouts", x: DATA.steps, series, height: 292 });
}

function charts(scope) {
  const t = (name) => S(`train/${scope}/${name}`);
  const line = (name, tint, y, more) => ({ name, tint, y, ...more });
  const fates = DATA.places.filter((place) => S(`tokens/to/${place}`).some((v) => v));
  const grid = el("div", { class: "grid" },
    rewardCard(scope), tokensCard(),
    chart("s4", { title: "Length", unit: "sampled tokens a rollout", x: DATA.steps, series: [line("drawn", "grey", t("length"), { smooth: true }), line("trained", "blue", t("length_shipped"), { smooth: true })] }),
    chart("s4", { title: "Endings", unit: "share of rollouts", percent: true, low: 0, x: DATA.steps, series: [line("truncated", "purple", t("truncated")), line("failed", "red", t("failed")), line("cancelled", "grey", t("cancelled"))] }),
    chart("s4", { title: "Staleness", unit: "optimizer steps, of what was trained", low: 0, x: DATA.steps, series: [line("mean", "blue", S("staleness/mean")), line("max", "orange", S("staleness/max"), { dash: true })] }),
    chart("s4", { title: "Throughput", unit: "tokens/s", low: 0, x: DATA.steps, series: [line("sampled", "grey", S("throughput/sampled"), { smooth: true }), line("trained", "green", S("throughput/shipped"), { smooth: true })] }),
    chart("s4", { title: "Where tokens went", unit: "tokens settled a step", kind: "stack", x: DATA.steps, series: fates.map((fate) => line(words(fate), "f-" + fate, S(`tokens/to/${fate}`))) }),
    chart("s4", { title: "Inference against environment", unit: "mean seconds a rollout", kind: "stack", x: DATA.steps, series: [line("model calls", "model0", t("model_s")), line("gate wait", "gate", t("gate_s")), line("environment", "grey", t("env_s"))] }),
    chart("s4", { title: "Within-group reward variance", unit: "mean over groups", low: 0, x: DATA.steps, series: [line("variance", "blue", t("group_variance"), { smooth: true })] }),
    chart("s4", { title: "Signal", unit: "share", percent: true, low: 0, high: 1, x: DATA.steps, series: [line("groups without signal", "amber", t("groups_zero_signal")), line("batch with advantage", "green", t("trainable")), ...(t("gated").some((v) => v) ? [line("refused by a gate", "red", t("gated"))] : [])] }),
    chart("s4", { title: "Step time", unit: "s", low: 0, x: DATA.steps, series: [line("step", "blue", S("time/step_s")), line("train", "orange", S("time/train_s")), line("weights load", "amber", S("time/update_s"))] }));
  if (scope === "all" && DATA.scopes.length > 2) {
    const share = (name) => DATA.scopes.slice(1).map((env, i) => line(env, ["blue", ...TINTS][i % 7], S(`train/${env}/${name}`)));
    grid.append(chart("s6", { title: "Drawn share", unit: "of rollouts drawn so far", percent: true, low: 0, x: DATA.steps, series: share("drawn_share") }),
      chart("s6", { title: "Trained share", unit: "of rollouts trained on so far", percent: true, low: 0, x: DATA.steps, series: share("shipped_share") }));
  }
  return grid;
}

function training() {
  const holder = el("div", {});
  const show = (scope) => holder.replaceChildren(charts(scope));
  if (DATA.scopes.length > 2) {
    const select = el("select", { "aria-label": "environment", onchange: () => show(select.value) }, ...DATA.scopes.map((scope) => el("option", { value: scope }, scope === "all" ? "all environments" : scope)));
    PAGE.append(el("div", { class: "bar-line" }, el("span", { class: "spacer" }), el("span", { class: "muted" }, "environment"), select));
  }
  PAGE.append(holder);
  show("all");
}

function trainer() {
  const rank = (name) => { const at = FIRST.findIndex((word) => name.slice(8).startsWith(word)); return at < 0 ? FIRST.length : at; };
  const names = Object.keys(DATA.series).filter((name) => name.startsWith("trainer/")).sort((a, b) => rank(a) - rank(b));
  if (!names.length) return;
  PAGE.append(el("h2", {}, "Trainer"), el("p", {}, "What the trainer measured in each step. Point at a title for what it means."),
    el("div", { class: "grid" }, ...names.map((name) => chart("s3", { title: words(name.slice(8)), x: DATA.steps, height: 140, series: [{ name: "", tint: "blue", y: S(name), smooth: true }] }))));
}

function timelineSection() {
  const data = DATA.timeline;
  if (!data.lanes.length) return;
  const steps = data.steps.map((step) => step.step);
  const note = data.left_out ? ` The oldest ${count(data.left_out)} rollouts are left out.` : "";
  PAGE.append(el("h2", {}, steps.length ? `Timeline of the last steps` : "Timeline"),
    el("p", {}, `Every rollout of the last ${seconds(data.span)}, in seconds of the run's clock. Drag to zoom, double-click for all, Ctrl+wheel to zoom, hover for details.${note}`), timeline(data));
}

function accountSection() {
  const places = DATA.places.filter((place) => DATA.account.some((line) => line.tokens[place] || line.rollouts[place]));
  const head = el("tr", {}, el("th", {}, "environment"), ...places.map((place) => el("th", {}, term(words(place)))), el("th", {}, "sum"), el("th", {}, term("sampled")), el("th", {}, term("conserved")), el("th", {}, term("prefill computed")), el("th", {}, term("cached")), el("th", {}, term("recomputed")));
  const body = DATA.account.map((line) => {
    const cell = (tokens, rollouts) => el("td", {}, tokens || rollouts ? count(tokens) : "·", el("small", {}, rollouts ? `${count(rollouts)} rollouts` : " "));
    const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
    const good = !line.missing_tokens && !line.missing_rollouts;
    return el("tr", {}, el("td", {}, line.env, el("small", {}, line.split)), ...places.map((place) => cell(line.tokens[place], line.rollouts[place])),
      cell(sum(line.tokens), sum(line.rollouts)), cell(line.sampled, line.launched),
      el("td", { class: good ? "good" : "bad" }, good ? "✓" : `${count(line.missing_tokens)} tokens, ${count(line.missing_rollouts)} rollouts missing`),
      el("td", {}, count(line.prefill)), el("td", {}, count(line.prefill_cached)), el("td", {}, count(line.prefill_recomputed)));
  });
  PAGE.append(el("h2", {}, "Token account"), el("p", {}, "Sampled tokens by where they went, and the rollouts they belong to. Sampled is counted as engines answer, the rest as rollouts settle."),
    el("section", { class: "card scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body))));
}

function biasSection() {
  const known = DATA.bias.filter((entry) => entry.drawn);
  if (!known.length) return;
  const size = known.length > 2 ? "s4" : known.length > 1 ? "s6" : "s12";
  PAGE.append(el("h2", {}, term("Length bias")), el("p", {}, "Lengths trained on against lengths drawn. A ratio below 1 means that training sees shorter rollouts than the policy makes."),
    el("div", { class: "grid" }, ...known.map((entry) => bars(size, {
      title: entry.env, unit: `trained ${fmt(entry.trained_mean)} tokens, drawn ${fmt(entry.drawn_mean)}: ratio ${fmt(entry.ratio)}`, percent: true,
      names: entry.buckets.map((bucket) => "≤ " + count(bucket.upto)), xname: "tokens", xlabel: "sampled tokens of a rollout",
      series: [{ name: "drawn", tint: "grey", y: entry.buckets.map((bucket) => bucket.drawn / entry.drawn) }, { name: "trained", tint: "blue", y: entry.buckets.map((bucket) => (entry.trained ? bucket.trained / entry.trained : 0)) }],
    }))));
}

function conversations() {
  if (!DATA.conversations.length) return;
  PAGE.append(el("h2", {}, "Conversations"), el("p", {}, "A few rollouts as they were, long messages cut."));
  DATA.conversations.forEach((entry, i) => {
    const ending = entry.ending + (entry.cause ? ` (${entry.cause})` : "");
    const details = el("details", { class: "card chat" }, el("summary", {}, el("b", {}, `${entry.env}, ${entry.split}`), el("span", { class: "muted" }, entry.label), el("span", {}, `reward ${fmt(entry.reward)}`),
      el("span", { class: "muted" }, `${ending} · ${entry.version === null ? "" : "v" + entry.version} · ${entry.rollout}`)));
    for (const [role, text] of entry.messages) {
      const message = el("div", { class: "msg" }, el("div", { class: "role" }, role), el("pre", {}, text));
      if (role === "assistant") message.classList.add("assistant");
      details.append(message);
    }
    if (i === 0) details.open = true;
    PAGE.append(details);
  });
}

function config() {
  if (!DATA.config) return;
  PAGE.append(el("h2", {}, "Config as resolved"), el("details", { class: "card" }, el("summary", {}, "every key, with where its value came from"), el("pre", {}, DATA.config)));
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
header();
tiles();
training();
timelineSection();
trainer();
accountSection();
biasSection();
conversations();
config();
PAGE.append(el("footer", {}, FACTS.footer));
