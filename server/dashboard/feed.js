// The feed: server-sent events read with fetch, so that the key travels in a header.

const SILENCE_MS = 15000; // the server sends a heartbeat every 5 s
const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 10000;
const STORED_KEY = "paceline-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED_KEY),
  set: (value) => sessionStorage.setItem(STORED_KEY, value),
  forget: () => sessionStorage.removeItem(STORED_KEY),
};

function headers() {
  const held = key.get();
  return held ? { Authorization: `Bearer ${held}` } : {};
}

// One of the server's own routes, by its path below the place that the page was served from.
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response.json();
}

async function reason(response) {
  try {
    const body = await response.json();
    const said = body.detail ?? body.error?.message ?? body.message;
    if (typeof said === "string") return said;
  } catch {
    // Not JSON: the status has to do.
  }
  return `the server answered ${response.status}`;
}

// Reports through `on`: history, sample, change, and state(name, text). Stops and asks for a key at 401 and 403.
export class FeedReader {
  constructor(on) {
    this.on = on;
    this.wait = FIRST_WAIT_MS;
    this.generation = 0;
  }

  open(historySeconds) {
    this.history = historySeconds;
    this.generation += 1;
    this.controller?.abort();
    clearTimeout(this.timer);
    this.#read(this.generation);
  }

  async #read(generation) {
    const current = () => generation === this.generation;
    const controller = (this.controller = new AbortController());
    try {
      const response = await fetch(`v1/paceline/feed?history=${this.history}`, {
        headers: headers(), cache: "no-store", signal: controller.signal,
      });
      if (!response.ok) throw new ApiError(response.status, await reason(response));
      await this.#take(response.body, controller, current);
      throw new Error("the feed ended");
    } catch (error) {
      if (!current()) return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        this.on.state("locked", "Key needed");
        this.on.locked(error);
        return;
      }
      const seconds = Math.round(this.wait / 1000);
      this.on.state("lost", `Not connected; trying again in ${seconds} s`);
      this.timer = setTimeout(() => current() && this.#read(generation), this.wait);
      this.wait = Math.min(LONGEST_WAIT_MS, 2 * this.wait);
    }
  }

  async #take(body, controller, current) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const silence = setTimeout(() => controller.abort(), SILENCE_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silence));
      if (done || !current()) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) this.#dispatch(event);
    }
  }

  #dispatch(event) {
    let name = "";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!name) return; // a heartbeat
    if (name === "history") {
      this.wait = FIRST_WAIT_MS;
      this.on.state("live", "Live");
    }
    this.on[name]?.(JSON.parse(data));
  }
}
