// Puts the page together: tabs, theme, keys.
import { get } from "./api.js";
import { buildChat, setModel } from "./chat.js";
import { buildCompare } from "./compare.js";
import { $, h } from "./dom.js";
import { buildEdit } from "./edit.js";
import { buildFill, openHole } from "./fill.js";
import { stepByKey } from "./recording.js";
import { notify, stopAll } from "./run.js";
import { buildSettings, modes, toggleSettings } from "./settings.js";
import { buildSudoku } from "./sudoku.js";

const TABS = ["chat", "fill", "edit", "sudoku", "compare"];
const FOCUS = { chat: "question", fill: "holed", edit: "edit-do", sudoku: "sudoku-go", compare: "race-question" };
const THEME = "dgemma.theme";
const KEYS = {
  Enter: "send, or start",
  "Shift+Enter": "a new line",
  Esc: "stop",
  "Alt+1 … Alt+5": "chat, fill, edit, Sudoku, compare",
  "Alt+S": "settings of the sampler",
  "Alt+H": "open a hole at the selection",
  "← →": "one step back or on, in a replay",
  "/": "write a message",
  "?": "this list",
};

function select(name, { focus = true } = {}) {
  for (const tab of TABS) {
    const isChosen = tab === name;
    $(tab).hidden = !isChosen;
    $(`tab-${tab}`).setAttribute("aria-selected", String(isChosen));
    $(`tab-${tab}`).tabIndex = isChosen ? 0 : -1;
  }
  dispatchEvent(new Event("resize")); // what was hidden had no height
  history.replaceState(null, "", name === "chat" ? "/" : `#${name}`);
  if (focus) $(FOCUS[name]).focus({ preventScroll: true });
}

function buildTabs() {
  TABS.forEach((name, i) => {
    const tab = $(`tab-${name}`);
    tab.addEventListener("click", () => select(name));
    tab.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const next = TABS[(i + move + TABS.length) % TABS.length];
      select(next, { focus: false });
      $(`tab-${next}`).focus();
    });
  });
}

function buildTheme() {
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
  };
  apply(localStorage.getItem(THEME));
  $("theme").addEventListener("click", () => {
    const set = document.documentElement.dataset.theme;
    const isDark = set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    localStorage.setItem(THEME, isDark ? "light" : "dark");
    apply(isDark ? "light" : "dark");
  });
}

function buildKeys() {
  for (const [key, what] of Object.entries(KEYS)) $("key-list").append(h("dt", {}, key), h("dd", {}, what));
  $("help").addEventListener("click", () => $("keys").showModal());
  document.addEventListener("keydown", (event) => {
    const isWriting = event.target.closest("input, textarea, select, [contenteditable]") !== null;
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (!stopAll() && !$("settings").hidden) toggleSettings(false);
    } else if (event.altKey && /^Digit[1-5]$/.test(event.code)) {
      event.preventDefault();
      select(TABS[Number(event.code.at(-1)) - 1]);
    } else if (event.altKey && event.code === "KeyS") {
      event.preventDefault();
      toggleSettings();
    } else if (event.altKey && event.code === "KeyH" && !$("fill").hidden) {
      event.preventDefault();
      openHole();
    } else if (event.key === "/" && !isWriting) {
      event.preventDefault();
      select("chat");
    } else if (event.key === "?" && !isWriting) {
      $("keys").showModal();
    } else stepByKey(event);
  });
}

async function greet() {
  try {
    const { data } = await get("/v1/models");
    $("model").textContent = data[0].id;
    modes(data[0].modes);
    setModel(data[0]);
  } catch (error) {
    notify("chat", error.message);
  }
}

buildTheme();
buildTabs();
buildKeys();
buildSettings();
buildChat(select);
buildFill();
buildEdit();
buildSudoku();
buildCompare();
const asked = location.hash.slice(1);
select(TABS.includes(asked) ? asked : "chat", { focus: matchMedia("(pointer: fine)").matches });
document.documentElement.dataset.ready = "yes";
greet();
