// The four charts, drawn by uPlot (vendored, version 1.6.32); swaps, rollbacks, drift and policies marked.

import { element, number, percent, rate } from "./format.js";

const DASHES = { swap: [], rollback: [6, 4], drift: [2, 3], policy: [] };
const MARK_COLOURS = { swap: "--green", rollback: "--orange", drift: "--purple", policy: "--grey" };
const GAP_S = 90; // minutes lie 60 s apart; beyond this the server was not there

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// name, what an empty chart is missing, lines: (most drafts) -> [{label, value(sample), colour, dash, width}]
const CHARTS = [
  {
    title: "Tokens per second",
    missing: "No tokens were served in the time shown.",
    write: rate,
    lines: () => [
      { label: "served", value: (s) => s.tokens_per_s, colour: "--blue", width: 2 },
      { label: "estimated without speculation", value: (s) => s.plain_tokens_per_s, colour: "--orange", dash: [6, 4], width: 2 },
    ],
    range: (low, high) => [0, Math.max(1, high * 1.12)],
    empty: (samples) => !samples.some((s) => s.tokens_per_s > 0),
  },
  {
    title: "Acceptance length",
    missing: "Nothing was drafted in the time shown.",
    write: (value) => number(value, 2),
    lines: () => [{ label: "tokens per drafted step", value: (s) => s.acceptance_length, colour: "--blue", width: 2 }],
    range: (low, high) => [1, Math.max(2, high * 1.06)],
  },
  {
    title: "Acceptance by position",
    missing: "Nothing was drafted in the time shown.",
    write: percent,
    lines: (most) => Array.from({ length: most }, (_, i) => ({
      label: `${i + 1}`,
      value: (s) => s.acceptance[i] ?? null,
      colour: ["--blue", "--orange", "--green", "--purple", "--grey"][i % 5],
      dash: i < 5 ? undefined : [4, 3],
      width: 1.75,
    })),
    range: () => [0, 1],
    axis: (values) => values.map((value) => `${Math.round(100 * value)} %`),
  },
  {
    title: "Draft length K",
    missing: "No step has been scheduled in the time shown.",
    write: (value) => number(value, 2),
    lines: () => [{ label: "mean of the window's steps", value: (s) => s.drafts.mean, colour: "--blue", width: 2 }],
    range: (low, high, most) => [0, most + 0.4],
    whole: true,
  },
];

// Draws the marks of what changed, over the lines.
function marks(changes) {
  return {
    hooks: {
      draw: (plot) => {
        const { ctx } = plot;
        const { left, top, width, height } = plot.bbox;
        const ratio = devicePixelRatio;
        let labelled = -Infinity;
        ctx.save();
        ctx.font = `${11 * ratio}px system-ui, sans-serif`;
        ctx.textAlign = "left";
        ctx.textBaseline = "alphabetic";
        for (const change of changes()) {
          const x = Math.round(plot.valToPos(change.time, "x", true));
          if (x < left || x > left + width) continue;
          ctx.strokeStyle = ctx.fillStyle = colour(MARK_COLOURS[change.kind]);
          ctx.lineWidth = 1.5 * ratio;
          ctx.setLineDash(DASHES[change.kind].map((d) => d * ratio));
          ctx.beginPath();
          ctx.moveTo(x, top);
          ctx.lineTo(x, top + height);
          ctx.stroke();
          const text = change.version === null ? "drift" : `${change.kind === "policy" ? "p" : "v"}${change.version}`;
          const room = ctx.measureText(text).width + 8 * ratio;
          if (x - labelled < room || x + room > left + width) continue;
          labelled = x;
          ctx.fillText(text, x + 4 * ratio, top + 11 * ratio);
        }
        ctx.restore();
      },
    },
  };
}

