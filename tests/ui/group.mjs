// The live view: lanes, steps and figures move while requests run, and can be read without seeing the picture.

import assert from "node:assert/strict";

const WORDS = "the river runs past old stone walls and under a bridge where nobody has stood since morning".split(" ");

/** Clients that ask again when they are answered, so that prompts come while others decode. */
const CLIENTS = 10;
/** More than a lane keeps. */
const COLUMNS = 300;

export async function checkGroup({ open, url, shots }) {
  const page = await open({ path: "#group", colorScheme: "dark" });
  const rows = page.locator("#rows tr");
  await page.waitForFunction(() => document.querySelectorAll("#rows tr").length === 4);
  assert.equal(await page.locator("#chat").isVisible(), false);

  const enough = new AbortController();
  const clients = Array.from({ length: CLIENTS }, async (_, client) => {
    for (let turn = client; !enough.signal.aborted; turn += CLIENTS) await complete(url, turn, enough.signal);
  });
  const steps = () => rows.evaluateAll((all) => all.map((row) => Number(row.cells[2].textContent) || 0));
  const before = await steps();
  await page.waitForFunction(
    (before) => [...document.querySelectorAll("#rows tr")].every((row, at) => Number(row.cells[2].textContent) > before[at] + 100),
    before,
  );
  await page.waitForFunction(() => {
    const tile = (name) => [...document.querySelectorAll("#tiles dt")].find((dt) => dt.textContent === name).nextSibling.textContent;
    return Number(tile("Steps a second")) > 0 && Number(tile("Running")) > 0 && /%/.test(tile("Padding"));
  });
  for (const ink of ["decode", "prefill", "padding"]) {
    await page.waitForFunction(
      (ink) => {
        const canvas = document.getElementById("lanes");
        const color = getComputedStyle(document.getElementById(`ink-${ink}`)).backgroundColor;
        const want = color.match(/\d+/g).slice(0, 3).map(Number);
        // A copy is read: the page's own canvas is made for drawing.
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, 0, 0);
        const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
        for (let at = 0; at < data.length; at += 4) {
          if (want.every((value, i) => Math.abs(data[at + i] - value) < 3)) return true;
        }
        return false;
      },
      ink,
    );
  }

  // The picture stands still, and is walked through with the keyboard.
  await page.locator("#freeze").focus();
  await page.keyboard.press("Enter");
  assert.equal(await page.locator("#freeze").getAttribute("aria-pressed"), "true");
  await page.locator("#lanes").focus();
  const detail = () => page.locator("#step").textContent();
  const shape = /^lane (\d+), step (\d+) · bucket (\d+) · (\d+) decode \+ (\d+) prompt \+ (\d+) padding · waited .+, replayed .+/;
  /** Presses a key, and goes left while the lane has not told of the step: lanes are looked at one after another. */
  const press = async (key) => {
    for (let presses = 0; presses < COLUMNS; presses += 1) {
      await page.keyboard.press(presses ? "ArrowLeft" : key);
      const found = shape.exec(await detail());
      if (found) return found.slice(1).map(Number);
    }
    return assert.fail(`no step is told of: ${await detail()}`);
  };
  const newest = await press("ArrowLeft");
  const earlier = await press("ArrowLeft");
  const below = await press("ArrowDown");
  const above = await press("ArrowUp");
  for (const [, , bucket, decode, prompt, padding] of [newest, earlier, below, above]) {
    assert.equal(bucket, decode + prompt + padding);
  }
  assert.deepEqual([newest, earlier, below, above].map(([lane]) => lane), [0, 0, 1, 0]);
  assert.ok(earlier[1] < newest[1], `${newest} / ${earlier}`);
  assert.deepEqual(below.slice(1, 3), above.slice(1, 3), "one step of the group, one bucket");
  // With the mouse, too.
  const box = await page.locator("#lanes").boundingBox();
  await page.mouse.move(box.x + box.width - 40, box.y + 150);
  assert.match(await detail(), /^lane 1/);
  await page.screenshot({ path: `${shots}/page-group.png` });
  await page.mouse.move(box.x + 5, box.y + 5);
  await page.locator("#freeze").click();

  enough.abort();
  await Promise.all(clients);
  await page.waitForFunction(() => [...document.querySelectorAll("#rows tr")].every((row) => row.cells[1].textContent === "parked"));

  // Who does not look does not ask: no stream is open behind another view.
  const gone = page.waitForEvent("requestfailed", (request) => request.url().endsWith("/debug/steps"));
  await page.locator("#tab-group").focus();
  await page.keyboard.press("ArrowLeft");
  await gone;
  assert.ok(await page.locator("#prompt").isVisible());
  const again = page.waitForRequest("**/debug/steps");
  await page.locator("#tab-group").click();
  await again;
}

/** One request that prefills and decodes for a while; it may be given up. */
async function complete(url, at, signal) {
  const prompt = Array.from({ length: 60 + 31 * ((at * 5) % 11) }, (_, word) => WORDS[(word * 7 + at) % WORDS.length]);
  try {
    const response = await fetch(`${url}/v1/completions`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ prompt: prompt.join(" "), max_tokens: 20 + 7 * (at % 7), ignore_eos: true }),
      signal,
    });
    assert.equal(response.status, 200, await response.text());
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}
