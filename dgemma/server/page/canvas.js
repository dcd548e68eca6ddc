// A canvas as tokens in a line of text: what is decided is ink, what is open is ember.
import { h } from "./dom.js";

const FULL = 5; // nats at which the shade is full
const PHASES = 7;

export class CanvasView {
  // `shows`: "canvas" for what stands on it, noise included; "guess" for what would be committed.
  constructor(className = "canvas") {
    this.shows = "canvas";
    this.promised = h("span", { class: "promised" });
    this.tokens = h("span", { class: "tokens", "aria-hidden": "true" });
    this.el = h("div", { class: className }, this.promised, this.tokens);
    this.spans = [];
    this.last = null;
  }

  // Draw a draft behind the text that is promised already.
  draw(draft, promised = "") {
    if (this.promised.textContent !== promised) this.promised.textContent = promised;
    const words = this.shows === "guess" ? draft.guess_tokens : draft.tokens;
    const end = lastWord(draft);
    this._resize(words.length);
    const before = this.last && this.last.block === draft.block ? this.last : null;
    words.forEach((word, i) => {
      const isAccepted = draft.accepted[i] || draft.pinned[i];
      const span = this.spans[i];
      const isNew = isAccepted && before !== null && !before.accepted[i] && !draft.pinned[i];
      const kind = draft.pinned[i] ? "pinned" : isAccepted ? "accepted" : "noise";
      const isBlank = word === "";
      span.className = `t ${kind} p${i % PHASES}${isNew ? " new" : ""}${isBlank ? " blank" : ""}`;
      const shown = isBlank ? (i > end && isAccepted ? "" : "·") : word;
      if (span.textContent !== shown) span.textContent = shown;
      const nats = draft.entropy[i] ?? FULL;
      span.style.setProperty("--h", Math.min(1, nats / FULL).toFixed(3));
    });
    this.last = draft;
  }

  // Nothing is open any more.
  settle(text) {
    this.promised.textContent = text;
    this._resize(0);
    this.last = null;
  }

  _resize(count) {
    while (this.spans.length > count) this.spans.pop().remove();
    while (this.spans.length < count) {
      const span = h("span", { class: "t" });
      this.spans.push(span);
      this.tokens.append(span);
    }
  }
}

function lastWord(draft) {
  let end = draft.guess_tokens.length - 1;
  while (end >= 0 && draft.guess_tokens[end] === "") end -= 1;
  return end;
}
