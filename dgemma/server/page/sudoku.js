// A grid whose cells converge together.
import { stream } from "./api.js";
import { $, button, h, plural, seconds } from "./dom.js";
import { encode, readsPictures } from "./pictures.js";
import { Recording, Scrubber } from "./recording.js";
import { announce, Clock, dismiss, notify, Runner, stepsAndTime } from "./run.js";
import { setting } from "./settings.js";

const PUZZLES = {
  Easy: "530070000600195000098000060800060003400803001700020006060000280000419005000080079",
  Medium: "200080300060070084030500209000105408000000000402706000301007040720040060004010003",
  Hard: "030050040008010500460000012070502080000603000040109030250000098001020600080060020",
};
export const EASY = PUZZLES.Easy;
const NINE = [...Array(9).keys()];
const UNITS = NINE.flatMap((n) => [
  NINE.map((i) => 9 * n + i),
  NINE.map((i) => 9 * i + n),
  NINE.map((i) => 27 * Math.floor(n / 3) + 3 * (n % 3) + 9 * Math.floor(i / 3) + (i % 3)),
]);
const FULL = 2.2; // nats: nine digits, all alike

let runner, cells = [], recording = new Recording(), positions = [], clock = null;

export function buildSudoku() {
  runner = new Runner("sudoku", $("sudoku-go"), $("sudoku-stop"));
  for (let row = 0; row < 9; row += 1) {
    const line = h("div", { role: "row" });
    for (let column = 0; column < 9; column += 1) line.append(cell(row, column));
    $("grid").append(line);
  }
  for (const [name, puzzle] of Object.entries(PUZZLES)) {
    $("puzzles").append(button(name, () => set(puzzle)));
  }
  $("puzzles").append(button("Empty", () => set("0".repeat(81))));
  $("sudoku-go").addEventListener("click", () => go());
  const file = $("sudoku-file");
  $("sudoku-picture").addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    read(file.files[0]);
    file.value = "";
  });
  addEventListener("drop", (event) => {
    if (!$("sudoku").hidden && event.dataTransfer?.files.length) read(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => {
    const isElsewhere = event.target.closest?.("input, textarea") && !$("grid").contains(event.target);
    if (!$("sudoku").hidden && !isElsewhere) paste(event);
  });
  set(PUZZLES.Easy);
}

function cell(row, column) {
  const input = h("input", { type: "text", inputmode: "numeric", maxlength: "1", autocomplete: "off", "aria-label": `Row ${row + 1}, column ${column + 1}` });
  const place = cells.length;
  input.addEventListener("input", () => {
    input.value = input.value.replace(/[^1-9]/g, "");
    input.className = input.value ? "given" : "";
    input.style.removeProperty("--h");
  });
  input.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -9, ArrowDown: 9 }[event.key];
    if (move === undefined || !cells[place + move]) return;
    event.preventDefault();
    cells[place + move].focus();
    cells[place + move].select();
  });
  cells.push(input);
  return h("div", { role: "gridcell" }, input);
}

function set(puzzle) {
  if (runner.isRunning) return;
  cells.forEach((input, i) => {
    input.value = puzzle[i] === "0" ? "" : puzzle[i];
    input.className = puzzle[i] === "0" ? "" : "given";
    input.style.removeProperty("--h");
  });
  $("sudoku-stage").hidden = true;
  $("verdict").textContent = "";
}

// A puzzle of 81 cells in any usual form: a line or nine, 0 . _ * or - for empty, with or without rules.
function paste(event) {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    read(event.clipboardData.files[0]);
    return;
  }
  const text = event.clipboardData.getData("text/plain");
  const lines = text.split("\n").filter((line) => !/^[-+=|\s]{9,}$/.test(line) || /^-{9}$/.test(line.trim()));
  const cellsText = lines.join("").replace(/[\s|,;]/g, "").replace(/[._*xX?-]/g, "0");
  if (cellsText.length < 2) return; // a digit for its cell
  event.preventDefault();
  if (runner.isRunning) notify("sudoku", "A puzzle is being solved; stop it before you paste another.");
  else if (/^\d{81}$/.test(cellsText)) {
    set(cellsText);
    dismiss("sudoku");
    announce("The puzzle is in the grid.");
  } else notify("sudoku", `What was pasted has ${plural(cellsText.replace(/\D/g, "").length, "cell")}; a Sudoku has 81, each a digit, with 0 or a dot for an empty one.`);
}

// The picture of a puzzle, which the model reads and solves.
async function read(file) {
  if (!readsPictures()) notify("sudoku", "This model reads no pictures; it has no vision tower. Type the puzzle, or paste its digits.");
  else if (runner.isRunning) notify("sudoku", "A puzzle is being solved; stop it before you show another.");
  else {
    const url = await encode(file).catch(() => null);
    if (!url) notify("sudoku", `The browser cannot read ${file.name || "this file"} as a picture; PNG, JPEG and WebP are known.`);
    else {
      dismiss("sudoku");
      set("0".repeat(81));
      announce("The picture is being read.");
      await go(url);
    }
  }
}

