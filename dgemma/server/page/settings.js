// Settings of the sampler: kept in the browser, sent with each request where they are set.
import { $, h } from "./dom.js";

const STORE = "dgemma.settings";
const KNOBS = [
  { group: "How to write" },
  { name: "mode", label: "Mode", options: { diffusion: "Diffusion", ar: "One token at a time", hybrid: "Hybrid", auto: "Auto: what is faster here" } },
  { name: "thinking", label: "Think first", check: true },
  { name: "temperature", label: "Temperature", note: "1 is the model's own", min: 0, max: 2, step: 0.05 },
  { name: "max_tokens", label: "Longest answer", note: "tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", note: "same seed, same text", min: 0, step: 1 },
  { group: "How a canvas converges" },
  { name: "preset", label: "Preset", options: { "": "The model's own", quality: "Quality", balanced: "Balanced", fast: "Fast" }, canvas: true },
  { name: "max_denoising_steps", label: "Most steps", min: 1, max: 512, step: 1, canvas: true },
  { name: "entropy_bound", label: "Entropy bound", note: "nats decided in a step", min: 0.01, step: 0.05, canvas: true },
  { name: "confidence_threshold", label: "Converged below", note: "mean nats", min: 0.0001, step: 0.001, canvas: true },
  { name: "t_max", label: "First temperature", min: 0.05, step: 0.05, canvas: true },
  { name: "t_min", label: "Last temperature", min: 0.05, step: 0.05, canvas: true },
  { name: "canvas_length", label: "Canvas", note: "tokens", min: 1, step: 1, canvas: true, only: "chat" },
  { group: "How it is read" },
  { name: "pace", label: "Pace", note: "characters a second", min: 1, step: 10, only: "chat" },
];
const FLOATS = new Set(["temperature", "entropy_bound", "confidence_threshold", "t_max", "t_min", "pace"]);

const values = load();

function load() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

export function setting(name) {
  return values[name];
}

export function modes(known) {
  for (const option of document.querySelectorAll("#knob-mode option")) option.hidden = !known.includes(option.value);
}

// Fields of a chat request; `mode` overrules the one that is set.
export function chatFields(mode = values.mode ?? "diffusion") {
  const body = { dgemma: { mode, drafts: mode !== "ar" } };
  for (const knob of KNOBS) {
    const value = values[knob.name];
    if (!knob.name || value === undefined || knob.name === "mode" || knob.check) continue;
    if (knob.canvas && mode === "ar") continue;
    const target = ["temperature", "max_tokens", "seed"].includes(knob.name) ? body : body.dgemma;
    target[knob.name] = value;
  }
  if (values.thinking) body.chat_template_kwargs = { enable_thinking: true };
  return body;
}

// Fields of a request that fills or edits.
export function canvasFields() {
  const { dgemma, temperature, seed } = chatFields("diffusion");
  for (const knob of KNOBS) if (knob.only === "chat") delete dgemma[knob.name];
  return { dgemma, ...(temperature === undefined ? {} : { temperature }), ...(seed === undefined ? {} : { seed }) };
}

export function buildSettings() {
  const panel = $("settings"), list = h("div", { class: "knobs" });
  for (const knob of KNOBS) list.append(knob.group ? h("h3", {}, knob.group) : field(knob));
  const reset = h("button", { type: "button", class: "quiet", onclick: resetAll }, "As the model has it");
  const close = h("button", { type: "button", class: "icon", "aria-label": "Close", onclick: () => toggleSettings(false) }, "×");
  panel.append(h("header", {}, h("h2", {}, "Sampler"), close), h("p", { class: "note" }, "Empty: as the checkpoint says."), list, reset);
  $("knobs").addEventListener("click", () => toggleSettings());
}

export function toggleSettings(open = $("settings").hidden) {
  $("settings").hidden = !open;
  document.body.classList.toggle("with-settings", open);
  $("knobs").setAttribute("aria-expanded", String(open));
  if (open) $("settings").querySelector("select, input").focus();
  else $("knobs").focus();
}

function field(knob) {
  const id = `knob-${knob.name}`, value = values[knob.name];
  let input;
  if (knob.options) {
    input = h("select", { id }, ...Object.entries(knob.options).map(([name, label]) => h("option", { value: name }, label)));
    input.value = value ?? Object.keys(knob.options)[0];
  } else if (knob.check) {
    input = h("input", { id, type: "checkbox" });
    input.checked = Boolean(value);
  } else {
    input = h("input", { id, type: "number", min: String(knob.min), max: knob.max === undefined ? undefined : String(knob.max), step: FLOATS.has(knob.name) ? "any" : "1", placeholder: "–", inputmode: "decimal" });
    if (value !== undefined) input.value = String(value);
  }
  input.addEventListener("change", () => keep(knob, input));
  return h("label", { class: "knob", for: id }, h("span", {}, knob.label, knob.note ? h("small", {}, knob.note) : null), input);
}

function keep(knob, input) {
  const value = knob.check ? input.checked : input.value.trim();
  if (value === "" || value === false || !input.checkValidity()) delete values[knob.name];
  else values[knob.name] = knob.options || knob.check ? value : Number(value);
  localStorage.setItem(STORE, JSON.stringify(values));
}

function resetAll() {
  for (const name of Object.keys(values)) delete values[name];
  localStorage.removeItem(STORE);
  for (const input of $("settings").querySelectorAll("input")) {
    input.value = "";
    input.checked = false;
  }
  for (const select of $("settings").querySelectorAll("select")) select.selectedIndex = 0;
}
