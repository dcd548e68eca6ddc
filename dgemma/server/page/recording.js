// Every step of an answer, and a control to go through them again.
import { h, prefersStill, svg } from "./dom.js";

const WIDTH = 600, HEIGHT = 28;
const STEP_MS = 140;

const scrubbers = new WeakMap(); // of each control's element
let touched = null; // the one that was used last

// Step the replay that is in sight by an arrow key; the slider itself knows arrows already.
export function stepByKey(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move || event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, textarea, select, [role=tab], dialog")) return;
  const seen = [...document.querySelectorAll(".scrubber")].filter((el) => el.checkVisibility()).map((el) => scrubbers.get(el));
  const scrubber = seen.includes(touched) ? touched : seen.at(-1);
  if (!scrubber) return;
  event.preventDefault();
  scrubber.step(move);
}

export class Recording {
  constructor() {
    this.frames = []; // {draft, promised: characters of text before the canvas}
    this.text = "";
  }

  add(draft) {
    const slim = { ...draft };
    delete slim.ids;
    delete slim.guess;
    delete slim.text;
    this.frames.push({ draft: slim, promised: this.text.length });
  }

  promise(text) {
    this.text += text;
  }

  get isEmpty() {
    return this.frames.length === 0;
  }

  before(frame) {
    return this.text.slice(0, frame.promised);
  }
}

export class Scrubber {
  // `show(frame)` draws a step; `finish()` draws what came of it all.
  constructor(recording, show, finish) {
    this.recording = recording;
    this.show = show;
    this.finish = finish;
    this.timer = null;
    this.slider = h("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "Step", oninput: () => this._seek() });
    this.label = h("output", { class: "at" });
    this.line = svg("polyline", { class: "spark", points: "" });
    this.marks = svg("g", { class: "marks" });
    this.head = svg("line", { class: "head", x1: "0", x2: "0", y1: "0", y2: String(HEIGHT) });
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.marks, this.line, this.head);
    this.button = h("button", { type: "button", class: "icon play", "aria-label": "Play", onclick: () => this.toggle() });
    this._icon(false);
    this.el = h("div", { class: "scrubber", role: "group", "aria-label": "Replay" }, this.button, h("div", { class: "track" }, picture, this.slider), this.label);
    scrubbers.set(this.el, this);
    this.refresh();
  }

  // Take in the frames there are now.
  refresh() {
    const frames = this.recording.frames;
    this.slider.max = String(frames.length);
    this.slider.value = String(frames.length);
    const means = frames.map(({ draft }) => meanEntropy(draft));
    const top = Math.max(0.5, ...means);
    const x = (i) => (frames.length < 2 ? WIDTH : (i / frames.length) * WIDTH);
    this.line.setAttribute("points", [...means.map((m, i) => `${x(i).toFixed(1)},${(HEIGHT - 2 - (m / top) * (HEIGHT - 5)).toFixed(1)}`), `${WIDTH},${HEIGHT - 2}`].join(" "));
    this.marks.replaceChildren();
    frames.forEach(({ draft }, i) => {
      if (i > 0 && draft.step <= frames[i - 1].draft.step) {
        this.marks.append(svg("line", { x1: x(i), x2: x(i), y1: "0", y2: String(HEIGHT) }));
      }
    });
    this._label();
  }

  // Show the canvas as it was in the end.
  last() {
    this.slider.value = String(this.recording.frames.length - 1);
    this._seek();
  }

  step(move) {
    this.slider.value = String(Number(this.slider.value) + move);
    this._seek();
  }

  toggle() {
    touched = this;
    if (this.timer !== null) {
      this.pause();
      return;
    }
    if (Number(this.slider.value) >= this.recording.frames.length) this.slider.value = "0";
    this._icon(true);
    this._seek(false);
    this.timer = setInterval(() => {
      this.slider.value = String(Number(this.slider.value) + 1);
      this._seek(false);
      if (Number(this.slider.value) >= this.recording.frames.length) this.pause();
    }, prefersStill() ? 4 * STEP_MS : STEP_MS);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this._icon(false);
  }

  _seek(byHand = true) {
    if (byHand) {
      touched = this;
      this.pause();
    }
    const frame = this.recording.frames[Number(this.slider.value)];
    if (frame) this.show(frame);
    else this.finish();
    this._label();
  }

  _label() {
    const frames = this.recording.frames, place = Number(this.slider.value), frame = frames[place];
    const blocks = frames.length ? frames[frames.length - 1].draft.block + 1 : 0;
    const said = frame ? `canvas ${frame.draft.block + 1} of ${blocks}, step ${frame.draft.step}` : "the result";
    this.label.textContent = said;
    this.slider.setAttribute("aria-valuetext", said);
    const x = frames.length ? (place / frames.length) * WIDTH : WIDTH;
    this.head.setAttribute("x1", x);
    this.head.setAttribute("x2", x);
  }

  _icon(isPlaying) {
    const path = isPlaying ? "M6.500 5v10M13.500 5v10" : "M6.500 4.500v11l9-5.500z";
    const props = isPlaying ? { d: path, stroke: "currentColor", "stroke-width": "2.500", "stroke-linecap": "round" } : { d: path, fill: "currentColor" };
    this.button.replaceChildren(svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", props)));
    this.button.setAttribute("aria-label", isPlaying ? "Pause" : "Play");
  }
}

export function meanEntropy(draft) {
  const open = draft.entropy.filter((nats, i) => nats !== null && !draft.pinned[i]);
  return open.length ? open.reduce((a, b) => a + b, 0) / open.length : 0;
}
