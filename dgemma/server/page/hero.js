// The first sight of the page: a title that settles, and things to try.
import { CanvasView } from "./canvas.js";
import { $, h, prefersStill } from "./dom.js";

const TITLE = "Text that settles all at once.";
const NOISE = "abcdefghijklmnopqrstuvwxyzäøßλжд&%#@+*~{}<>";
const object = (properties) => ({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
const WORDS = { type: "string", maxLength: 24 };
const CALL = object({ name: { enum: ["FindRestaurants", "FindHotels"] }, arguments: object({ city: WORDS, cuisine: WORDS }) });
// What the built-in model does well comes first. `tab` leads there; `question` is sent.
const STARTERS = [
  { name: "Solve a Sudoku", note: "81 cells converge together", tab: "sudoku", press: "sudoku-go" },
  { name: "Change red to blue", note: "an edit that leaves the rest alone", question: "Change red to blue.\n\nThe little girl has a red ball." },
  { name: "Fill a hole", note: "from both sides of the text", tab: "fill", press: "fill-go" },
  { name: "Answer as JSON", note: "always of the form that was asked for", question: "Write the function call for this dialogue as JSON.\n\nUSER: I want to find a restaurant in San Jose. Something Italian.", schema: CALL },
  { name: "Tell a story", note: "“… about a fox and a lantern.”", question: "Tell me a story about a fox and a lantern." },
  { name: "Compare two ways", note: "diffusion beside one token at a time", tab: "compare", press: "race-go" },
];
const LIMITS = {
  nano: "nano has 43 million parameters: it solves, edits, fills, keeps to a form and holds small talk. It knows few facts, cannot reason or translate, and its stories wander. A new task goes best in a new conversation: press New.",
};

// `send(question, schema)` asks, `go(tab)` shows a tab.
export function buildHero(send, go) {
  for (const one of STARTERS) {
    const start = () => {
      if (one.question) send(one.question, one.schema ? JSON.stringify(one.schema, null, 2) : "");
      else {
        go(one.tab);
        $(one.press).click();
      }
    };
    $("starters").append(h("li", {}, h("button", { type: "button", onclick: start }, h("b", {}, one.name), h("small", {}, one.note))));
  }
}

export function sayLimits(model) {
  $("limits").textContent = LIMITS[model] ?? "";
}

// The title settles as an answer does, with made-up noise.
export function settleTitle() {
  const view = new CanvasView("canvas");
  $("title").replaceChildren(view.el);
  if (prefersStill()) {
    view.settle(TITLE);
    return;
  }
  const letters = [...TITLE];
  const times = letters.map(() => 2 + Math.floor(14 * Math.random() ** 0.8));
  let step = 0;
  const timer = setInterval(() => {
    step += 1;
    const isAccepted = letters.map((letter, i) => letter === " " || times[i] <= step);
    view.draw({
      block: 0,
      step,
      tokens: letters.map((letter, i) => (isAccepted[i] ? letter : NOISE[Math.floor(Math.random() * NOISE.length)])),
      guess_tokens: letters,
      entropy: times.map((time) => Math.max(0, (time - step) / 3)),
      accepted: isAccepted,
      pinned: letters.map(() => false),
    });
    if (step > 17) {
      clearInterval(timer);
      view.settle(TITLE);
    }
  }, 95);
}