export class Charts {
  constructor(place) {
    this.place = place;
    this.samples = [];
    this.changes = [];
    this.span = 900;
    this.most = null;
    this.views = [];
    new ResizeObserver(() => this.#resize()).observe(place);
  }

  show(samples, changes, span) {
    this.samples = samples;
    this.changes = changes;
    this.span = span;
    const most = samples.length ? samples[samples.length - 1].drafts.most : 0;
    if (most !== this.most) {
      this.most = most;
      this.rebuild();
    } else {
      this.#update();
    }
  }

  // Anew, with the colours of the theme now.
  rebuild() {
    for (const view of this.views) view.plot.destroy();
    this.views = CHARTS.map((chart) => this.#build(chart));
    this.place.replaceChildren(...this.views.map((view) => view.card));
    this.#resize();
    this.#update();
  }

  #build(chart) {
    const lines = chart.lines(this.most ?? 0);
    const card = element("section", { className: "chart", "aria-label": chart.title }, [element("h2", { text: chart.title })]);
    const values = lines.map(() => element("b"));
    const legend = element("p", { className: "legend" }, lines.map((line, i) => {
      const swatch = element("i", { className: line.dash ? "dashed" : "" });
      swatch.style.borderColor = colour(line.colour);
      return element("span", {}, [swatch, `${line.label} `, values[i]]);
    }));
    const holder = element("div", { className: "plot" });
    const none = element("p", { className: "none", text: chart.missing });
    holder.append(none);
    card.append(legend, holder);
    const soft = colour("--soft");
    const grid = { stroke: colour("--grid"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const options = {
      width: 300, height: 190, pxAlign: 0, legend: { show: false }, padding: [8, 18, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: true, range: () => this.#range() },
        y: { range: (_, low, high) => chart.range(low ?? 0, high ?? 0, this.most ?? 0) },
      },
      axes: [
        { stroke: soft, grid: { show: false }, ticks: { stroke: colour("--line"), width: 1, size: 4 }, font, space: 64, size: 26,
          values: "{HH}:{mm}", incrs: [60, 120, 180, 300, 600, 900, 1800, 3600, 7200, 14400, 21600] },
        { stroke: soft, grid, ticks: { show: false }, font, size: 42, space: 34,
          values: chart.axis ? (_, values) => chart.axis(values) : undefined,
          incrs: chart.whole ? [1, 2, 4, 8] : undefined },
      ],
      series: [{}, ...lines.map((line) => ({
        label: line.label, stroke: colour(line.colour), width: line.width, dash: line.dash,
        points: { show: false }, spanGaps: false,
      }))],
      plugins: [marks(() => this.changes)],
      hooks: { setCursor: [() => this.#legend(view)] },
    };
    const view = { chart, lines, card, values, none, holder, plot: null };
    view.plot = new uPlot(options, [[], ...lines.map(() => [])], holder);
    return view;
  }

  #range() {
    const end = this.samples.length ? this.samples[this.samples.length - 1].time : Date.now() / 1000;
    return [end - this.span, end];
  }

  #update() {
    const [start] = this.#range();
    const first = this.samples.findIndex((sample) => sample.time >= start - GAP_S);
    const shown = first < 0 ? [] : this.samples.slice(first);
    for (const view of this.views) {
      view.shown = shown;
      const times = [];
      const columns = view.lines.map(() => []);
      let last = null;
      for (const sample of shown) {
        if (last !== null && sample.time - last > GAP_S) {
          times.push(last + 1);
          for (const column of columns) column.push(null);
        }
        last = sample.time;
        times.push(sample.time);
        view.lines.forEach((line, i) => columns[i].push(line.value(sample)));
      }
      view.data = [times, ...columns];
      view.plot.setData(view.data);
      const empty = view.chart.empty ? view.chart.empty(shown) : columns.every((c) => c.every((v) => v === null));
      view.none.hidden = !empty;
      this.#legend(view);
    }
  }

  // Under the pointer, or now.
  #legend(view) {
    if (!view?.data) return;
    const at = view.plot.cursor.idx ?? view.data[0].length - 1;
    view.values.forEach((value, i) => {
      value.textContent = view.chart.write(view.data[i + 1][at] ?? null);
    });
  }

  #resize() {
    for (const view of this.views) {
      const width = view.holder.clientWidth;
      if (width) view.plot.setSize({ width, height: 190 });
    }
  }
}
