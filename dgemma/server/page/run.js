// One thing at a time on each tab: start, stop, and what is said about it.
import { ApiError } from "./api.js";
import { $ } from "./dom.js";

const running = new Set();

export class Runner {
  // The buttons that start and stop it; one of them is there at a time.
  constructor(go, stop) {
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

  // Do the work; whether it came to its end. A second start while it runs is no start.
  async run(work) {
    if (this.isRunning) return false;
    this.abort = new AbortController();
    running.add(this);
    this._buttons(true);
    try {
      await work(this.abort.signal);
      return true;
    } catch (error) {
      if (error.name === "AbortError") announce("Stopped.");
      else if (error instanceof ApiError) toast(error.message);
      else {
        toast("Something on this page failed. The console says what.");
        console.error(error);
      }
      return false;
    } finally {
      this.abort = null;
      running.delete(this);
      this._buttons(false);
    }
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

// For screen readers: promised text alone, never a draft.
export function announce(text) {
  const line = document.createElement("p");
  line.textContent = text;
  const region = $("announce");
  region.append(line);
  while (region.childElementCount > 12) region.firstElementChild.remove();
}

let timer = null;

export function toast(text) {
  const el = $("toast");
  el.textContent = text;
  el.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (el.hidden = true), 8000);
}
