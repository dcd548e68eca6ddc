// Pictures for a question: chosen, dropped or pasted, made small, shown as thumbnails.
// They are drawn on <canvas>, so the page's policy needs no exception for data: or blob: images.
import { $, h } from "./dom.js";
import { notify } from "./run.js";

const MAX_SIDE = 1536; // pixels; what is larger is made smaller before it is sent
const AS_THEY_ARE = ["image/png", "image/jpeg"];
const THUMB = 160;

let isAllowed = false, chosen = [];

export function buildPictures() {
  const files = $("picture-files");
  $("picture").addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    take(files.files);
    files.value = "";
  });
  $("question").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  // A file dropped anywhere else would replace the page.
  addEventListener("dragover", (event) => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  });
  addEventListener("drop", (event) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    if (!$("chat").hidden) take(event.dataTransfer.files);
  });
}

// Only a model with a vision tower is shown pictures.
export function allowPictures(isVision) {
  isAllowed = isVision;
  $("picture").hidden = !isVision;
  $("sudoku-picture").hidden = $("sudoku-drop").hidden = !isVision;
}

export const readsPictures = () => isAllowed;

// The pictures of the next question, which leave the field with it.
export function takePictures() {
  const taken = chosen;
  setPictures([]);
  return taken;
}

export function setPictures(urls) {
  chosen = urls;
  $("thumbs").replaceChildren(...urls.map((url, i) => {
    const remove = h("button", { type: "button", class: "icon", "aria-label": `Remove picture ${i + 1}`, onclick: () => setPictures(chosen.filter((_, other) => other !== i)) }, "×");
    return h("span", { class: "chosen" }, thumbnail(url), remove);
  }));
  $("thumbs").hidden = urls.length === 0;
}

async function take(files) {
  if (!isAllowed) {
    notify("chat", "This model reads no pictures; it has no vision tower.");
    return;
  }
  for (const file of files) {
    try {
      setPictures([...chosen, await encode(file)]);
    } catch {
      notify("chat", `The browser cannot read ${file.name || "this file"} as a picture; PNG, JPEG and WebP are known.`);
    }
  }
}

// A data URL of the picture, upright and at most MAX_SIDE wide and high.
export async function encode(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && AS_THEY_ARE.includes(file.type)) return dataUrl(file);
  const surface = draw(picture, scale);
  return surface.toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", 0.92);
}

function draw(picture, scale, surface = document.createElement("canvas")) {
  surface.width = Math.max(1, Math.round(picture.width * scale));
  surface.height = Math.max(1, Math.round(picture.height * scale));
  surface.getContext("2d").drawImage(picture, 0, 0, surface.width, surface.height);
  return surface;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export function thumbnail(url) {
  const surface = h("canvas", { class: "thumb", role: "img", "aria-label": "Picture", width: 1, height: 1 });
  show(url, surface).catch(() => surface.setAttribute("aria-label", "A picture that cannot be read"));
  return surface;
}

async function show(url, surface) {
  const [head, data] = url.split(",");
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes], { type: head.slice(5).split(";")[0] }));
  draw(picture, Math.min(1, (2 * THUMB) / Math.max(picture.width, picture.height)), surface);
}
