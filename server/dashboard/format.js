// Numbers and times as the page writes them; a figure that is not known is a dash.

export const UNKNOWN = "–";

export function number(value, digits = 0) {
  if (value === null || value === undefined) return UNKNOWN;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return number(value, value < 100 ? 1 : 0);
}

export function percent(value) {
  return value === null || value === undefined ? UNKNOWN : `${number(100 * value)} %`;
}

export function count(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 10000) return number(value);
  if (value < 1e6) return `${number(value / 1e3, value < 1e5 ? 1 : 0)} k`;
  return `${number(value / 1e6, value < 1e8 ? 2 : 0)} M`;
}

export function clock(seconds) {
  const moment = new Date(1000 * seconds);
  const today = moment.toDateString() === new Date().toDateString();
  const time = moment.toLocaleTimeString("en-GB");
  return today ? time : `${moment.toLocaleDateString("en-CA")} ${time.slice(0, 5)}`;
}

export function element(name, { text, className, ...attributes } = {}, children = []) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Pairs of a name and a value; a third entry is the class of the row.
export function fillRows(list, rows) {
  list.replaceChildren(
    ...rows.map(([name, value, className]) =>
      element("div", { className }, [element("dt", { text: name }), element("dd", {}, [].concat(value))])),
  );
}
