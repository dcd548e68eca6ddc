// The server's API: one request, its events, its errors, the key.
import { $ } from "./dom.js";

const KEY = "dgemma.key";

export class ApiError extends Error {}

export async function get(path) {
  return (await ask("GET", path)).json();
}

export async function post(path, body) {
  return (await ask("POST", path, body)).json();
}

// Each event of a stream as an object; the signal ends it, and the server stops at once.
export async function* stream(path, body, signal) {
  const response = await ask("POST", path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        if (part === "data: [DONE]") return;
        const event = JSON.parse(part.slice(6));
        if (event.error) throw new ApiError(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function ask(method, path, body, signal) {
  for (;;) {
    const headers = body ? { "content-type": "application/json" } : {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer. Is it still running?");
    }
    if (response.ok) return response;
    if (response.status === 401 && (await askForKey())) continue;
    throw new ApiError(await reason(response));
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server says ${response.status}.`;
  }
}

function askForKey() {
  const dialog = $("login");
  return new Promise((resolve) => {
    $("key").value = "";
    $("login-cancel").onclick = () => dialog.close("cancel");
    $("login-form").onsubmit = () => sessionStorage.setItem(KEY, $("key").value.trim());
    dialog.onclose = () => resolve(dialog.returnValue !== "cancel" && $("key").value !== "");
    dialog.returnValue = "";
    if (!dialog.open) dialog.showModal();
  });
}
