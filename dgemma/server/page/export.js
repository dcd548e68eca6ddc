// A recording as one HTML file that needs nothing else: to send to somebody.
import { notify } from "./run.js";

const MODULES = ["dom.js", "canvas.js", "recording.js"];
const PLAYER = `
const { frames, text, title } = JSON.parse($("data").textContent);
const recording = new Recording();
recording.frames = frames;
recording.text = text;
$("asked").textContent = title;
const view = new CanvasView("canvas prose");
const scrubber = new Scrubber(recording, (frame) => view.draw(frame.draft, recording.before(frame)), () => view.settle(text));
$("stage").append(scrubber.el, view.el);
scrubber.toggle();
document.addEventListener("keydown", (event) => stepByKey(event));
`;

export async function exportReplay(tab, recording, title) {
  try {
    const page = await build(recording, title);
    const url = URL.createObjectURL(new Blob([page], { type: "text/html" }));
    const link = document.createElement("a");
    link.href = url;
    link.download = "dgemma-replay.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  } catch (error) {
    notify(tab, "The replay could not be written.");
    console.error(error);
  }
}

async function build(recording, title) {
  const texts = await Promise.all(["style.css", ...MODULES].map(async (name) => (await fetch(`/page/${name}`)).text()));
  const [style, ...modules] = texts;
  const script = modules.map((text) => text.replace(/^import .*$/gm, "").replace(/^export /gm, "")).join("\n") + PLAYER;
  const round = (frame) => ({ ...frame, draft: { ...frame.draft, entropy: frame.draft.entropy.map((nats) => (nats === null ? null : Math.round(nats * 100) / 100)) } });
  const data = JSON.stringify({ frames: recording.frames.map(round), text: recording.text, title });
  const nonce = crypto.getRandomValues(new Uint32Array(4)).join("");
  const policy = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'nonce-${nonce}'; base-uri 'none'`;
  return [
    "<!doctype html>",
    '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
    `<meta http-equiv="content-security-policy" content="${policy}"><title>dgemma: a replay</title>`,
    `<style nonce="${nonce}">${style.replaceAll("</", "<\\/")}</style></head>`,
    '<body class="replay"><main><p class="asked" id="asked"></p><div id="stage" class="staged"></div></main>',
    // No "<" is left in the data, so that nothing in it can end the element.
    `<script type="application/json" id="data">${data.replaceAll("<", "\\u003c")}</script>`,
    `<script type="module" nonce="${nonce}">${script.replaceAll("</", "<\\/")}</script></body></html>`,
  ].join("\n");
}
