// Conversations, kept in the browser's own storage: each under its own key, so that two tabs do
// not overwrite each other's. What is read back is checked like anything from outside.
import { $, h, plural } from "./dom.js";

const PREFIX = "dgemma.conversation.", LAST = "dgemma.last", MAX_TITLE = 80;

export function newConversation() {
  return { id: `${Date.now().toString(36)}${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`, changed: Date.now(), system: "", schema: "", draft: "", messages: [] };
}

// The conversation that this tab had, or the last one of any tab.
export function lastConversation() {
  const id = sessionStorage.getItem(LAST) ?? localStorage.getItem(LAST);
  return (id && read(PREFIX + id)) || newConversation();
}

// Whether there was room; a conversation without anything in it is not kept.
export function keepConversation(conversation) {
  try {
    const { system, schema, draft, messages } = conversation;
    if (messages.length || system || schema || draft) localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    else localStorage.removeItem(PREFIX + conversation.id);
    sessionStorage.setItem(LAST, conversation.id);
    localStorage.setItem(LAST, conversation.id);
    return true;
  } catch {
    return false;
  }
}

function read(key) {
  try {
    const kept = JSON.parse(localStorage.getItem(key));
    const isMessage = (m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string";
    const text = (value) => (typeof value === "string" ? value : "");
    const isPicture = (url) => typeof url === "string" && url.startsWith("data:image/");
    const messages = Array.isArray(kept.messages) ? kept.messages.filter(isMessage) : [];
    for (const message of messages) if (message.pictures) message.pictures = [message.pictures].flat().filter(isPicture);
    return { id: key.slice(PREFIX.length), changed: Number(kept.changed) || 0, system: text(kept.system), schema: text(kept.schema), draft: text(kept.draft), messages };
  } catch {
    return null;
  }
}

function all() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = keys.map(read).filter((one) => one?.messages.length);
  return found.sort((a, b) => b.changed - a.changed);
}

export function forgetConversation(id) {
  localStorage.removeItem(PREFIX + id);
}

// The list of them: `open(conversation)` is called for the one that is chosen, `gone(id)` for each
// that is deleted.
export function buildPast(open, gone) {
  const dialog = $("past");
  const erase = (ids) => {
    for (const id of ids) {
      forgetConversation(id);
      gone(id);
    }
    list();
  };
  const list = () => {
    const found = all();
    $("past-list").replaceChildren(...found.map((one) => row(one, () => erase([one.id]))));
    $("past-none").hidden = found.length > 0;
    $("past-erase").hidden = found.length < 2;
  };
  const row = (one, onErase) => {
    const title = one.messages[0].content.replace(/\s+/g, " ").slice(0, MAX_TITLE) || "A picture";
    const about = `${new Date(one.changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })} · ${plural(one.messages.length, "message")}`;
    const choose = h("button", { type: "button", class: "past-open", onclick: () => { dialog.close(); open(one); } }, h("span", {}, title), h("small", {}, about));
    return h("li", {}, choose, h("button", { type: "button", class: "icon", "aria-label": `Delete “${title}”`, title: "Delete", onclick: onErase }, "×"));
  };
  $("past-erase").addEventListener("click", () => erase(all().map((one) => one.id)));
  $("past-open").addEventListener("click", () => {
    list();
    dialog.showModal();
  });
}
