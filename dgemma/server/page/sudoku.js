// A grid whose cells settle together.
import { stream } from "./api.js";
import { $, h, plural, seconds } from "./dom.js";
import { Recording, Scrubber } from "./recording.js";
import { announce, Runner } from "./run.js";
import { setting } from "./settings.js";

const PUZZLES = {
  Easy: "530070000600195000098000060800060003400803001700020006060000280000419005000080079",
  Medium: "200080300060070084030500209000105408000000000402706000301007040720040060004010003",
  Hard: "030050040008010500460000012070502080000603000040109030250000098001020600080060020",
};
const NINE = [...Array(9).keys()];
const UNITS = NINE.flatMap((n) => [
  NINE.map((i) => 9 * n + i),
  NINE.map((i) => 9 * i + n),
  NINE.map((i) => 27 * Math.floor(n / 3) + 3 * (n % 3) + 9 * Math.floor(i / 3) + (i % 3)),
]);
const FULL = 2.2; // nats: nine digits, all alike

let runner, cells = [], recording = new Recording(), positions = [];

export function buildSudoku() {
  runner = new Runner($("sudoku-go"), $("sudoku-stop"));
  for (let row = 0; row < 9; row += 1) {
    const line = h("div", { role: "row" });
    for (let column = 0; column < 9; column += 1) line.append(cell(row, column));
    $("grid").append(line);
  }
  for (const [name, puzzle] of Object.entries(PUZZLES)) {
    $("puzzles").append(h("button", { type: "button", class: "quiet", onclick: () => set(puzzle) }, name));
  }
  $("puzzles").append(h("button", { type: "button", class: "quiet", onclick: () => set("0".repeat(81)) }, "Empty"));
  $("sudoku-go").addEventListener("click", go);
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

// What was given, whatever stands in the other cells by now.
function givens() {
  return cells.map((input) => (input.classList.contains("given") ? input.value : "0")).join("");
}

async function go() {
  const puzzle = givens(), mode = $("sudoku-mode").value;
  set(puzzle);
  recording = new Recording();
  $("verdict").textContent = "";
  const isWhole = await runner.run((signal) => (mode === "ar" ? oneByOne(puzzle, signal) : together(puzzle, signal)));
  if (!isWhole && recording.isEmpty) set(puzzle);
}

async function together(puzzle, signal) {
  const body = { puzzle, restarts: Number($("sudoku-restarts").value) || 0, dgemma: { drafts: true } };
  if (setting("seed") !== undefined) body.seed = setting("seed");
  for await (const event of stream("/v1/dgemma/sudoku", body, signal)) {
    const note = event.dgemma;
    if (note.type === "layout") positions = note.positions;
    else if (note.type === "draft") {
      recording.add(note);
      draw(note, puzzle);
    } else if (event.object === "dgemma.sudoku") end(event, puzzle);
  }
}

async function oneByOne(puzzle, signal) {
  const rows = puzzle.match(/.{9}/g).map((row) => [...row].join(" "));
  const body = { messages: [{ role: "user", content: `Solve this Sudoku.\n${rows.join("\n")}` }], max_tokens: 200, dgemma: { mode: "ar" } };
  let text = "";
  const begun = performance.now();
  for await (const event of stream("/v1/chat/completions", body, signal)) {
    text += event.choices[0]?.delta.content ?? "";
    const digits = text.replace(/\s/g, "").slice(0, 81);
    cells.forEach((input, i) => write(input, digits[i] ?? (puzzle[i] === "0" ? "" : puzzle[i]), puzzle[i], 0));
    const took = event.choices[0]?.dgemma;
    if (took) {
      const isGrid = digits.length === 81;
      verdict(isGrid && isSolution(puzzle, digits), `${plural(took.steps, "token")} · ${seconds((performance.now() - begun) / 1000)}`);
    }
  }
}

function draw(draft, puzzle) {
  cells.forEach((input, i) => {
    const place = positions[i], isKept = draft.kept[place] || draft.pinned[place];
    // Noise is any token at all; what the model leans to says more in a cell.
    const digit = (isKept ? draft.tokens : draft.guess_tokens)[place]?.trim() ?? "";
    write(input, /^[1-9]$/.test(digit) ? digit : "·", puzzle[i], isKept ? 0 : draft.entropy[place] ?? FULL, !isKept);
  });
}

function write(input, digit, given, nats, isNoise = false) {
  input.value = digit;
  const isChanged = given !== "0" && digit !== given;
  input.className = isChanged ? "changed" : given !== "0" ? "given" : isNoise ? "noise" : "found";
  input.style.setProperty("--h", Math.min(1, nats / FULL).toFixed(3));
}

function end(reply, puzzle) {
  const finish = () => cells.forEach((input, i) => write(input, reply.solution?.[i] ?? "", puzzle[i], 0));
  finish();
  const { steps, seconds: time, seed } = reply.dgemma;
  const more = reply.restarts ? `, ${plural(reply.restarts, "new attempt")}` : "";
  verdict(reply.solved, `${plural(steps, "step")}${more} · ${seconds(time)} · seed ${seed}`);
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

function isSolution(puzzle, digits) {
  if (![...puzzle].every((given, i) => given === "0" || given === digits[i])) return false;
  return UNITS.every((unit) => new Set(unit.map((i) => digits[i])).size === 9);
}

