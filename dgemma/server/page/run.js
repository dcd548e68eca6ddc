// One thing at a time on each tab: start, stop, a clock, and what is said about it.
import { ApiError, stream } from "./api.js";
import { $, h, seconds } from "./dom.js";
import { Stage } from "./stage.js";

const TICK_MS = 100;
const running = new Set();

export class Runner {
  // The tab it belongs to, and the buttons that start and stop it; one of them is there at a time.
  constructor(tab, go, stop) {
    this.tab = tab;
    this.go = go;
    this.stopButton = stop;
    this.abort = null;
    stop.addEventListener("click", () => this.stop());
  }

  get isRunning() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  // Do the work: "done", "stopped" or "failed". A second start while it runs is no start.
  async run(work) {
    if (this.isRunning) return "stopped";
    this.abort = new AbortController();
    running.add(this);
    this._buttons(true);
    dismiss(this.tab);
    try {
      await work(this.abort.signal);
      return "done";
    } catch (error) {
      if (error.name === "AbortError") {
        announce("Stopped.");
        return "stopped";
      }
      if (error instanceof ApiError) notify(this.tab, error.message);
      else {
        notify(this.tab, "Something on this page failed. The console says what.");
        console.error(error);
      }
      return "failed";
    } finally {
      this.abort = null;
      running.delete(this);
      this._buttons(false);
    }
  }

  // Send a request to a tab's endpoint and draw its drafts; the reply and its stage, or null.
  async follow(body) {
    const part = (name) => $(`${this.tab}-${name}`);
    const stage = new Stage("canvas mono");
    part("stage").replaceChildren(stage.el);
    part("stage").hidden = false;
    part("result").hidden = true;
    const clock = new Clock(part("took"));
    let reply = null;
    await this.run(async (signal) => {
      for await (const event of stream(`/v1/dgemma/${this.tab}`, body, signal)) {
        if (event.dgemma?.type === "draft") {
          stage.draft(event.dgemma);
          clock.draft(event.dgemma);
        }
        if (event.object === `dgemma.${this.tab}`) reply = event;
      }
    });
    clock.end();
    if (reply) return { reply, stage };
    part("stage").hidden = true;
    return null;
  }

  _buttons(isRunning) {
    const had = document.activeElement === this.go || document.activeElement === this.stopButton;
    this.go.hidden = isRunning;
    this.stopButton.hidden = !isRunning;
    if (had) (isRunning ? this.stopButton : this.go).focus();
  }
}

export function stopAll() {
  for (const runner of running) runner.stop();
  return running.size > 0;
}

// Seconds since the start and the step that is shown, written into an element until it is ended.
export class Clock {
  constructor(el) {
    this.el = el;
    this.begun = performance.now();
    this.at = "";
    this.timer = setInterval(() => this._write(), TICK_MS);
    this._write();
  }

  get seconds() {
    return (performance.now() - this.begun) / 1000;
  }

  draft({ block, step }) {
    this.at = `canvas ${block + 1}, step ${step}`;
  }

  // Stop, with nothing left of it; the seconds it took.
  end() {
    clearInterval(this.timer);
    this.el.textContent = "";
    return this.seconds;
  }

  _write() {
    this.el.textContent = [this.at, `${this.seconds.toFixed(1)} s`].filter(Boolean).join(" · ");
  }
}

export function stepsAndTime({ steps, seconds: time, seed }) {
  return `${steps} ${steps === 1 ? "step" : "steps"} · ${seconds(time)} · seed ${seed}`;
}

// For screen readers: promised text alone, never a draft.
export function announce(text) {
  const line = document.createElement("p");
  line.textContent = text;
  const region = $("announce");
  region.append(line);
  while (region.childElementCount > 12) region.firstElementChild.remove();
}

// A sentence on its own tab, in the flow of the page: it covers nothing and stays until it is
// dismissed or the next thing is started there.
export function notify(tab, text) {
  const close = h("button", { type: "button", class: "icon", "aria-label": "Dismiss", onclick: () => dismiss(tab) }, "×");
  $(`notice-${tab}`).replaceChildren(h("p", {}, text), close);
  $(`notice-${tab}`).hidden = false;
}

export function dismiss(tab) {
  $(`notice-${tab}`).hidden = true;
  $(`notice-${tab}`).replaceChildren();
}
