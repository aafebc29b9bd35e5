// Requests to the server that this page came from, and the events that it streams.

/** What the server said, in its own words. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The API key, for as long as the tab lives. */
export const apiKey = {
  read: () => sessionStorage.getItem("atom.key") ?? "",
  write: (key) => (key ? sessionStorage.setItem("atom.key", key) : sessionStorage.removeItem("atom.key")),
};

/** Sends a request; whatever is not a success is thrown with the server's message. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const key = apiKey.read();
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server can't be reached.", 0);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text.trim();
  try {
    const value = JSON.parse(text);
    message = value.error?.message ?? value.reason ?? message;
  } catch {
    // A proxy's page: shown as it is, up to a line.
  }
  const error = new ServerError(message.slice(0, 500) || `HTTP ${response.status}`, response.status);
  if (response.status === 401) dispatchEvent(new CustomEvent("key-needed"));
  return error;
}

/** The data of each event of a stream (the HTML standard's server-sent events). */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Cuts text into events, wherever the network cut it before. */
export class EventParser {
  #rest = "";
  #data = [];

  push(text) {
    const found = [];
    this.#rest += text;
    // A carriage return at the end may be half of a line's end.
    const whole = this.#rest.endsWith("\r") ? this.#rest.slice(0, -1) : this.#rest;
    const lines = whole.split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + this.#rest.slice(whole.length);
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
      // Comments keep the connection alive; no other field is used here.
    }
    return found;
  }
}
