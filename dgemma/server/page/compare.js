// Diffusion and autoregression of the same weights: seconds to the answer, by each one's own clock.
import { stream } from "./api.js";
import { $, growing, h, plural, seconds, setText } from "./dom.js";
import { announce, Runner } from "./run.js";
import { chatFields } from "./settings.js";
import { Stage } from "./stage.js";
import { asQuestion, EASY, isSolution } from "./sudoku.js";

const LANES = { diffusion: "Diffusion", ar: "One token at a time" };
const QUESTIONS = {
  "A Sudoku": asQuestion(EASY),
  "An edit": "Change red to blue.\n\nThe little girl has a red ball.",
  "A story": "Tell me a story about a fox and a lantern.",
};
const ALIKE = 1.05; // a smaller ratio is no difference

let runner;

export function buildCompare() {
  runner = new Runner("compare", $("race-go"), $("race-stop"));
  growing($("race-question"), () => $("race").requestSubmit());
  for (const [name, question] of Object.entries(QUESTIONS)) {
    $("race-starters").append(h("button", { type: "button", class: "quiet", onclick: () => setText($("race-question"), question) }, name));
  }
  setText($("race-question"), QUESTIONS["A Sudoku"]);
  for (const mode of Object.keys(LANES)) lane(mode);
  $("race").addEventListener("submit", (event) => {
    event.preventDefault();
    race($("race-question").value.trim());
  });
}

function lane(mode) {
  const stage = new Stage("canvas prose"), clock = h("p", { class: "clock" }, "0.00"), facts = h("p", { class: "took" }, "\u00a0");
  $(`lane-${mode}`).replaceChildren(h("header", {}, h("h3", {}, LANES[mode]), clock), h("div", { class: "stage" }, stage.el), facts);
  return { mode, stage, clock, facts, seconds: null };
}

async function race(question) {
  if (!question || runner.isRunning) return;
  $("race-verdict").replaceChildren();
  const lanes = Object.keys(LANES).map(lane), isTogether = $("race-together").checked;
  // The same seed, so that the run can be had again.
  const seed = chatFields().seed ?? Math.floor(Math.random() * 2 ** 32);
  const end = await runner.run(async (signal) => {
    const runs = lanes.map((one) => () => follow(one, question, seed, signal));
    if (isTogether) await Promise.all(runs.map((run) => run()));
    else for (const run of runs) await run();
  });
  if (end === "done") verdict(lanes, question);
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
  const { steps, tokens_per_step: rate, finish } = one.took, passes = one.mode === "ar" ? "pass" : "step";
  const cut = finish === "length" ? ", cut at its longest" : "";
  one.facts.textContent = `${plural(Math.round(steps * rate), "token")} in ${plural(steps, passes)}${cut}`;
  announce(`${LANES[one.mode]}: ${one.stage.recording.text}`);
}

// Who had an answer sooner and by how much; of a Sudoku also whether it is one.
function verdict(lanes, question) {
  const [fast, slow] = [...lanes].sort((a, b) => a.seconds - b.seconds), ratio = slow.seconds / Math.max(fast.seconds, 1e-3);
  const name = (one, isFirst) => (isFirst ? LANES[one.mode] : LANES[one.mode].toLowerCase());
  const said = ratio < ALIKE
    ? `Both took about ${seconds(fast.seconds)}.`
    : `${name(fast, true)} answered in ${seconds(fast.seconds)}, ${name(slow, false)} in ${seconds(slow.seconds)}: ${seconds(slow.seconds - fast.seconds)} sooner, ${ratio.toFixed(1)} times as fast.`;
  const puzzle = /^Solve this Sudoku\.\s+([\d\s]+)$/.exec(question)?.[1].replace(/\s/g, "");
  const solved = puzzle?.length === 81 ? lanes.map((one) => `${name(one, true)}: ${isSolution(puzzle, one.stage.recording.text.replace(/\s/g, "")) ? "solved" : "not solved"}.`) : [];
  const lines = [said, ...(solved.length ? [solved.join(" ")] : [])];
  $("race-verdict").replaceChildren(...lines.map((line) => h("span", {}, line)));
}
