// The context meter: tokens the conversation has, as the server counted them, and those being typed.
import { post } from "./api.js";
import { $ } from "./dom.js";

const WAIT_MS = 250, NEARLY = 0.85;

let context = 0, used = 0, typed = 0, timer = null, count = 0;

export function buildMeter() {
  $("question").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(measure, WAIT_MS);
  });
}

export function setContext(tokens) {
  context = tokens;
  refresh();
}

// `answer.usage`: the tokens of prompt and answer together.
export function setUsed(answer) {
  used = Number(answer?.usage) || 0;
  refresh();
}

async function measure() {
  const content = $("question").value, mine = (count += 1);
  let tokens = 0;
  try {
    if (content.trim()) tokens = (await post("/tokenize", { content, parse_special: false })).tokens.length;
  } catch {
    tokens = 0; // a meter is no reason to complain
  }
  if (mine !== count) return;
  typed = tokens;
  refresh();
}

function refresh() {
  const el = $("meter"), number = (tokens) => tokens.toLocaleString("en");
  el.hidden = context === 0 || used + typed === 0;
  $("meter-bar").setAttribute("aria-valuemax", context);
  $("meter-bar").setAttribute("aria-valuenow", used + typed);
  $("meter-bar").style.setProperty("--part", Math.min(1, (used + typed) / Math.max(1, context)).toFixed(3));
  el.classList.toggle("nearly", used + typed > NEARLY * context);
  $("meter-text").textContent = `${number(used)}${typed ? ` + ${number(typed)}` : ""} of ${number(context)} tokens`;
}
