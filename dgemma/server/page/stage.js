// A canvas shown while it converges, what came of it, and its replay.
import { CanvasView } from "./canvas.js";
import { button, h } from "./dom.js";
import { Recording, Scrubber } from "./recording.js";

export class Stage {
  // `render(text)` makes the element that shows a finished text; without it the canvas shows it.
  constructor(className, render = null) {
    this.recording = new Recording();
    this.view = new CanvasView(className);
    this.render = render;
    this.rendered = h("div", { class: "rendered", hidden: true });
    this.scrubber = null;
    this.pending = null;
    this.el = h("div", { class: "staged" }, this.view.el, this.rendered);
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
    this._finish();
  }

  // The control that replays; made when it is first asked for.
  replay() {
    if (this.scrubber === null) {
      this.scrubber = new Scrubber(this.recording, (frame) => this._draw(frame.draft, this.recording.before(frame)), () => this._finish());
      const both = h("div", { class: "switch", role: "group", "aria-label": "What is shown" });
      for (const [shows, name] of [["canvas", "Canvas"], ["guess", "Best guess"]]) {
        const choice = button(name, (event) => this._show(shows, both, event.currentTarget));
        choice.setAttribute("aria-pressed", String(shows === this.view.shows));
        both.append(choice);
      }
      this.scrubber.el.append(both);
      this.el.prepend(this.scrubber.el); // above: a canvas of noise is longer than its text
    }
    return this.scrubber;
  }

  _draw(draft, promised) {
    this.rendered.hidden = true;
    this.view.el.hidden = false;
    this.view.draw(draft, promised);
  }

  _finish() {
    const text = this.recording.text;
    this.view.settle(text);
    if (this.render === null || !text) return;
    this.rendered.replaceChildren(this.render(text));
    this.rendered.hidden = false;
    this.view.el.hidden = true;
  }

  _show(shows, both, pressed) {
    this.view.shows = shows;
    for (const choice of both.children) choice.setAttribute("aria-pressed", String(choice === pressed));
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
