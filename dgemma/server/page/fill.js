// The fill playground: holes are opened in a text by selecting, and filled from both sides.
import { stream } from "./api.js";
import { $, h, plural, seconds } from "./dom.js";
import { exportReplay } from "./export.js";
import { announce, Runner, toast } from "./run.js";
import { canvasFields } from "./settings.js";
import { Stage } from "./stage.js";

const EXAMPLE = ["Once upon a time there was a little ", "girl", " who loved to play in the park. One day she found a ", "red ball", " under a tree. She was very happy."];

let runner, last = [];

export function buildFill() {
  runner = new Runner($("fill-go"), $("fill-stop"));
  const editor = $("holed");
  editor.setAttribute("contenteditable", "plaintext-only");
  if (editor.contentEditable !== "plaintext-only") editor.setAttribute("contenteditable", "true");
  editor.append(EXAMPLE[0], hole(EXAMPLE[1]), EXAMPLE[2], hole(EXAMPLE[3]), EXAMPLE[4]);
  editor.addEventListener("paste", (event) => {
    event.preventDefault();
    insert(document.createTextNode(event.clipboardData.getData("text/plain")));
  });
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
  });
  $("open").addEventListener("mousedown", (event) => event.preventDefault()); // the selection stays
  $("open").addEventListener("click", openHole);
  $("close-holes").addEventListener("click", closeHoles);
  $("fill-go").addEventListener("click", go);
}

function hole(old) {
  const chip = h("span", { class: "hole", contenteditable: "false", title: `A hole; click to put back “${old}”` }, h("span", { class: "unseen" }, "hole"));
  chip.dataset.old = old;
  chip.addEventListener("click", () => chip.replaceWith(old));
  return chip;
}

export function openHole() {
  const selection = getSelection(), editor = $("holed");
  const range = selection.rangeCount ? selection.getRangeAt(0) : null;
  if (!range || !editor.contains(range.commonAncestorContainer)) {
    toast("Select some text above first, or put the cursor where a hole should be.");
    editor.focus();
    return;
  }
  insert(hole(plain(range.cloneContents())));
  announce("A hole is open.");
}

function insert(node) {
  const range = getSelection().getRangeAt(0);
  range.deleteContents();
  range.insertNode(node);
  range.setStartAfter(node);
  range.collapse(true);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

function closeHoles() {
  for (const chip of $("holed").querySelectorAll(".hole")) chip.replaceWith(chip.dataset.old);
  $("holed").normalize();
}

// The pieces around the holes, in order.
function pieces(root) {
  const found = [""];
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) found[found.length - 1] += node.data;
    else if (node.classList?.contains("hole")) found.push("");
    else if (node.nodeName === "BR") found[found.length - 1] += "\n";
    else {
      if (node.nodeName === "DIV" && node !== root && node.previousSibling) found[found.length - 1] += "\n";
      node.childNodes.forEach(walk);
    }
  };
  root.childNodes.forEach(walk);
  return found;
}

function plain(fragment) {
  return pieces(fragment).join("");
}

async function go() {
  const text = pieces($("holed"));
  if (text.length < 2) {
    toast("There is no hole yet: select some text and open one.");
    return;
  }
  const stage = new Stage("canvas mono");
  $("fill-stage").replaceChildren(stage.el);
  $("fill-stage").hidden = false;
  $("fill-result").hidden = true;
  $("fill-took").textContent = "";
  await runner.run(async (signal) => {
    const body = { text, max_tokens: Number($("fill-longest").value) || 12, ...canvasFields() };
    for await (const event of stream("/v1/dgemma/fill", body, signal)) {
      if (event.dgemma?.type === "draft") stage.draft(event.dgemma);
      if (event.object === "dgemma.fill") show(event, text, stage);
    }
  });
  if ($("fill-result").hidden) $("fill-stage").hidden = true;
}

function show(reply, text, stage) {
  stage.end();
  last = reply.holes.map((one) => one.text);
  const result = $("fill-result"), parts = [text[0]];
  reply.holes.forEach((one, i) => {
    const title = `${one.score.toFixed(2)} nats a token${one.settled ? "" : ", did not settle"}`;
    parts.push(h("mark", { title }, one.text), text[i + 1]);
  });
  const bar = h("div", { class: "bar" },
    h("button", { type: "button", class: "quiet", onclick: () => keep(text) }, "Keep it"),
    h("button", { type: "button", class: "quiet", onclick: () => exportReplay(stage.recording, "Fill") }, "Export"));
  result.replaceChildren(h("p", { class: "text mono" }, ...parts), bar);
  result.hidden = false;
  if (!stage.recording.isEmpty) stage.replay().last();
  const { seconds: time, steps, blocks, seed } = reply.dgemma;
  $("fill-took").textContent = `${plural(steps, "step")} of ${blocks} tried canvases · ${seconds(time)} · seed ${seed}`;
  announce(`Filled: ${last.join("; ")}`);
}

function keep(text) {
  const editor = $("holed");
  editor.replaceChildren(...text.flatMap((piece, i) => (i < last.length ? [piece, last[i]] : [piece])));
  editor.normalize();
  $("fill-result").hidden = true;
  $("fill-stage").hidden = true;
  editor.focus();
}
