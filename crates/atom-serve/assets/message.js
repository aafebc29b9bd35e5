// One message of the conversation as it is shown.

import { copyText, render } from "./markdown.js";

/** The element of a message. `acts` has what its buttons do: `edit(text)`, `again()`. */
export class MessageView {
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.node = make("article", `message ${message.role}`);
    this.node.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    if (message.role === "user") {
      this.body = make("div", "body");
      this.node.append(this.body, this.buttons([["Edit", () => this.edit()], ["Copy", this.copy]]));
    } else {
      this.reasoning = this.fold("Reasoning", "reasoning");
      this.tools = make("div", "tool-calls");
      this.body = make("div", "body markdown");
      this.error = make("p", "error");
      this.stats = make("span", "stats");
      const foot = make("footer");
      foot.append(this.stats, this.buttons([["Regenerate", () => acts.again(message)], ["Copy", this.copy]]));
      this.node.append(this.reasoning.box, this.body, this.tools, this.error, foot);
    }
    this.show();
  }

  /** Brings the element to what the message is now. */
  show() {
    const { message } = this;
    if (message.role === "user") {
      this.body.textContent = message.content;
      return;
    }
    this.node.classList.toggle("live", Boolean(message.live));
    this.node.setAttribute("aria-busy", String(Boolean(message.live)));
    this.reasoning.box.hidden = !message.reasoning;
    if (message.reasoning) {
      this.reasoning.text.textContent = message.reasoning;
      this.reasoning.name.textContent = message.live && !message.content ? "Reasoning …" : "Reasoning";
    }
    render(this.body, message.content);
    this.showTools(message.tools ?? []);
    this.error.hidden = !message.error;
    this.error.textContent = message.error ?? "";
    this.stats.textContent = figures(message);
  }

  showTools(tools) {
    tools.forEach((tool, at) => {
      const fold = (this.folds ??= [])[at] ?? (this.folds[at] = this.fold("", "tool"));
      fold.name.textContent = `Tool call: ${tool.name || "…"}`;
      fold.text.textContent = tool.arguments;
      if (!fold.box.isConnected) this.tools.append(fold.box);
    });
  }

  /** A part that is folded away until somebody wants it. */
  fold(name, kind) {
    const box = make("details", kind);
    const summary = make("summary");
    summary.textContent = name;
    const text = make("pre");
    box.append(summary, text);
    return { box, name: summary, text };
  }

  buttons(list) {
    const box = make("span", "acts");
    for (const [label, act] of list) {
      const button = make("button", "quiet");
      button.type = "button";
      button.textContent = label;
      button.addEventListener("click", () => act.call(this, button));
      box.append(button);
    }
    return box;
  }

  copy(button) {
    copyText(button, this.message.content);
  }

  /** Puts the user's own text into a field in place; what followed it is asked again. */
  edit() {
    if (this.field) return this.field.focus();
    this.field = make("textarea");
    this.field.value = this.message.content;
    this.field.setAttribute("aria-label", "Edit the message");
    const end = () => {
      this.field.remove();
      choice.remove();
      this.field = null;
      this.node.classList.remove("editing");
    };
    const send = () => {
      const text = this.field.value.trim();
      end();
      if (text) this.acts.edit(this.message, text);
    };
    const choice = this.buttons([["Send again", send], ["Cancel", end]]);
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.node.classList.add("editing");
    this.node.append(this.field, choice);
    this.field.focus();
    grow(this.field);
    this.field.addEventListener("input", () => grow(this.field));
  }
}

/** Makes a text field as high as its text, as far as the style lets it. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

/** Counts and speeds in one line. */
function figures({ stats, finish, stopped }) {
  if (!stats) return stopped ? "stopped" : "";
  const parts = [];
  if (stats.prompt !== undefined) {
    parts.push(`${stats.prompt} prompt${stats.cached ? ` (${stats.cached} cached)` : ""}`);
  }
  if (stats.tokens !== undefined) parts.push(`${stats.tokens} tokens`);
  if (stats.ttft_ms !== undefined) parts.push(`first after ${milliseconds(stats.ttft_ms)}`);
  const speed = tokensPerSecond(stats);
  if (speed !== undefined) parts.push(`${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`);
  if (stopped) parts.push("stopped");
  else if (finish === "length") parts.push("cut at max tokens");
  else if (finish && finish !== "stop") parts.push(finish);
  return parts.join(" · ");
}

/** From the first token to the last one. */
export function tokensPerSecond({ tokens, ttft_ms, all_ms }) {
  if (!(tokens > 1) || !(all_ms - ttft_ms > SPAN_MS_MIN)) return undefined;
  return ((tokens - 1) / (all_ms - ttft_ms)) * 1000;
}

/** What came in a shorter time may have come as one piece of network, and its speed says nothing. */
const SPAN_MS_MIN = 50;

export function milliseconds(value) {
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`;
}

function make(tag, kind) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  return node;
}
