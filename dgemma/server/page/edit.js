// Editing in place, shown as what went and what came.
import { stream } from "./api.js";
import { $, h, plural, seconds } from "./dom.js";
import { announce, Runner, toast } from "./run.js";
import { canvasFields } from "./settings.js";
import { Stage } from "./stage.js";

const EXAMPLE = "The little girl has a red ball.\nShe throws the ball to her dog.\nThe dog is very happy.";
const TASK = "Change red to blue.";

let runner;

export function buildEdit() {
  runner = new Runner($("edit-go"), $("edit-stop"));
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
    toast("There is no text to edit.");
    return;
  }
  const stage = new Stage("canvas mono");
  $("edit-stage").replaceChildren(stage.el);
  $("edit-stage").hidden = false;
  $("edit-result").hidden = true;
  $("edit-took").textContent = "";
  await runner.run(async (signal) => {
    const body = { text, strength: Number($("edit-strength").value), ...canvasFields() };
    if (instruction) body.instruction = instruction;
    for await (const event of stream("/v1/dgemma/edit", body, signal)) {
      if (event.dgemma?.type === "draft") stage.draft(event.dgemma);
      if (event.object === "dgemma.edit") show(event, text, stage);
    }
  });
  if ($("edit-result").hidden) $("edit-stage").hidden = true;
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
  if (reply.changed.length) bar.append(h("button", { type: "button", class: "quiet", onclick: () => keep(reply.text) }, "Keep it"));
  $("edit-result").replaceChildren(h("p", { class: "text mono diff" }, ...parts), bar);
  $("edit-result").hidden = false;
  if (stage.recording.isEmpty) $("edit-stage").hidden = true;
  else stage.replay().last();
  const { seconds: time, steps, seed } = reply.dgemma, count = reply.changed.length;
  const what = count ? plural(count, "change") : "Nothing had to change";
  $("edit-took").textContent = `${what} · ${plural(steps, "step")} · ${seconds(time)} · seed ${seed}`;
  announce(`${what}. ${reply.changed.map((change) => `${change.old || "nothing"} became ${change.new || "nothing"}`).join("; ")}`);
}

function keep(text) {
  $("edit-text").value = text;
  $("edit-result").hidden = true;
  $("edit-stage").hidden = true;
  $("edit-text").focus();
}
