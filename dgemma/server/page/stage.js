// A canvas that is watched while it settles, and gone through again afterwards.
import { CanvasView } from "./canvas.js";
import { h } from "./dom.js";
import { Recording, Scrubber } from "./recording.js";

export class Stage {
  constructor(className) {
    this.recording = new Recording();
    this.view = new CanvasView(className);
    this.scrubber = null;
    this.pending = null;
    this.el = h("div", { class: "staged" }, this.view.el);
  }

  draft(draft) {
    this.recording.add(draft);
    this._later();
  }

  promise(text) {
    this.recording.promise(text);
    this._later();
  }

  // A new attempt at the canvas: its steps begin anew.
  retry() {
    this.view.last = null;
  }

  end() {
    cancelAnimationFrame(this.pending);
    this.pending = null;
    this.view.settle(this.recording.text);
  }

  // The control that replays; made when it is first asked for.
  replay() {
    if (this.scrubber === null) {
      const frames = (frame) => this.view.draw(frame.draft, this.recording.before(frame));
      this.scrubber = new Scrubber(this.recording, frames, () => this.view.settle(this.recording.text));
      const both = h("div", { class: "switch", role: "group", "aria-label": "What is shown" });
      for (const [shows, name] of [["canvas", "Canvas"], ["guess", "Best guess"]]) {
        both.append(h("button", { type: "button", class: "quiet", "aria-pressed": String(shows === this.view.shows), onclick: (event) => this._show(shows, both, event.currentTarget) }, name));
      }
      this.scrubber.el.append(both);
      this.el.prepend(this.scrubber.el); // above: a canvas of noise is longer than its text
    }
    return this.scrubber;
  }

  _show(shows, both, pressed) {
    this.view.shows = shows;
    for (const button of both.children) button.setAttribute("aria-pressed", String(button === pressed));
    if (this.view.last) this.view.draw(this.view.last, this.view.promised.textContent);
  }

  // Steps may come faster than a screen shows them.
  _later() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      const frame = this.recording.frames.at(-1);
      const text = this.recording.text;
      if (frame && frame.promised === text.length) this.view.draw(frame.draft, text);
      else this.view.settle(text);
    });
  }
}
