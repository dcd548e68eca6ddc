// The conversation: kept in the browser, each answer with its canvas.
import { stream } from "./api.js";
import { CanvasView } from "./canvas.js";
import { $, h, plural, prefersStill, seconds } from "./dom.js";
import { exportReplay } from "./export.js";
import { announce, Runner, toast } from "./run.js";
import { chatFields } from "./settings.js";
import { Stage } from "./stage.js";

const STORE = "dgemma.conversation";
const STARTERS = [
  "Tell me a story about a fox and a lantern.",
  "Write a Python function that reverses a list.",
  "Write a short story about a boy who finds a key.",
];
const TITLE = "Text that settles all at once.";
const CODE = /(^|\n)(def |class |import |from \w+ import |```|    \S)/;
const NOISE = "abcdefghijklmnopqrstuvwxyzäøßλжд&%#@+*~{}<>";

let messages = load();
let runner;
let pending = null; // the answer that is being written

export function buildChat() {
  runner = new Runner($("send"), $("stop"));
  const question = $("question");
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(question.value);
  });
  growing(question, () => $("composer").requestSubmit());
  for (const text of STARTERS) {
    $("starters").append(h("li", {}, h("button", { type: "button", onclick: () => send(text) }, text)));
  }
  $("clear").addEventListener("click", clear);
  $("legend").append(legend("noise", "open"), legend("kept", "decided"), legend("pinned", "pinned"));
  // A question that the page was left with goes back to its field: what was never answered is not
  // part of the conversation. What was promised of an answer is.
  if (messages.at(-1)?.role === "user") takeBack();
  addEventListener("pagehide", keepPromised);
  for (const message of messages) show(message);
  refresh();
  if (!messages.length) title();
}

function takeBack() {
  const { content } = messages.pop();
  save();
  $("question").value ||= content;
  $("question").dispatchEvent(new Event("input"));
}

function keepPromised() {
  if (pending?.content) {
    messages.push({ ...pending, stopped: true });
    save();
  }
  pending = null; // the stream breaks off now, and that is not its end
}

// A text field that grows with its text, and is sent by Enter.
export function growing(area, submit) {
  const fit = () => {
    area.style.setProperty("height", "auto");
    area.style.setProperty("height", `${Math.min(area.scrollHeight, 220)}px`);
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

function legend(kind, name) {
  const swatch = h("i", { class: `t ${kind}` }, "ab");
  swatch.style.setProperty("--h", kind === "noise" ? "0.8" : "0.05");
  return h("span", {}, swatch, name);
}

async function send(text) {
  const question = text.trim();
  if (!question || runner.isRunning) return;
  $("question").value = "";
  $("question").dispatchEvent(new Event("input"));
  add({ role: "user", content: question });
  const answer = { role: "assistant", content: "", thought: "" };
  pending = answer;
  const shown = showAnswer();
  shown.item.scrollIntoView({ block: "nearest" });
  const isWhole = await runner.run((signal) => follow(shown, answer, signal));
  finish(shown, answer, isWhole);
}

async function follow(shown, answer, signal) {
  const fields = chatFields();
  const body = { messages: messages.map(({ role, content }) => ({ role, content })), ...fields };
  const begun = performance.now();
  for await (const event of stream("/v1/chat/completions", body, signal)) {
    const note = event.dgemma ?? {};
    if (note.type === "draft") shown.stage.draft(note);
    else if (note.type === "retry") shown.stage.retry();
    const choice = event.choices[0];
    if (!choice) continue;
    const { content, reasoning_content: thought } = choice.delta;
    if (thought) think(shown, answer, thought);
    if (content) {
      answer.content += content;
      shown.stage.promise(content);
      announce(content);
    }
    if (choice.dgemma) answer.took = { ...choice.dgemma, wall: (performance.now() - begun) / 1000 };
    near(shown.item);
  }
}

function think(shown, answer, thought) {
  answer.thought += thought;
  shown.thought.hidden = false;
  shown.thought.lastChild.textContent = answer.thought;
}

function near(item) {
  const bottom = document.documentElement.scrollHeight - window.innerHeight - window.scrollY;
  if (bottom < 240) item.scrollIntoView({ block: "end" });
}

function finish(shown, answer, isWhole) {
  settle(shown);
  if (pending !== answer) return; // its conversation is over
  pending = null;
  if (!isWhole) {
    answer.stopped = true;
    if (!answer.content) {
      const last = shown.stage.recording.frames.at(-1);
      if (last) shown.stage.view.draw(last.draft, "");
      shown.item.classList.add("broken");
    }
  }
  if (answer.content) {
    messages.push(answer);
    save();
  } else {
    takeBack();
  }
  foot(shown, answer);
  refresh();
  $("question").focus({ preventScroll: true });
}

function settle(shown) {
  shown.stage.end();
  shown.item.classList.remove("live");
  // Code wants its columns.
  shown.stage.view.el.classList.toggle("mono", CODE.test(shown.stage.recording.text));
}

function foot(shown, answer) {
  const took = answer.took, parts = [];
  if (answer.stopped) parts.push("stopped");
  if (took) {
    parts.push(took.mode === "ar" ? plural(took.steps, "token") : `${plural(took.blocks, "canvas").replace(/canvass$/, "canvases")}, ${plural(took.steps, "step")}`);
    if (took.mode !== "ar") parts.push(`${took.tokens_per_step.toFixed(1)} tokens a step`);
    parts.push(seconds(took.seconds), `seed ${took.seed}`);
    if (took.finish === "length") parts.push("cut at its longest");
    if (took.fault) parts.push(took.fault);
  }
  shown.foot.replaceChildren(h("span", { class: "took" }, parts.join(" · ")));
  if (!shown.stage.recording.isEmpty) {
    shown.foot.append(button("Replay", () => replay(shown.stage), "replay"));
    shown.foot.append(button("Export", () => exportReplay(shown.stage.recording, lastQuestion(answer)), "export"));
  }
  if (answer.content) shown.foot.append(button("Copy", () => copy(answer.content), "copy"));
}

function replay(stage) {
  const scrubber = stage.replay();
  scrubber.el.scrollIntoView({ block: "nearest" });
  scrubber.toggle();
}

function lastQuestion(answer) {
  const place = messages.indexOf(answer);
  return messages[place - 1]?.content ?? "";
}

function button(name, onclick, className) {
  return h("button", { type: "button", class: `quiet ${className}`, onclick }, name);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  } catch {
    toast("The browser does not allow copying here.");
  }
}

function add(message) {
  messages.push(message);
  save();
  show(message);
  refresh();
}

function show(message) {
  if (message.role === "user") {
    $("messages").append(h("li", { class: "mine" }, h("p", {}, message.content)));
    return;
  }
  const shown = showAnswer();
  shown.stage.promise(message.content);
  settle(shown);
  if (message.thought) think(shown, { thought: "" }, message.thought);
  foot(shown, message);
}

function showAnswer() {
  const stage = new Stage("canvas prose");
  const thought = h("details", { class: "thought", hidden: true }, h("summary", {}, "Thought"), h("p", {}));
  const footer = h("footer", {});
  const item = h("li", { class: "answer live" }, thought, stage.el, footer);
  $("messages").append(item);
  return { item, stage, thought, foot: footer };
}

function refresh() {
  const isEmpty = $("messages").childElementCount === 0;
  $("hero").hidden = !isEmpty;
  $("clear").hidden = isEmpty;
}

function clear() {
  runner.stop();
  pending = null;
  messages = [];
  save();
  $("messages").replaceChildren();
  refresh();
  title();
  $("question").focus();
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(messages));
  } catch {
    toast("The browser has no room to keep this conversation.");
  }
}

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORE));
    const isMessage = (m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string";
    return Array.isArray(kept) ? kept.filter(isMessage) : [];
  } catch {
    return [];
  }
}

// The title settles as an answer does, with made-up noise.
function title() {
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
    const isKept = letters.map((letter, i) => letter === " " || times[i] <= step);
    view.draw({
      block: 0,
      step,
      tokens: letters.map((letter, i) => (isKept[i] ? letter : NOISE[Math.floor(Math.random() * NOISE.length)])),
      guess_tokens: letters,
      entropy: times.map((time) => Math.max(0, (time - step) / 3)),
      kept: isKept,
      pinned: letters.map(() => false),
    });
    if (step > 17) {
      clearInterval(timer);
      view.settle(TITLE);
    }
  }, 95);
}
