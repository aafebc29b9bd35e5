// The live view of the group: a stream of steps, figures of the last ones, the picture, and the table.

import { Lanes } from "./lanes.js";
import { milliseconds } from "./message.js";
import { call, events } from "./server.js";

const $ = (id) => document.getElementById(id);

export class Group {
  constructor() {
    this.lanes = new Lanes($("lanes"), (step, selected) => this.detail(step, selected));
    this.now = new Map(); // lane -> { doing, step }
    this.frozen = false;
    this.said = "";
    $("freeze").addEventListener("click", () => {
      this.freeze(!this.frozen);
      if (this.frozen) return;
      // What came meanwhile is fetched with all that is kept.
      this.stop();
      this.start();
    });
  }

  /** Watches until told otherwise; a stream that breaks is opened again. */
  async start() {
    if (this.watching) return;
    this.watching = new AbortController();
    const { signal } = this.watching;
    this.lanes.draw();
    this.detail(null);
    while (!signal.aborted) {
      try {
        const response = await call("debug/steps", { signal });
        this.say("");
        this.forget();
        for await (const data of events(response)) this.take(JSON.parse(data));
      } catch (error) {
        if (signal.aborted) return;
        this.say(error.message);
        if (error.status === 401) break;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    // Another one may have begun meanwhile.
    if (this.watching?.signal === signal) this.watching = null;
  }

  stop() {
    this.watching?.abort();
    this.watching = null;
  }

  freeze(frozen) {
    this.frozen = frozen;
    $("freeze").setAttribute("aria-pressed", String(frozen));
    $("freeze").textContent = frozen ? "Go on" : "Freeze";
  }

  /** A new stream begins with all that is kept. */
  forget() {
    this.lanes.groups.clear();
    this.now.clear();
  }

  take(frame) {
    if (frame.fields) [this.fields, this.limits] = [frame.fields, frame.limits];
    const steps = frame.steps.map((values) => Object.fromEntries(this.fields.map((name, at) => [name, values[at]])));
    if (this.frozen) return;
    for (const { lane, doing } of frame.lanes) this.now.set(lane, { ...this.now.get(lane), doing });
    for (const step of steps) this.now.set(step.lane, { ...this.now.get(step.lane), step });
    this.lanes.know(frame.lanes);
    this.lanes.add(steps);
    this.figures();
    this.table();
    if (!this.lanes.selected) this.detail(null);
  }

  /** Figures over what is shown. */
  figures() {
    const steps = [...this.lanes.shown()];
    const total = (field) => steps.reduce((sum, step) => sum + step[field], 0);
    const [bucket, decode, prefill] = ["bucket_rows", "decode_rows", "prefill_rows"].map(total);
    const held = steps.filter((step) => step.is_held).length;
    const now = [...this.now.values()].map(({ step }) => step).filter(Boolean);
    const of = (field) => now.reduce((sum, step) => sum + step[field], 0);
    const share = (part, whole) => (whole ? `${((part / whole) * 100).toFixed(1)} %` : "–");
    tiles($("tiles"), [
      ["Steps a second", rate(steps)],
      ["Replay, median", steps.length ? milliseconds(median(steps, "replay_us") / 1000) : "–"],
      ["Wait, median", steps.length ? micros(median(steps, "wait_us")) : "–"],
      ["Decode rows", share(decode, bucket)],
      ["Prompt rows", share(prefill, bucket)],
      ["Padding", share(bucket - decode - prefill, bucket)],
      ["Held prompts", share(held, steps.length)],
      ["Running", of("running")],
      ["Queue", of("waiting")],
      ["Cache", now.length ? `${(of("kv_per_mille") / now.length / 10).toFixed(1)} %` : "–"],
    ]);
  }

  table() {
    const body = $("rows");
    const lanes = [...this.now.entries()].sort(([a], [b]) => a - b);
    while (body.rows.length > lanes.length) body.deleteRow(-1);
    lanes.forEach(([lane, { doing, step }], at) => {
      const row = body.rows[at] ?? body.insertRow();
      const values = step
        ? [
            step.step,
            step.bucket_rows,
            step.decode_rows,
            step.prefill_rows,
            step.bucket_rows - step.decode_rows - step.prefill_rows,
            micros(step.wait_us),
            micros(step.replay_us),
            step.running,
            step.waiting ? `${step.waiting} (${milliseconds(step.oldest_wait_ms)})` : 0,
            `${(step.kv_per_mille / 10).toFixed(1)} %`,
          ]
        : Array(10).fill("–");
      [lane, doing ?? "–", ...values].forEach((value, place) => {
        const cell = row.cells[place] ?? row.insertCell();
        const text = String(value);
        if (cell.textContent !== text) cell.textContent = text;
      });
      row.cells[11].style.setProperty("--share", step ? `${step.kv_per_mille / 10}%` : "0%");
    });
  }

  detail(step, selected) {
    $("step").textContent = this.said || (step ? sentence(step) : this.advice(selected));
  }

  /** What to say where no step is. */
  advice(selected) {
    if (selected) return `lane ${selected.lane} has not told of this step`;
    const isIdle = this.now.size && [...this.now.values()].every(({ step }) => !step);
    return isIdle
      ? "No step yet: the lanes are parked until somebody asks something."
      : "Point at a step, or focus the picture and use the arrow keys.";
  }

  say(text) {
    this.said = text;
    this.detail(null);
  }
}

/** A step in one line. */
function sentence(step) {
  const padding = step.bucket_rows - step.decode_rows - step.prefill_rows;
  return [
    `lane ${step.lane}, step ${step.step}${step.epoch > 1 ? ` of epoch ${step.epoch}` : ""}`,
    `bucket ${step.bucket_rows}`,
    `${step.decode_rows} decode + ${step.prefill_rows} prompt + ${padding} padding`,
    `waited ${micros(step.wait_us)}, replayed ${micros(step.replay_us)}`,
    `${step.running} running, ${step.waiting} waiting`,
    `cache ${(step.kv_per_mille / 10).toFixed(1)} %`,
    ...(step.is_held ? ["prompts held for other lanes"] : []),
  ].join(" · ");
}

/** Terms and their values, in place. */
function tiles(list, pairs) {
  while (list.children.length < pairs.length) {
    const box = document.createElement("div");
    box.append(document.createElement("dt"), document.createElement("dd"));
    list.append(box);
  }
  pairs.forEach(([name, value], at) => {
    const [term, text] = list.children[at].children;
    if (term.textContent !== name) term.textContent = name;
    if (text.textContent !== String(value)) text.textContent = value;
  });
}

/** Of one lane, while it took steps: pauses are not counted. */
function rate(steps) {
  const times = steps.filter(({ lane }) => lane === steps[0].lane).map(({ at_us }) => at_us);
  let [busy, count] = [0, 0];
  for (let at = 1; at < times.length; at += 1) {
    const gap = times[at] - times[at - 1];
    if (gap > PAUSE_US) continue;
    busy += gap;
    count += 1;
  }
  return busy ? Math.round((count / busy) * 1e6) : "–";
}

function median(steps, field) {
  const values = steps.map((step) => step[field]).sort((a, b) => a - b);
  return values[Math.floor(values.length / 2)];
}

function micros(value) {
  return value < 1000 ? `${value} µs` : milliseconds(value / 1000);
}

/** Between steps this far apart nobody had work. */
const PAUSE_US = 500_000;
const RETRY_MS = 2000;
