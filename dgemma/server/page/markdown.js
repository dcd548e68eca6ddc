// Markdown as elements: the part of it that models write. Text stays text; nothing is parsed as markup.
import { button, h } from "./dom.js";

const MAX_DEPTH = 6, MAX_INLINE = 20_000; // beyond these a text is shown as it is
const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S)/;
const DASHES = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
const CODE = /(^|\n)(def |class |import |from \w+ import |    \S)/;
const INLINE = /(`+)([^`]+)\1(?!`)|\*\*(\S(?:[^*]*[^\s*])?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|(?<![\w_])_([^\s_](?:[^_]*[^\s_])?)_(?![\w_])|~~([^\s~](?:[^~]*[^\s~])?)~~|!?\[([^\]\n]+)\]\(([^()\s]+)\)|\\([\\`*_{}[\]()#+.!|>~-])/g;
const WEB = /^(https?:\/\/|mailto:)/i;

// A whole answer: JSON and bare code keep their columns, all else is read as Markdown.
export function render(text) {
  const isFenced = /^\s{0,3}(```|~~~)/m.test(text);
  if (!isFenced && isJson(text)) return codeBlock(text, "json");
  if (!isFenced && CODE.test(text)) return codeBlock(text, "");
  return h("div", { class: "prose" }, ...blocks(text.split("\n"), 0));
}

function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
}

export function codeBlock(text, language) {
  const code = h("code", {}, text);
  const copied = async (event) => {
    await navigator.clipboard?.writeText(text).catch(() => {});
    event.target.textContent = "Copied";
  };
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language), button("Copy", copied, "copy-code")), h("pre", { tabindex: "0" }, code));
}

function blocks(lines, depth) {
  if (depth > MAX_DEPTH) return [h("p", {}, lines.join("\n"))];
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const [element, next] = block(lines, at, depth);
    if (element) found.push(element);
    at = next;
  }
  return found;
}

// The block that begins at a line, and the line after it.
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [h(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (QUOTE.test(line)) {
    const end = until(lines, at, (other) => !QUOTE.test(other));
    return [h("blockquote", {}, ...blocks(lines.slice(at, end).map((one) => one.replace(QUOTE, "")), depth + 1)), end];
  }
  if (ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && DASHES.test(lines[at + 1] ?? "")) return table(lines, at);
  const end = until(lines, at + 1, (other) => !other.trim() || FENCE.test(other) || HEADING.test(other) || QUOTE.test(other) || ITEM.test(other));
  return [h("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

function until(lines, at, isEnd) {
  while (at < lines.length && !isEnd(lines[at])) at += 1;
  return at;
}

function fenced(lines, at, [, mark, language]) {
  const end = until(lines, at + 1, (other) => other.trim().startsWith(mark) && /^[`~]+$/.test(other.trim()));
  return [codeBlock(lines.slice(at + 1, end).join("\n"), language), end + 1];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]), isNumbered = /\d/.test(mark), items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== isNumbered) break;
    // What is indented further belongs to the item; a blank line does if such a line follows it.
    const isInside = (line) => /^\s*/.exec(line)[0].length > indent.length;
    let end = at + 1;
    while (end < lines.length && (isInside(lines[end]) || (!lines[end].trim() && isInside(lines[end + 1] ?? "")))) end += 1;
    const own = [lines[at].slice(item[0].length), ...lines.slice(at + 1, end).map((line) => line.slice(Math.min(item[0].length, /^\s*/.exec(line)[0].length)))];
    const inner = blocks(own, depth + 1);
    items.push(h("li", {}, ...(inner.length && inner[0].nodeName === "P" ? [...inner[0].childNodes, ...inner.slice(1)] : inner)));
    at = end;
    if (!lines[at]?.trim() && ITEM.exec(lines[at + 1] ?? "")?.[1].length === indent.length) at += 1;
  }
  return [h(isNumbered ? "ol" : "ul", isNumbered ? { start: Number.parseInt(mark, 10) } : {}, ...items), at];
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (tag, line) => h("tr", {}, ...cells(line).map((cell) => h(tag, {}, ...inline(cell))));
  const end = until(lines, at + 2, (other) => !other.includes("|"));
  const body = lines.slice(at + 2, end).map((line) => row("td", line));
  return [h("div", { class: "table" }, h("table", {}, h("thead", {}, row("th", lines[at])), h("tbody", {}, ...body))), end];
}

function inline(text) {
  if (text.length > MAX_INLINE) return [text];
  const found = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    found.push(text.slice(at, match.index), span(match));
    at = match.index + match[0].length;
  }
  return [...found, text.slice(at)].filter((part) => part !== "");
}

function span([whole, , code, strong, em, em2, struck, label, address, escaped]) {
  if (code !== undefined) return h("code", {}, code);
  if (strong !== undefined) return h("strong", {}, ...inline(strong));
  if (em !== undefined || em2 !== undefined) return h("em", {}, ...inline(em ?? em2));
  if (struck !== undefined) return h("s", {}, struck);
  if (escaped !== undefined) return escaped;
  return WEB.test(address) ? h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, label) : whole;
}
