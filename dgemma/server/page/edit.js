// Editing in place, shown as what went and what came.
import { stream } from "./api.js";
import { $, button, h, plural } from "./dom.js";
import { announce, Clock, notify, Runner, stepsAndTime } from "./run.js";
import { canvasFields } from "./settings.js";
import { Stage } from "./stage.js";

const EXAMPLE = "The little girl has a red ball.\nShe throws the ball to her dog.\nThe dog is very happy.";
const TASK = "Change red to blue.";

let runner;

export function buildEdit() {
  runner = new Runner("edit", $("edit-go"), $("edit-stop"));
  $("edit-text").value = EXAMPLE;
  $("edit-do").value = TASK;
  $("edit-strength").addEventListener("input", () => {
    $("edit-strength-out").textContent = Number($("edit-strength").value).toFixed(2);
  });
  $("edit-go").addEventListener("click", go);
  $("edit-do").addEventListener("keydown", (event) => {
    if (event.key === "Enter") go();
  });
}

async function go() {
  const text = $("edit-text").value, instruction = $("edit-do").value.trim();
  if (!text) {
    notify("edit", "There is no text to edit.");
    return;
  }
  if (runner.isRunning) return;
  const body = { text, strength: Number($("edit-strength").value), ...canvasFields() };
  if (instruction) body.instruction = instruction;
  const done = await runner.follow(body);
  if (done) show(done.reply, text, done.stage);
}

function show(reply, text, stage) {
  stage.end();
  const old = [...text], parts = [];
  let place = 0;
  for (const change of reply.changed) {
    parts.push(old.slice(place, change.old_start).join(""));
    if (change.old) parts.push(h("del", {}, change.old));
    if (change.new) parts.push(h("ins", {}, change.new));
    place = change.old_end;
  }
  parts.push(old.slice(place).join(""));
  const bar = h("div", { class: "bar" });
  if (reply.changed.length) bar.append(button("Keep it", () => keep(reply.text)));
  $("edit-result").replaceChildren(h("p", { class: "text mono diff" }, ...parts), bar);
  $("edit-result").hidden = false;
  if (stage.recording.isEmpty) $("edit-stage").hidden = true;
  else stage.replay().last();
  const count = reply.changed.length, what = count ? plural(count, "change") : "Nothing was changed";
  $("edit-took").textContent = `${what} · ${stepsAndTime(reply.dgemma)}`;
  announce(`${what}. ${reply.changed.map((change) => `${change.old || "nothing"} became ${change.new || "nothing"}`).join("; ")}`);
}

function keep(text) {
  $("edit-text").value = text;
  $("edit-result").hidden = true;
  $("edit-stage").hidden = true;
  $("edit-text").focus();
}
