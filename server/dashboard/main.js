// Puts the page together: the feed in, everything else out of it.

import { Charts } from "./charts.js";
import { FeedReader, key } from "./feed.js";
import { showChanges, showFacts, showLearner, showShares, showSpeedup, showTraces } from "./page.js";
import { Versions } from "./versions.js";

const byId = (id) => document.getElementById(id);
const SECONDS_KEPT = 3600;
const VERSIONS_EVERY_MS = 15000;

let samples = [];
let changes = [];
let windowSeconds = 10;
let span = 900;
let due = false;

const charts = new Charts(byId("charts"));
const versions = new Versions();

// Not while the page is in the background, and once for what arrives together.
function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    charts.show(samples, changes, span);
    if (!samples.length) return;
    const newest = samples[samples.length - 1];
    showSpeedup(newest, windowSeconds);
    showFacts(newest);
    showLearner(newest);
    showTraces(newest);
    if (newest.tenants) showShares(newest);
  });
}

// Beyond an hour one sample a minute is enough.
function thin() {
  if (samples.length < 2 * SECONDS_KEPT) return;
  const recent = samples[samples.length - 1].time - SECONDS_KEPT;
  const dayAgo = samples[samples.length - 1].time - 86400;
  let minute = -1;
  samples = samples.filter((sample) => {
    if (sample.time >= recent) return true;
    const its = Math.floor(sample.time / 60);
    const kept = its !== minute && sample.time >= dayAgo;
    minute = its;
    return kept;
  });
}

const feed = new FeedReader({
  history(history) {
    samples = history.samples;
    changes = history.changes;
    windowSeconds = history.window_s;
    byId("target").textContent = `${history.target} · ${history.method}`;
    byId("target").title = history.target;
    byId("forget-key").hidden = key.get() === null;
    showChanges(changes);
    versions.refresh();
    draw();
  },
  sample(sample) {
    samples.push(sample);
    thin();
    draw();
  },
  change(change) {
    changes.push(change);
    showChanges(changes);
    versions.refresh();
    draw();
  },
  state(name, text) {
    byId("link").dataset.state = name;
    byId("link-text").textContent = text;
  },
  locked(error) {
    const held = key.get() !== null;
    key.forget();
    byId("key-why").textContent = held
      ? `The key was not taken: ${error.message.replace(/\.$/, "")}. Give a monitor's or an admin's key.`
      : "Give a monitor's or an admin's API key. It stays in this tab and is gone when you close it.";
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
    byId("key").focus();
  },
});

function open() {
  feed.open(span);
}

byId("key-form").addEventListener("submit", () => {
  key.set(byId("key").value.trim());
  byId("key").value = "";
  feed.on.state("connecting", "Connecting");
  open();
});
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
byId("forget-key").addEventListener("click", () => {
  key.forget();
  location.reload();
});

byId("spans").addEventListener("change", (event) => {
  const before = span;
  span = Number(event.target.value);
  if (span > before) open(); // there is more to fetch
  draw();
});

// --- the theme: the system's, light, dark ---

const THEMES = ["auto", "light", "dark"];
const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };

function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function showTheme() {
  byId("theme").textContent = `Theme: ${NAMES[theme()].toLowerCase()}`;
  byId("theme").setAttribute("aria-label", `Theme: ${NAMES[theme()]}. Change`);
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("paceline-theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("paceline-theme", next);
  }
  showTheme();
  charts.rebuild();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.rebuild());

showTheme();
open();
setInterval(() => {
  if (!document.hidden && byId("link").dataset.state === "live") versions.refresh();
}, VERSIONS_EVERY_MS);
