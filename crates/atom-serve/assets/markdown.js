// A little Markdown, made of elements and text nodes only: nothing that a model says is ever parsed as HTML.

const keys = new WeakMap();

/** Shows `source` in `root`; blocks that did not change since the last call stay as they are. */
export function render(root, source, depth = 0) {
  const blocks = parse(source);
  blocks.forEach((block, at) => {
    const key = JSON.stringify(block);
    const old = root.childNodes[at];
    if (old && keys.get(old) === key) return;
    const node = element(block, depth);
    keys.set(node, key);
    if (old) old.replaceWith(node);
    else root.append(node);
  });
  while (root.childNodes.length > blocks.length) root.lastChild.remove();
}

/** The beginning of a block of code, also within a list, which it ends. */
const FENCE = /^(\s*)(```+|~~~+)\s*([^\s`]*)/;

/** Blocks of a text: code, headings, lists, quotes, tables, rules and paragraphs. */
export function parse(source) {
  const lines = source.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const [, indent, mark, language] = fence;
      const text = [];
      at += 1;
      while (at < lines.length && !lines[at].trimStart().startsWith(mark)) {
        text.push(lines[at].startsWith(indent) ? lines[at].slice(indent.length) : lines[at]);
        at += 1;
      }
      at += 1;
      blocks.push({ kind: "code", language, text: text.join("\n") });
    } else if (line.trim() === "") {
      at += 1;
    } else if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) {
      blocks.push({ kind: "rule" });
      at += 1;
    } else if (/^#{1,6} /.test(line)) {
      const level = line.indexOf(" ");
      blocks.push({ kind: "heading", level, text: line.slice(level + 1).replace(/ #+ *$/, "") });
      at += 1;
    } else if (line.startsWith(">")) {
      at = gather(lines, at, (l) => l.startsWith(">"), (text) => {
        blocks.push({ kind: "quote", text: text.map((l) => l.replace(/^> ?/, "")).join("\n") });
      });
    } else if (isTable(lines, at)) {
      at = gather(lines, at, (l) => l.includes("|"), (text) => {
        const rows = text.filter((_, row) => row !== 1).map(cells);
        blocks.push({ kind: "table", rows });
      });
    } else if (item(line)) {
      at = list(lines, at, blocks);
    } else {
      at = gather(lines, at, (l) => !endsParagraph(l), (text) => {
        blocks.push({ kind: "text", text: text.join("\n") });
      });
    }
  }
  return blocks;
}

function gather(lines, at, belongs, take) {
  const from = at;
  do at += 1;
  while (at < lines.length && lines[at].trim() !== "" && belongs(lines[at]));
  take(lines.slice(from, at));
  return at;
}

function endsParagraph(line) {
  return FENCE.test(line) || /^(#{1,6} |>)/.test(line) || item(line) !== null;
}

function item(line) {
  const match = /^( *)([-*+]|(\d{1,9})[.)]) +(.*)$/.exec(line);
  if (!match) return null;
  return { depth: match[1].length, number: match[3] === undefined ? null : Number(match[3]), text: match[4] };
}

/** Items with their indentation; lines that are indented go on with the item before them. */
function list(lines, at, blocks) {
  const items = [];
  const ordered = item(lines[at]).number !== null;
  while (at < lines.length) {
    const next = item(lines[at]);
    if (FENCE.test(lines[at])) break;
    if (next) {
      if (next.depth < 2 && (next.number !== null) !== ordered) break;
      items.push(next);
    } else if (lines[at].trim() === "") {
      const after = lines[at + 1] ?? "";
      if (!item(after) && !after.startsWith("  ")) break;
    } else if (lines[at].startsWith("  ")) {
      items.at(-1).text += `\n${lines[at].trim()}`;
    } else {
      break;
    }
    at += 1;
  }
  blocks.push({ kind: "list", items });
  return at;
}

function isTable(lines, at) {
  return lines[at].includes("|") && /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/.test(lines[at + 1] ?? "");
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

const QUOTES_DEEP_MAX = 8;

function element(block, depth) {
  switch (block.kind) {
    case "code":
      return code(block);
    case "rule":
      return document.createElement("hr");
    case "heading":
      // Below the page's own headings.
      return inline(document.createElement(`h${Math.min(block.level + 2, 6)}`), block.text);
    case "quote": {
      const quote = document.createElement("blockquote");
      // A model that writes nothing but ">" would fill the stack.
      if (depth < QUOTES_DEEP_MAX) render(quote, block.text, depth + 1);
      else quote.textContent = block.text;
      return quote;
    }
    case "table":
      return table(block.rows);
    case "list":
      return nested(block.items);
    default:
      return inline(document.createElement("p"), block.text);
  }
}

function code({ language, text }) {
  const figure = document.createElement("figure");
  figure.className = "code";
  const head = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "code";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "quiet";
  copy.textContent = "Copy";
  copy.addEventListener("click", () => copyText(copy, text));
  head.append(name, copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", `${language || "code"} block`);
  const body = document.createElement("code");
  body.textContent = text;
  pre.append(body);
  figure.append(head, pre);
  return figure;
}

/** Puts text on the clipboard and says so on the button. */
export async function copyText(button, text) {
  const label = button.textContent;
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Over plain http from another machine a page has no clipboard.
    said = "No clipboard";
  }
  button.textContent = said;
  setTimeout(() => (button.textContent = label), 1500);
}

function table(rows) {
  const box = document.createElement("div");
  box.className = "wide-table";
  const node = document.createElement("table");
  rows.forEach((row, at) => {
    const line = node.insertRow();
    for (const cell of row) line.append(inline(document.createElement(at ? "td" : "th"), cell));
  });
  box.append(node);
  return box;
}

function nested(items) {
  const make = ({ number }) => {
    const node = document.createElement(number === null ? "ul" : "ol");
    if (number !== null && number !== 1) node.start = number;
    return node;
  };
  const root = make(items[0]);
  const open = [{ depth: items[0].depth, node: root }];
  for (const next of items) {
    while (open.length > 1 && next.depth < open.at(-1).depth) open.pop();
    const last = open.at(-1).node.lastElementChild;
    if (next.depth > open.at(-1).depth + 1 && last) {
      const node = make(next);
      last.append(node);
      open.push({ depth: next.depth, node });
    }
    open.at(-1).node.append(inline(document.createElement("li"), next.text));
  }
  return root;
}

const SPAN =
  /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]+)\*(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s()]+)\)/gs;

/** Beyond this a paragraph is shown as it is: looking for pairs in it takes the square of its length. */
const INLINE_CHARS_MAX = 20000;

function inline(parent, text) {
  if (text.length > INLINE_CHARS_MAX) {
    parent.append(text);
    return parent;
  }
  let from = 0;
  for (const match of text.matchAll(SPAN)) {
    parent.append(text.slice(from, match.index));
    from = match.index + match[0].length;
    const [, , code, strong, emphasis, label, address] = match;
    parent.append(span(code, strong, emphasis, label, address));
  }
  parent.append(text.slice(from));
  return parent;
}

function span(code, strong, emphasis, label, address) {
  if (code !== undefined) {
    const node = document.createElement("code");
    node.textContent = code;
    return node;
  }
  if (address !== undefined) {
    const node = document.createElement("a");
    node.href = address;
    node.rel = "noopener noreferrer";
    node.target = "_blank";
    node.textContent = label;
    return node;
  }
  return inline(document.createElement(strong === undefined ? "em" : "strong"), strong ?? emphasis);
}
