// The conversation: a question is sent, its answer followed; a refused question leaves no trace.
import { stream } from "./api.js";
import { buildPast, forgetConversation, keepConversation, lastConversation, newConversation } from "./conversations.js";
import { $, growing, h, setText } from "./dom.js";
import { buildHero, sayLimits, settleTitle } from "./hero.js";
import { AnswerView, openEditor, showQuestion } from "./message.js";
import { buildMeter, setContext, setUsed } from "./meter.js";
import { allowPictures, buildPictures, setPictures, takePictures } from "./pictures.js";
import { announce, Clock, notify, Runner } from "./run.js";
import { chatFields } from "./settings.js";

let conversation = lastConversation();
let runner;
let pending = null; // {history, answer} while an answer is being written
const items = new WeakMap(); // the element of each message, with the recording of its answer

export function buildChat(go) {
  runner = new Runner("chat", $("send"), $("stop"));
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send($("question").value);
  });
  growing($("question"), () => $("composer").requestSubmit());
  $("legend").append(legend("noise", "open"), legend("accepted", "decided"), legend("pinned", "pinned"));
  $("clear").addEventListener("click", () => turnTo(newConversation()));
  buildHero(send, go);
  buildMeter();
  buildPictures();
  buildPast(turnTo, (id) => {
    if (id === conversation.id) turnTo((conversation = newConversation()));
  });
  buildInstructions();
  addEventListener("pagehide", leave);
  turnTo(conversation);
}

// What the server says of its model.
export function setModel(card) {
  setContext(card.context_length);
  allowPictures(card.modalities?.vision === true);
  sayLimits(card.id);
}

function legend(kind, name) {
  const swatch = h("i", { class: `t ${kind}` }, "ab");
  swatch.style.setProperty("--h", kind === "noise" ? "0.8" : "0.05");
  return h("span", {}, swatch, name);
}

function turnTo(next) {
  const hadFocus = document.activeElement !== document.body;
  if (next !== conversation) {
    leave();
    if (!conversation.messages.length) forgetConversation(conversation.id);
  }
  pending = null;
  runner.stop();
  conversation = next;
  setText($("question"), next.draft);
  setPictures([]);
  save();
  draw();
  if (!next.messages.length) settleTitle();
  if (hadFocus) $("question").focus({ preventScroll: true });
}

// Only what was answered is part of a conversation; a question that the page is left with returns
// to its field, and what was promised of an answer stays.
function leave() {
  conversation.draft = $("question").value;
  if (pending?.answer.content) conversation.messages = [...pending.history, { ...pending.answer, stopped: true }];
  else if (pending?.draft) conversation.draft ||= pending.draft;
  pending = null; // the stream breaks off now, and that is not its end
  save();
}

function save() {
  conversation.changed = Date.now();
  if (!keepConversation(conversation)) notify("chat", "The browser has no room for this conversation; delete some past ones.");
}

// --- asking

async function send(text, schema = "") {
  const question = text.trim(), pictures = runner.isRunning ? [] : takePictures();
  if ((!question && !pictures.length) || runner.isRunning) return;
  setText($("question"), "");
  const message = { role: "user", content: question, ...(pictures.length ? { pictures } : {}), ...(schema ? { schema } : {}) };
  await answer([...conversation.messages, message], {
    draft: question,
    giveBack: () => {
      if (!$("question").value) setText($("question"), question);
      setPictures(pictures);
    },
  });
}

// Another answer to the last question, with the next seed: the same one would say the same.
function again() {
  const { messages } = conversation, seed = Number(messages.at(-1).took?.seed);
  answer(messages.slice(0, -1), { fields: Number.isFinite(seed) ? { seed: (seed + 1) % 2 ** 32 } : {} });
}

function revise(message, text) {
  const place = conversation.messages.indexOf(message);
  const changed = { ...message, content: text };
  const giveBack = () => openEditor(items.get(message), text, (next) => revise(message, next));
  answer([...conversation.messages.slice(0, place), changed], { giveBack });
}

