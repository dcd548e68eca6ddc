// The fill playground: a plain text field in which <|fill|> is a hole, filled from both sides.
import { stream } from "./api.js";
import { $, button, h, plural } from "./dom.js";
import { exportReplay } from "./export.js";
import { announce, Clock, dismiss, notify, Runner, stepsAndTime } from "./run.js";
import { canvasFields } from "./settings.js";
import { Stage } from "./stage.js";

const HOLE = "<|fill|>";
const EXAMPLE = `Once upon a time there was a little ${HOLE} who loved to play in the park. One day she found a ${HOLE} under a tree. She was very happy.`;

let runner;
let lineEnd = "\n"; // a text field keeps \n alone; what was pasted with \r\n is sent with \r\n
let opened = []; // the text that each hole had, in order

export function buildFill() {
  runner = new Runner("fill", $("fill-go"), $("fill-stop"));
  const editor = $("holed");
  editor.value = EXAMPLE;
  opened = ["girl", "red ball"];
  editor.addEventListener("paste", (event) => noteLineEnds(event.clipboardData.getData("text/plain")));
  editor.addEventListener("input", mark);
  editor.addEventListener("scroll", () => ($("marks").scrollTop = editor.scrollTop));
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
  });
  $("open").addEventListener("mousedown", (event) => event.preventDefault()); // the selection stays
  $("open").addEventListener("click", openHole);
  $("close-holes").addEventListener("click", closeHoles);
  $("fill-go").addEventListener("click", go);
  mark();
}

// Holes are marked on a copy of the text that lies under the field.
function mark() {
  const parts = $("holed").value.split(HOLE);
  if (opened.length !== parts.length - 1) opened = Array(parts.length - 1).fill("");
  $("marks").replaceChildren(...parts.flatMap((part, i) => (i ? [h("i", {}, HOLE), part] : [part])), "\n");
  $("close-holes").disabled = parts.length < 2;
}

function noteLineEnds(pasted) {
  const editor = $("holed");
  const kept = editor.value.slice(0, editor.selectionStart) + editor.value.slice(editor.selectionEnd);
  const isWindows = pasted.includes("\r\n"), isMixed = /\r(?!\n)/.test(pasted) || (isWindows && /(^|[^\r])\n/.test(pasted));
  const differs = /[\r\n]/.test(pasted) && isWindows !== (lineEnd === "\r\n");
  if (!kept.includes("\n")) lineEnd = isWindows && !isMixed ? "\r\n" : "\n";
  if (isMixed || (differs && kept.includes("\n"))) notify("fill", `The lines end in more than one way; all are sent with ${JSON.stringify(lineEnd)}.`);
}

export function openHole() {
  const editor = $("holed"), { selectionStart: start, selectionEnd: end } = editor;
  if (document.activeElement !== editor) editor.focus();
  const place = editor.value.slice(0, start).split(HOLE).length - 1;
  const old = editor.value.slice(start, end), before = opened;
  replace(HOLE);
  if (!old.includes(HOLE)) opened = [...before.slice(0, place), old, ...before.slice(place)];
  announce("A hole is open.");
}

function closeHoles() {
  const parts = $("holed").value.split(HOLE), olds = opened;
  $("holed").focus();
  $("holed").select();
  replace(parts.map((part, i) => (i ? olds[i - 1] + part : part)).join(""));
}

// As if it was typed, so that it can be undone.
function replace(text) {
  const editor = $("holed");
  if (!document.execCommand("insertText", false, text)) {
    editor.setRangeText(text, editor.selectionStart, editor.selectionEnd, "end");
    mark();
  }
}

async function go() {
  const text = $("holed").value.replaceAll("\n", lineEnd).split(HOLE);
  if (text.length < 2) {
    notify("fill", `There is no hole yet: select some text and open one, or write ${HOLE}.`);
    return;
  }
  if (runner.isRunning) return;
  const body = { text, max_tokens: Number($("fill-longest").value) || 12, ...canvasFields() };
  const done = await runner.follow(body);
  if (done) show(done.reply, text, done.stage);
}

function show(reply, text, stage) {
  stage.end();
  const filled = reply.holes.map((one) => one.text), parts = [text[0]];
  reply.holes.forEach((one, i) => {
    const title = `${one.score.toFixed(2)} nats a token${one.converged ? "" : ", did not converge"}`;
    parts.push(h("mark", { title }, one.text), text[i + 1]);
  });
  const bar = h("div", { class: "bar" }, button("Keep it", () => keep(reply.text)), button("Export", () => exportReplay("fill", stage.recording, "Fill")));
  $("fill-result").replaceChildren(h("p", { class: "text mono" }, ...parts), bar);
  $("fill-result").hidden = false;
  if (!stage.recording.isEmpty) stage.replay().last();
  $("fill-took").textContent = `${plural(reply.dgemma.blocks, "canvas")} tried, ${stepsAndTime(reply.dgemma)}`;
  announce(`Filled: ${filled.join("; ")}`);
}

function keep(text) {
  dismiss("fill");
  $("holed").focus();
  $("holed").select();
  replace(text.replaceAll("\r\n", "\n"));
  $("fill-result").hidden = true;
  $("fill-stage").hidden = true;
}
