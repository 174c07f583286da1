// Everything but the charts and the versions: the speed-up, the facts, learner, traces, tenants, changes.

import { clock, count, element, fillRows, number, rate, UNKNOWN } from "./format.js";

const byId = (id) => document.getElementById(id);
const SAID_EVERY_MS = 30000;
const SHOWN_CHANGES = 50;

const STATES = { off: "off", away: "not reporting", resting: "resting", training: "training" };
const CAUSES = { promoted: "promoted by the learner's gate", chosen: "chosen by an operator" };

let saidAt = -Infinity;

export function showSpeedup(sample, windowSeconds) {
  const big = byId("speedup");
  const idle = sample.tokens_per_s === 0;
  const known = sample.speedup !== null && !idle;
  big.replaceChildren(...(known ? [number(sample.speedup, 2), element("span", { className: "times", text: "×" })] : [UNKNOWN]));
  big.toggleAttribute("data-unknown", !known);
  let note = `${rate(sample.tokens_per_s)} tokens/s served; an estimated ${rate(sample.plain_tokens_per_s)} with no speculation at the same traffic.`;
  if (idle) note = `No tokens were served in the last ${number(windowSeconds)} s.`;
  else if (!known) note = "Not known: no step without drafts has been measured at this load. With --speculation fixed none ever is.";
  byId("speedup-note").textContent = note;
  const now = performance.now();
  if (now - saidAt > SAID_EVERY_MS) {
    saidAt = now;
    byId("speedup-said").textContent = known ? `Speed-up ${number(sample.speedup, 2)} times. ${note}` : note;
  }
}

export function showFacts(sample) {
  const { drafts } = sample;
  const facts = [
    ["Tokens per second", rate(sample.tokens_per_s), ""],
    ["Acceptance length", number(sample.acceptance_length, 2), ""],
    ["Draft length K", number(drafts.mean, 1), `now ${drafts.now ?? UNKNOWN} of ${drafts.most}`],
    ["Requests", number(sample.running), `running, ${number(sample.waiting)} waiting`],
    ["Decode steps", rate(sample.drafted_steps_per_s), `/s drafted, ${rate(sample.plain_steps_per_s)} plain`],
    ["Live version", `v${sample.draft_version}`, `policy ${sample.policy_version}`],
  ];
  byId("facts").replaceChildren(...facts.map(([name, value, unit]) =>
    element("div", {}, [element("dt", { text: name }), element("dd", { text: value }, unit ? [element("small", { text: unit })] : [])])));
  byId("collapsed").hidden = !sample.draft_collapsed;
}

export function showLearner({ learner }) {
  const badge = byId("learner-state");
  badge.textContent = STATES[learner.state];
  badge.dataset.state = learner.state;
  const empty = byId("learner-empty");
  empty.hidden = true;
  if (learner.state === "off" || (learner.state === "away" && !learner.phase)) {
    empty.hidden = false;
    empty.textContent = learner.state === "off"
      ? "The server was started with --learner off: the draft version stays as it is."
      : "No learner has reported yet. Versions stay as they are until one does.";
    byId("learner").replaceChildren();
    return;
  }
  fillRows(byId("learner"), [
    ["Phase", learner.phase],
    ["Trained positions", `${count(learner.trained_positions)} (${rate(learner.trained_per_s)}/s)`],
    ["Updates", count(learner.updates)],
    ["Training loss", number(learner.loss, 3)],
    ["Held-out length, candidate", number(learner.candidate_length, 3)],
    ["Held-out length, live", number(learner.live_length, 3)],
    ["Replay, held-out tokens", `${count(learner.replay_tokens)}, ${count(learner.heldout_tokens)}`],
    ["Versions judged, published", `${count(learner.judged)}, ${count(learner.published)}`],
  ]);
}

export function showTraces({ traces, learner }) {
  const empty = byId("traces-empty");
  empty.hidden = traces.captured > 0;
  empty.textContent = "Nothing has been captured yet: a trace is made of each answered request that may be learned from.";
  byId("traces").hidden = traces.captured === 0;
  const reasons = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1])
    .map(([reason, n]) => [reason.replaceAll("_", " "), count(n), "sub"]);
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  fillRows(byId("traces"), [
    ["Captured in the engine", count(traces.captured)],
    ["Sent to the learner", count(traces.sent)],
    ["Dropped before sending", count(sum(traces.dropped))],
    ...reasons(traces.dropped),
    ["Received by the learner", learner.state === "off" ? UNKNOWN : count(traces.received)],
    ["Refused by the learner", count(sum(traces.refused))],
    ...reasons(traces.refused),
  ]);
}

export function showShares(sample) {
  table(byId("tenants"), "Tenant", sample.tenants, true);
  byId("tenants-empty").hidden = sample.tenants.length > 0;
  byId("tenants-empty").textContent = "No request has been served since the engine started.";
  table(byId("adapters"), "Adapter", sample.adapters, false);
  byId("adapters-card").hidden = sample.adapters.length === 0;
}

function table(place, kind, shares, whole) {
  place.classList.add("stack");
  place.hidden = shares.length === 0;
  const columns = [["Tokens/s", (s) => rate(s.tokens_per_s)], ["Tokens", (s) => count(s.tokens)]];
  if (whole) columns.push(["Running", (s) => number(s.running)]);
  columns.push(["Acceptance length", (s) => number(s.acceptance_length, 2)]);
  if (whole) columns.push(["Traces sent", (s) => count(s.traces)]);
  const head = element("tr", {}, [element("th", { scope: "col", text: kind }),
    ...columns.map(([name]) => element("th", { scope: "col", className: "number", text: name }))]);
  const rows = shares.map((share) => element("tr", {}, [element("th", { scope: "row", text: share.name }),
    ...columns.map(([name, value]) => element("td", { className: "number", "data-name": name, text: value(share) }))]));
  place.replaceChildren(element("thead", {}, [head]), element("tbody", {}, rows));
}

export function showChanges(changes) {
  byId("changes-empty").hidden = changes.length > 0;
  const newest = changes.slice(-SHOWN_CHANGES).reverse();
  byId("changes").replaceChildren(...newest.map((change) => {
    const versions = change.version === null ? "" : change.kind === "policy" ? ` to policy ${change.version}`
      : ` to v${change.version}${change.before === null ? "" : ` from v${change.before}`}`;
    return element("li", {}, [
      element("time", { text: clock(change.time), datetime: new Date(1000 * change.time).toISOString() }),
      element("span", { className: "what" }, [element("span", { className: `mark ${change.kind}`, "aria-hidden": "true" }), ` ${change.kind}${versions}`]),
      element("span", { className: "why", text: [CAUSES[change.cause] ?? "", change.reason].filter(Boolean).join(": ") }),
    ]);
  }));
}

