// Diffusion and autoregression of the same weights, each with its clock.
import { stream } from "./api.js";
import { growing } from "./chat.js";
import { $, h, plural } from "./dom.js";
import { announce, Runner } from "./run.js";
import { chatFields } from "./settings.js";
import { Stage } from "./stage.js";

const LANES = { diffusion: "Diffusion", ar: "One token at a time" };
const QUESTION = "Tell me a story about a fox and a lantern.";

let runner;

export function buildCompare() {
  runner = new Runner($("race-go"), $("race-stop"));
  $("race-question").value = QUESTION;
  growing($("race-question"), () => $("race").requestSubmit());
  for (const mode of Object.keys(LANES)) lane(mode);
  $("race").addEventListener("submit", (event) => {
    event.preventDefault();
    race($("race-question").value.trim());
  });
}

function lane(mode) {
  const stage = new Stage("canvas prose"), clock = h("p", { class: "clock" }, "0.00"), facts = h("p", { class: "took" }, "\u00a0");
  $(`lane-${mode}`).replaceChildren(h("header", {}, h("h3", {}, LANES[mode]), clock), h("div", { class: "stage" }, stage.el), facts);
  return { mode, stage, clock, facts, seconds: null, tokens: 0 };
}

async function race(question) {
  if (!question || runner.isRunning) return;
  $("race-verdict").textContent = "";
  const lanes = Object.keys(LANES).map(lane);
  // The same seed, so that the run can be had again.
  const seed = chatFields().seed ?? Math.floor(Math.random() * 2 ** 32);
  const isWhole = await runner.run(async (signal) => {
    const runs = lanes.map((one) => () => follow(one, question, seed, signal));
    if ($("race-together").checked) await Promise.all(runs.map((run) => run()));
    else for (const run of runs) await run();
  });
  if (isWhole) verdict(lanes);
}

async function follow(one, question, seed, signal) {
  const body = { messages: [{ role: "user", content: question }], ...chatFields(one.mode), seed };
  const begun = performance.now(), element = $(`lane-${one.mode}`);
  const tick = () => (one.clock.textContent = ((performance.now() - begun) / 1000).toFixed(2));
  const timer = setInterval(tick, 50);
  element.classList.add("live");
  try {
    for await (const event of stream("/v1/chat/completions", body, signal)) {
      if (event.dgemma?.type === "draft") one.stage.draft(event.dgemma);
      const choice = event.choices[0], text = choice?.delta.content;
      if (text) one.stage.promise(text);
      if (choice?.dgemma) one.took = choice.dgemma;
    }
  } finally {
    clearInterval(timer);
    tick();
    one.seconds = (performance.now() - begun) / 1000;
    one.stage.end();
    element.classList.remove("live");
  }
  const { steps, tokens_per_step: rate } = one.took, tokens = Math.round(steps * rate);
  one.tokens = tokens;
  one.facts.textContent = `${plural(tokens, "token")} in ${plural(steps, one.mode === "ar" ? "pass" : "step").replace("passs", "passes")} · ${(tokens / one.seconds).toFixed(1)} tokens a second`;
  announce(`${LANES[one.mode]}: ${one.stage.recording.text}`);
}

function verdict([diffusion, ar]) {
  const rates = [diffusion, ar].map((one) => one.tokens / one.seconds);
  const [fast, slow, name] = rates[0] >= rates[1] ? [rates[0], rates[1], "Diffusion"] : [rates[1], rates[0], "One token at a time"];
  $("race-verdict").textContent = `${name} wrote ${(fast / Math.max(slow, 1e-9)).toFixed(1)} times as many tokens a second here.`;
}
