// Elements are made of tags and text nodes. Nothing here, or anywhere on the page, parses markup.

export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "class") el.className = value;
    else if (name in el && typeof value !== "string") el[name] = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.filter((child) => child !== null && child !== undefined));
  return el;
}

export function svg(tag, props = {}, ...children) {
  const el = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

export const $ = (id) => document.getElementById(id);

export function button(name, onclick, className = "") {
  return h("button", { type: "button", class: `quiet ${className}`.trim(), onclick }, name);
}

// A text field that grows with its text, and is sent by Enter.
export function growing(area, submit) {
  const fit = () => {
    area.style.setProperty("height", "auto");
    area.style.setProperty("height", `${Math.min(area.scrollHeight, 280)}px`);
  };
  area.addEventListener("input", fit);
  addEventListener("resize", fit);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
}

export function setText(area, text) {
  area.value = text;
  area.dispatchEvent(new Event("input"));
}

export function prefersStill() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

export function seconds(value) {
  return value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

export function plural(count, word) {
  const ending = count === 1 ? "" : /s$/.test(word) ? "es" : "s";
  return `${count.toLocaleString("en")} ${word}${ending}`;
}
