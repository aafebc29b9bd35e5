// The conversation: what is sent, what comes back, what is kept.

import { MessageView, grow, milliseconds, tokensPerSecond } from "./message.js";
import { call, events } from "./server.js";

const $ = (id) => document.getElementById(id);

/** Fields of a request that have a field on the page, and how their text is read. */
const SAMPLING = {
  temperature: Number,
  top_p: Number,
  top_k: Number,
  min_p: Number,
  max_tokens: Number,
  seed: Number,
};

const STARTERS = [
  "Explain how a bicycle stays upright, in three short paragraphs.",
  "Write a Python function that merges two sorted lists, with a test.",
  "List five uses of a paper clip, from plain to absurd.",
];

export class Chat {
  constructor({ notify, model }) {
    this.notify = notify;
    this.model = model;
    this.messages = [];
    this.views = new Map();
    this.running = null;
    this.restore();
    this.listen();
    this.redraw();
  }

  listen() {
    const prompt = $("prompt");
    prompt.addEventListener("input", () => grow(prompt));
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
    const options = $("options");
    options.addEventListener("input", () => this.saveOptions());
    options.addEventListener("reset", () => setTimeout(() => this.saveOptions()));
    options.addEventListener("submit", (event) => event.preventDefault());
    // Whoever leaves in the middle of an answer finds what had come of it.
    addEventListener("pagehide", () => this.save());
    $("scroll").addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = $("scroll");
      this.follows = scrollHeight - scrollTop - clientHeight < FOLLOW_PX;
    });
    for (const text of STARTERS) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => this.ask(text));
      const item = document.createElement("li");
      item.append(button);
      $("starters").append(item);
    }
  }

  submit() {
    const field = $("prompt");
    const text = field.value.trim();
    if (!text || this.running) return;
    field.value = "";
    grow(field);
    this.ask(text);
  }

  /** Adds a message of the user's and gets the answer. */
  ask(text) {
    if (this.running) return;
    this.messages.push({ role: "user", content: text });
    this.answer();
  }

  edit(message, text) {
    if (this.running) return this.notify("Stop the answer first.");
    this.messages.length = this.messages.indexOf(message);
    this.ask(text);
  }

  again(message) {
    if (this.running) return this.notify("Stop the answer first.");
    this.messages.length = this.messages.indexOf(message);
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.save();
    this.redraw();
    $("prompt").focus();
  }

  async answer() {
    const { fields, wrong } = this.readOptions();
    const message = { role: "assistant", content: "", live: true };
    const body = {
      ...(this.model() ? { model: this.model() } : {}),
      messages: this.conversation(),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...fields,
    };
    this.messages.push(message);
    this.running = new AbortController();
    this.follows = true;
    this.redraw();
    this.setRunning(true);
    this.save();
    try {
      if (wrong) throw new Error(wrong);
      await this.stream(message, body, this.running.signal);
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else message.error = error.message;
    }
    delete message.live;
    this.running = null;
    this.setRunning(false);
    this.view(message)?.show();
    this.scroll();
    this.save();
    this.totals();
    $("said").textContent = message.error ?? (message.stopped ? "Stopped." : "The answer is complete.");
  }

  async stream(message, body, signal) {
    const start = performance.now();
    const stats = (message.stats = {});
    const response = await call("v1/chat/completions", { body, signal });
    let done = false;
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        done = true;
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
      const choice = chunk.choices?.[0];
      if (takeDelta(message, choice?.delta ?? {})) {
        const now = performance.now() - start;
        stats.ttft_ms ??= now;
        stats.all_ms = now;
      }
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      if (chunk.usage) takeUsage(stats, chunk.usage);
      this.showSoon(message);
    }
    if (!done) throw new Error("The connection ended before the answer did.");
  }

  /** At most once a frame: a fast model sends several pieces in one. */
  showSoon(message) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.view(message)?.show();
      this.scroll();
    });
  }

  /** What the model is sent: no errors, no reasoning, no empty answers. */
  conversation() {
    const system = $("options").elements.system.value.trim();
    const said = this.messages.filter(({ content }) => content);
    const messages = said.map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  /** The settings that are filled in; the first one that is no number is named. */
  readOptions() {
    const fields = {};
    let wrong;
    for (const [name, read] of Object.entries(SAMPLING)) {
      const field = $("options").elements[name];
      const text = field.value.trim().replace(",", ".");
      const value = read(text);
      const bad = text !== "" && !Number.isFinite(value);
      field.setAttribute("aria-invalid", String(bad));
      if (bad) wrong ??= `${name}: “${text}” is not a number.`;
      else if (text !== "") fields[name] = value;
    }
    return { fields, wrong };
  }

  setRunning(running) {
    $("send").hidden = running;
    $("stop").hidden = !running;
    $("messages").setAttribute("aria-busy", String(running));
    if (running) $("said").textContent = "Answering.";
  }

  view(message) {
    return this.views.get(message);
  }

  /** Elements for the messages that are there, in order. */
  redraw() {
    const acts = { edit: (m, text) => this.edit(m, text), again: (m) => this.again(m) };
    for (const message of [...this.views.keys()]) {
      if (!this.messages.includes(message)) {
        this.views.get(message).node.remove();
        this.views.delete(message);
      }
    }
    for (const message of this.messages) {
      if (this.views.has(message)) continue;
      const view = new MessageView(message, acts);
      this.views.set(message, view);
      $("messages").append(view.node);
    }
    $("empty").hidden = this.messages.length > 0;
    this.totals();
    this.scroll();
  }

  scroll() {
    if (this.follows) $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  /** What the whole conversation took. */
  totals() {
    const all = this.messages.map(({ stats }) => stats).filter((stats) => stats?.tokens !== undefined);
    const last = all.at(-1);
    const speed = last && tokensPerSecond(last);
    const rows = last
      ? [
          ["Generated", `${sum(all, "tokens")} tokens`],
          ["Context now", `${(last.prompt ?? 0) + last.tokens} tokens`],
          ["From the cache", `${sum(all, "cached")} of ${sum(all, "prompt")}`],
          ["Last answer", speed ? `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s` : "–"],
          ["First token", last.ttft_ms === undefined ? "–" : milliseconds(last.ttft_ms)],
        ]
      : [];
    $("totals").replaceChildren(
      ...rows.flatMap(([name, value]) => {
        const [term, text] = [document.createElement("dt"), document.createElement("dd")];
        term.textContent = name;
        text.textContent = value;
        return [term, text];
      }),
    );
  }

  save() {
    try {
      const kept = this.messages.map(({ live, ...message }) => message);
      localStorage.setItem("atom.conversation", JSON.stringify(kept));
    } catch {
      this.notify("The browser has no room left for this conversation; it is not kept.");
    }
  }

  saveOptions() {
    this.readOptions();
    const values = Object.fromEntries(new FormData($("options")));
    try {
      localStorage.setItem("atom.options", JSON.stringify(values));
    } catch {
      // Settings that are not kept are still used.
    }
  }

  restore() {
    try {
      const kept = JSON.parse(localStorage.getItem("atom.conversation") ?? "[]");
      const sound = ({ role, content }) => (role === "user" || role === "assistant") && typeof content === "string";
      this.messages = Array.isArray(kept) ? kept.filter(sound) : [];
      const values = JSON.parse(localStorage.getItem("atom.options") ?? "{}");
      for (const [name, value] of Object.entries(values)) {
        const field = $("options").elements[name];
        if (field) field.value = value;
      }
    } catch {
      this.messages = [];
    }
    this.follows = true;
  }
}

/** Adds a piece of an answer; true if there was anything in it. */
function takeDelta(message, delta) {
  const text = delta.content ?? "";
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  const calls = delta.tool_calls ?? [];
  message.content += text;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  for (const part of calls) {
    const tools = (message.tools ??= []);
    const tool = (tools[part.index ?? tools.length] ??= { name: "", arguments: "" });
    tool.name += part.function?.name ?? "";
    tool.arguments += part.function?.arguments ?? "";
  }
  return Boolean(text || thought || calls.length);
}

function takeUsage(stats, usage) {
  stats.prompt = usage.prompt_tokens ?? stats.prompt;
  stats.tokens = usage.completion_tokens ?? stats.tokens;
  stats.cached = usage.prompt_tokens_details?.cached_tokens ?? stats.cached;
}

function sum(list, field) {
  return list.reduce((total, stats) => total + (stats[field] ?? 0), 0);
}

/** A reader who has scrolled up by more is not pulled down by what comes. */
const FOLLOW_PX = 60;