// What was given, whatever stands in the other cells by now.
function givens() {
  return cells.map((input) => (input.classList.contains("given") ? input.value : "0")).join("");
}

async function go(image = null) {
  const puzzle = givens(), mode = image ? "diffusion" : $("sudoku-mode").value;
  set(puzzle);
  recording = new Recording();
  if (runner.isRunning) return;
  clock = new Clock($("verdict"));
  let finish = null;
  const end = await runner.run(async (signal) => {
    finish = await (mode === "ar" ? oneByOne(puzzle, signal) : together(puzzle, signal, image));
  });
  clock.end();
  finish?.();
  if (end !== "done" && recording.isEmpty) set(puzzle);
}

// Both return what is to be shown in the end.
async function together(puzzle, signal, image) {
  let finish = null;
  const body = { ...(image ? { image } : { puzzle }), restarts: Number($("sudoku-restarts").value) || 0, dgemma: { drafts: true } };
  if (setting("seed") !== undefined) body.seed = setting("seed");
  for await (const event of stream("/v1/dgemma/sudoku", body, signal)) {
    const note = event.dgemma;
    if (note.type === "layout") positions = note.positions;
    else if (note.type === "draft") {
      if (image) puzzle = pinned(note);
      recording.add(note);
      clock.draft(note);
      draw(note, puzzle);
    } else if (event.object === "dgemma.sudoku") finish = () => show(event, event.puzzle);
  }
  return finish;
}

// A puzzle as the model was taught to read it.
export function asQuestion(puzzle) {
  return `Solve this Sudoku.\n${puzzle.match(/.{9}/g).map((row) => [...row].join(" ")).join("\n")}`;
}

async function oneByOne(puzzle, signal) {
  const body = { messages: [{ role: "user", content: asQuestion(puzzle) }], max_tokens: 200, dgemma: { mode: "ar" } };
  let text = "", finish = null;
  const begun = performance.now();
  for await (const event of stream("/v1/chat/completions", body, signal)) {
    text += event.choices[0]?.delta.content ?? "";
    const digits = text.replace(/\s/g, "").slice(0, 81);
    cells.forEach((input, i) => write(input, digits[i] ?? (puzzle[i] === "0" ? "" : puzzle[i]), puzzle[i], 0));
    const took = event.choices[0]?.dgemma;
    if (took) {
      const time = (performance.now() - begun) / 1000;
      finish = () => verdict(isSolution(puzzle, digits), `${plural(took.steps, "token")} · ${seconds(time)}`);
    }
  }
  return finish;
}

// The givens that were read from a picture: what a canvas pins.
function pinned(draft) {
  return positions.map((place) => (draft.pinned[place] ? draft.tokens[place].trim() : "0")).join("");
}

function draw(draft, puzzle) {
  cells.forEach((input, i) => {
    const place = positions[i], isAccepted = draft.accepted[place] || draft.pinned[place];
    // Noise is any token at all; what the model leans to says more in a cell.
    const digit = (isAccepted ? draft.tokens : draft.guess_tokens)[place]?.trim() ?? "";
    write(input, /^[1-9]$/.test(digit) ? digit : "·", puzzle[i], isAccepted ? 0 : draft.entropy[place] ?? FULL, !isAccepted);
  });
}

function write(input, digit, given, nats, isNoise = false) {
  input.value = digit;
  const isChanged = given !== "0" && digit !== given;
  input.className = isChanged ? "changed" : given !== "0" ? "given" : isNoise ? "noise" : "found";
  input.style.setProperty("--h", Math.min(1, nats / FULL).toFixed(3));
}

function show(reply, puzzle) {
  const finish = () => cells.forEach((input, i) => write(input, reply.solution?.[i] ?? "", puzzle[i], 0));
  finish();
  const more = reply.restarts ? `${plural(reply.restarts, "new attempt")} · ` : "";
  verdict(reply.solved, more + stepsAndTime(reply.dgemma));
  const scrubber = new Scrubber(recording, (frame) => draw(frame.draft, puzzle), finish);
  $("sudoku-stage").replaceChildren(scrubber.el);
  $("sudoku-stage").hidden = recording.isEmpty;
}

function verdict(isSolved, took) {
  const said = isSolved ? "Solved" : "Not solved";
  $("verdict").replaceChildren(h("b", { class: isSolved ? "good" : "bad" }, said), ` ${took}`);
  announce(`${said}.`);
  for (const unit of isSolved ? [] : UNITS) {
    const inUnit = unit.map((i) => cells[i]);
    for (const input of inUnit) {
      if (inUnit.some((other) => other !== input && other.value === input.value)) input.classList.add("doubtful");
    }
  }
}

export function isSolution(puzzle, digits) {
  if (digits.length !== 81) return false;
  if (![...puzzle].every((given, i) => given === "0" || given === digits[i])) return false;
  return UNITS.every((unit) => new Set(unit.map((i) => digits[i])).size === 9);
}

