// A message as elements: a question that can be changed, an answer with its canvas, replay and cost.
import { button, h, plural, seconds, svg } from "./dom.js";
import { exportReplay } from "./export.js";
import { render } from "./markdown.js";
import { thumbnail } from "./pictures.js";
import { announce, notify } from "./run.js";
import { Stage } from "./stage.js";

// `revise(text)` is called with the new text of a question.
export function showQuestion(message, revise) {
  const change = h("button", { type: "button", class: "icon change", "aria-label": "Change this message", title: "Change" }, pencil());
  const item = h("li", { class: "mine" }, ...(message.pictures ?? []).map((url) => thumbnail(url)), h("p", {}, message.content), change);
  change.addEventListener("click", () => openEditor(item, message.content, revise));
  return item;
}

// A field in place of the question's text.
export function openEditor(item, text, revise) {
  const area = h("textarea", { "aria-label": "Message", rows: "3" });
  area.value = text;
  const close = () => {
    form.remove();
    item.classList.remove("changing");
  };
  const send = () => {
    if (!area.value.trim()) return;
    close();
    revise(area.value.trim());
  };
  const form = h("div", { class: "changer" }, area, h("div", { class: "bar" }, button("Cancel", close), button("Send", send, "send-change")));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
  });
  item.classList.add("changing");
  item.append(form);
  area.focus();
}

function pencil() {
  const props = { fill: "none", stroke: "currentColor", "stroke-width": "1.5", "stroke-linejoin": "round" };
  return svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", { d: "M4 16l.8-3.400L13.200 4.200l2.600 2.600L7.400 15.200z", ...props }));
}

// The elements of an answer; `again()` is called for a new one.
export class AnswerView {
  constructor(again) {
    this.again = again;
    this.stage = new Stage("canvas prose", render);
    this.thought = h("details", { class: "thought", hidden: true }, h("summary", {}, "Thought"), h("p", {}));
    this.took = h("span", { class: "took" });
    this.foot = h("footer", {}, this.took);
    this.item = h("li", { class: "answer live" }, this.thought, this.stage.el, this.foot);
  }

  think(thought) {
    this.thought.hidden = false;
    this.thought.lastChild.textContent += thought;
  }

  // Nothing more comes: the text as it is read, and below it what it cost.
  settle(answer, question) {
    this.stage.end();
    this.item.classList.remove("live");
    this.took.textContent = cost(answer);
    const recording = this.stage.recording;
    if (!recording.isEmpty) {
      this.foot.append(button("Replay", () => this._replay(), "replay"));
      this.foot.append(button("Export", () => exportReplay("chat", recording, question), "export"));
    }
    if (!answer.content) {
      const last = recording.frames.at(-1);
      if (last) this.stage.view.draw(last.draft, "");
      this.item.classList.add("broken");
      return;
    }
    this.foot.append(button("Copy", () => copy(answer.content), "copy"));
    this.foot.append(button("Again", this.again, "again"));
  }

  _replay() {
    const scrubber = this.stage.replay();
    scrubber.el.scrollIntoView({ block: "nearest" });
    scrubber.toggle();
  }
}

function cost({ took, stopped, content }) {
  const parts = stopped ? ["stopped"] : [];
  if (took) {
    parts.push(took.mode === "ar" ? plural(took.steps, "token") : `${took.blocks ? plural(took.blocks, "canvas") : "verified drafts"}, ${plural(took.steps, "step")}`);
    if (took.mode !== "ar") parts.push(`${took.tokens_per_step.toFixed(1)} tokens a step`);
    parts.push(seconds(took.seconds), `seed ${took.seed}`);
    if (took.forced_from != null) parts.push(`the end ${[...content].slice(took.forced_from).join("")} is the limit's, not the model's`);
    else if (took.finish === "length") parts.push("cut at its longest");
    else if (took.finish === "budget") parts.push("cut at its time limit");
    if (took.fault) parts.push(took.fault);
  }
  return parts.join(" · ");
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  } catch {
    notify("chat", "The browser does not allow copying here.");
  }
}