// Ask for the answer to a history; without one the conversation is what it was before.
async function answer(history, { draft = "", fields = {}, giveBack = () => {} }) {
  if (runner.isRunning) return;
  const before = conversation.messages, reply = { role: "assistant", content: "", thought: "" };
  const shown = new AnswerView(again);
  items.set(reply, shown.item);
  pending = { history, answer: reply, draft };
  draw([...history, reply]);
  shown.item.scrollIntoView({ block: "nearest" });
  const end = await runner.run((signal) => follow(shown, history, reply, fields, signal));
  if (end !== "done") reply.stopped = true;
  const follows = isNear();
  shown.settle(reply, history.at(-1).content);
  if (pending?.answer !== reply) return; // its conversation is over
  pending = null;
  conversation.messages = reply.content ? [...history, reply] : before;
  save();
  // What was stopped before its first word stays on the screen until the next question.
  draw(reply.content || end !== "failed" ? [...history, reply] : before);
  if (follows) shown.item.scrollIntoView({ block: "end" });
  if (!reply.content) {
    giveBack();
    if (end === "done") notify("chat", reply.took?.fault ? `The answer is empty: ${reply.took.fault}.` : "The answer is empty. Ask again, or otherwise.");
  }
  if (!document.querySelector(".changer")) $("question").focus({ preventScroll: true });
}

async function follow(shown, history, reply, fields, signal) {
  const clock = new Clock(shown.took);
  const body = { messages: asSent(history), ...chatFields(), ...form(history.at(-1).schema || conversation.schema), ...fields, stream_options: { include_usage: true } };
  try {
    for await (const event of stream("/v1/chat/completions", body, signal)) {
      const note = event.dgemma ?? {};
      if (note.type === "draft") {
        shown.stage.draft(note);
        clock.draft(note);
      } else if (note.type === "retry") shown.stage.retry();
      if (event.usage) reply.usage = event.usage.total_tokens;
      const choice = event.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: thought } = choice.delta;
      if (thought) {
        reply.thought += thought;
        shown.think(thought);
      }
      if (content) {
        reply.content += content;
        shown.stage.promise(content);
        announce(content);
      }
      if (choice.dgemma) reply.took = choice.dgemma;
      if (isNear()) shown.item.scrollIntoView({ block: "end" });
    }
  } finally {
    clock.end();
  }
}

function asSent(history) {
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  const parts = ({ content, pictures }) => [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), ...(content ? [{ type: "text", text: content }] : [])];
  return [...system, ...history.map((message) => ({ role: message.role, content: message.pictures?.length ? parts(message) : message.content }))];
}

// The form of the answer, where the question or the conversation has a schema.
function form(schema) {
  return schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } } : {};
}

// --- showing

function draw(messages = conversation.messages) {
  $("messages").replaceChildren(...messages.map((message, i) => itemOf(message, messages[i - 1])));
  setUsed(conversation.messages.at(-1));
  $("hero").hidden = messages.length > 0;
  $("clear").hidden = messages.length === 0;
  $("instruct").classList.toggle("set", Boolean(conversation.system || conversation.schema));
}

function itemOf(message, before) {
  if (items.has(message)) return items.get(message);
  if (message.role === "user") {
    items.set(message, showQuestion(message, (text) => revise(message, text)));
  } else {
    const shown = new AnswerView(again);
    shown.stage.promise(message.content);
    if (message.thought) shown.think(message.thought);
    shown.settle(message, before?.content ?? "");
    items.set(message, shown.item);
  }
  return items.get(message);
}

// Whether the end of the page is in sight; one who has scrolled up is left alone.
function isNear() {
  return document.documentElement.scrollHeight - window.innerHeight - window.scrollY < 240;
}

// --- instructions of a conversation: a system prompt, and a schema of its answers

function buildInstructions() {
  const dialog = $("instructions"), wrong = $("schema-wrong");
  $("instruct").addEventListener("click", () => {
    $("system").value = conversation.system;
    $("schema").value = conversation.schema;
    wrong.textContent = "";
    dialog.showModal();
  });
  $("instructions-cancel").addEventListener("click", () => dialog.close());
  $("instructions-form").addEventListener("submit", (event) => {
    const schema = $("schema").value.trim();
    try {
      if (schema) JSON.parse(schema);
    } catch (error) {
      event.preventDefault();
      wrong.textContent = `This is no JSON: ${error.message}.`;
      return;
    }
    conversation.system = $("system").value.trim();
    conversation.schema = schema;
    save();
    draw();
  });
}
