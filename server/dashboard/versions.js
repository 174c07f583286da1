// The table of draft versions, and the two things that can be done with it.

import { ask } from "./feed.js";
import { clock, count, element, number, UNKNOWN } from "./format.js";

const byId = (id) => document.getElementById(id);

function row(draft, listing, busy) {
  const live = draft.version === listing.live;
  const gain = draft.heldout_length !== null && draft.parent_length !== null ? draft.heldout_length - draft.parent_length : null;
  const cell = (name, value, className = "number") => element("td", { className, "data-name": name }, [].concat(value));
  const gained = gain === null ? [UNKNOWN] : [`${gain < 0 ? "−" : "+"}${number(Math.abs(gain), 3)} `];
  if (gain !== null && draft.gain_lower !== null) gained.push(element("small", { text: `≥ ${number(draft.gain_lower, 3)}` }));
  const act = element("td", { className: "act", "data-name": "" });
  if (live) act.append(element("span", { className: "live-tag", text: "live" }));
  else act.append(element("button", { type: "button", text: "Activate", "data-version": draft.version, disabled: busy ? "" : null, "aria-label": `Activate version ${draft.version}` }));
  const origin = [draft.origin];
  if (draft.rolled_back) origin.push(" ", element("abbr", { className: "taken-back", title: draft.rolled_back, text: "rolled back" }));
  const acceptance = draft.acceptance;
  return element("tr", { "aria-current": live ? "true" : null }, [
    element("th", { scope: "row", text: `v${draft.version}` }),
    cell("Origin", [element("span", {}, origin)], ""),
    cell("Made", draft.created ? clock(draft.created) : UNKNOWN, ""),
    cell("Held-out", number(draft.heldout_length, 3)),
    cell("Gain", [element("span", {}, gained)]),
    cell("Live length", number(acceptance?.length ?? null, 3)),
    cell("Live steps", acceptance ? count(acceptance.steps) : UNKNOWN),
    act,
  ]);
}

export class Versions {
  constructor() {
    this.listing = null;
    this.busy = false;
    this.body = byId("versions").querySelector("tbody");
    byId("versions").classList.add("stack");
    this.body.addEventListener("click", (event) => {
      const version = event.target.closest("button")?.dataset.version;
      if (version !== undefined) this.#activate(Number(version));
    });
    byId("rollback").addEventListener("click", () => this.#rollback());
  }

  async refresh() {
    try {
      this.listing = await ask("v1/paceline/drafts");
      byId("versions-empty").hidden = this.listing.drafts.length > 0;
      byId("versions-empty").textContent = "No draft version is on disk.";
    } catch (error) {
      if (this.listing === null) {
        byId("versions-empty").hidden = false;
        byId("versions-empty").textContent = `The versions cannot be shown: ${error.message}.`;
      }
    }
    this.#render();
  }

  #render() {
    if (this.listing === null) return;
    const focused = document.activeElement?.dataset?.version;
    const newest = [...this.listing.drafts].sort((a, b) => b.version - a.version);
    this.body.replaceChildren(...newest.map((draft) => row(draft, this.listing, this.busy)));
    if (focused !== undefined) this.body.querySelector(`button[data-version="${focused}"]`)?.focus();
    const { previous } = this.listing;
    const button = byId("rollback");
    button.disabled = this.busy || previous === null;
    button.textContent = previous === null ? "Roll back" : `Roll back to v${previous}`;
    button.title = previous === null ? "There is no previous version." : "";
  }

  #activate(version) {
    return this.#change(
      `Activate version ${version}?`,
      `It becomes live between two steps; running requests go on. Version ${this.listing.live} stays on disk.`,
      "Activate", `v1/paceline/drafts/${version}/activate`,
    );
  }

  #rollback() {
    const { live, previous } = this.listing;
    return this.#change(
      `Roll back to version ${previous}?`,
      `Version ${live} is no longer used; it stays on disk. Running requests go on.`,
      "Roll back", "v1/paceline/drafts/rollback",
    );
  }

  async #change(title, text, yes, path) {
    if (this.busy || !(await confirmed(title, text, yes))) return;
    this.busy = true;
    this.#render();
    say("The engine is being asked …", false);
    try {
      const done = await ask(path, { method: "POST" });
      say(`Version ${done.live} is live. The engine stood still for ${number(1000 * done.seconds)} ms.`, false);
    } catch (error) {
      say(`Nothing was changed: ${error.message}.`.replace(/\.\.$/, "."), true);
    }
    this.busy = false;
    await this.refresh();
  }
}

function say(text, failed) {
  const result = byId("result");
  result.hidden = false;
  result.textContent = text;
  result.classList.toggle("error", failed);
}

function confirmed(title, text, yes) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  byId("confirm-yes").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
