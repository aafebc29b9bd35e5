// The page as its users meet it: what they type, what comes back, what they see. Every wait is for something
// that the page or the server says; no time is.
// node page.mjs URL MODULES CHROMIUM SHOTS

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { checkParsers } from "./parsers.mjs";
import { checkGroup } from "./group.mjs";

const [url, modules, executablePath, shots] = process.argv.slice(2);
const { chromium } = createRequire(pathToFileURL(`${modules}/`))("playwright-core");

/** Longer than a starved machine needs, shorter than a hang of the whole suite. */
const PATIENCE_MS = 120_000;
const FRANCE = "What is the capital of France? Answer with one word.";
const ITALY = "What is the capital of Italy? Answer with one word.";

const browser = await chromium.launch({
  executablePath,
  args: process.getuid() === 0 ? ["--no-sandbox"] : [],
});
const troubles = [];
/** What a test provokes is no trouble: Chromium logs every status from 400 on. */
let expected = /^$/;

async function open(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  context.setDefaultTimeout(PATIENCE_MS);
  const page = await context.newPage();
  page.on("console", (message) => {
    const bad = message.type() === "error" || message.type() === "warning";
    if (bad && !expected.test(message.text())) troubles.push(`console: ${message.text()}`);
  });
  page.on("pageerror", (error) => troubles.push(`exception: ${error.stack}`));
  page.on("request", (request) => {
    if (!request.url().startsWith(`${url}/`)) troubles.push(`a request to ${request.url()}`);
  });
  await page.goto(options.path ? `${url}/${options.path}` : `${url}/`);
  await page.locator("#state[data-state=ready]").waitFor();
  return page;
}

const tests = {
  async "a message is typed, sent and answered with the keyboard alone"() {
    const page = await open();
    assert.match(await page.title(), /smollm2-135m/);
    await page.waitForFunction(() => document.activeElement.id === "prompt");
    // On to the settings and back.
    for (const name of ["Settings", "system", "temperature"]) await tabTo(page, name);
    await page.keyboard.type("0");
    await tabTo(page, "max_tokens");
    await page.keyboard.type("40");
    await tabTo(page, "prompt", "Shift+Tab");
    await page.keyboard.type("first line");
    await page.keyboard.press("Shift+Enter");
    assert.equal(await page.locator("#prompt").inputValue(), "first line\n", "Shift+Enter breaks the line");
    await page.keyboard.press("Control+A");
    await page.keyboard.type(FRANCE);
    await page.keyboard.press("Enter");
    const answer = await finished(page);
    assert.match(answer, /Paris/);
    assert.equal(await page.locator("#prompt").inputValue(), "");

    const whole = await ask({ temperature: 0, max_tokens: 40, messages: [{ role: "user", content: FRANCE }] });
    assert.equal(answer, whole.choices[0].message.content);
    const stats = await page.locator(".message .stats").textContent();
    const { prompt_tokens, completion_tokens } = whole.usage;
    assert.match(stats, new RegExp(`^${prompt_tokens} prompt( \\(\\d+ cached\\))? · ${completion_tokens} tokens · `));
    assert.match(stats, /first after [\d.]+ m?s( · [\d.]+ tokens\/s)?$/, "a short answer may come at once");
    assert.match(await page.locator("#totals").textContent(), new RegExp(`Generated${completion_tokens} tokens`));
    assert.match(await page.locator("#said").textContent(), /complete/, "told to those who can't see it");

    await again(page);
    assert.equal(await finished(page), answer, "the same again at temperature 0");
    await page.locator(".message.user").getByRole("button", { name: "Edit" }).focus();
    await page.keyboard.press("Enter");
    await page.keyboard.press("Control+A");
    await page.keyboard.type(ITALY);
    await page.keyboard.press("Enter");
    assert.match(await finished(page), /Rome/);
    assert.equal(await page.locator(".message").count(), 2, "what followed the edited message is gone");

    await page.reload();
    assert.match(await page.locator(".message.assistant .body").textContent(), /Rome/, "kept over a reload");
    assert.equal(await page.locator("[name=temperature]").inputValue(), "0");
    await page.locator("#clear").click();
    assert.equal(await page.locator(".message").count(), 0);
    await page.locator("#empty").waitFor();
  },

  async "an answer is stopped, and the server stops too"() {
    const page = await open();
    for (const stop of ["Escape", "button"]) {
      await page.locator("#prompt").fill("Write the longest story that you can.");
      await page.keyboard.press("Enter");
      await page.locator(".message.live .body:not(:empty)").waitFor();
      // Without waiting for frames in which it stands still: on a busy machine the story may end before these come.
      if (stop === "button") await page.locator("#stop").click({ force: true });
      else await page.keyboard.press("Escape");
      const answer = await finished(page);
      assert.ok(answer.length > 0);
      assert.match(await page.locator(".message.assistant").last().locator(".stats").textContent(), /stopped$/);
      await page.locator("#send").waitFor();
      while ((await (await fetch(`${url}/health`)).json()).running > 0);
    }
    // An answer that runs does not let another begin.
    await page.locator("#prompt").fill("Count to a thousand.");
    await page.keyboard.press("Enter");
    await page.locator(".message.live").waitFor();
    const count = await page.locator(".message").count();
    await page.locator("#prompt").fill("And more.");
    await page.keyboard.press("Enter");
    assert.equal(await page.locator(".message").count(), count);
    assert.equal(await page.locator("#prompt").inputValue(), "And more.");
    await page.keyboard.press("Escape");
    await finished(page);
  },

  async "errors are the server's own words"() {
    const page = await open();
    expected = /status of 400/;
    await page.locator("[name=max_tokens]").fill("99999999");
    await page.locator("#prompt").fill("Hello");
    await page.keyboard.press("Enter");
    await finished(page);
    assert.match(await page.locator(".message .error").textContent(), /maximum context length/);
    await page.locator("[name=max_tokens]").fill("many");
    assert.equal(await page.locator("[name=max_tokens]").getAttribute("aria-invalid"), "true");
    await again(page);
    await finished(page);
    assert.match(await page.locator(".message .error").textContent(), /max_tokens: “many” is not a number/);
    await page.locator("[name=max_tokens]").fill("");
    await page.locator("[name=temperature]").fill("5");
    await again(page);
    await finished(page);
    assert.match(await page.locator(".message .error").textContent(), /'temperature' is 5/);
  },

  async "reasoning and tool calls are folded, and markup is text"() {
    const page = await open();
    const text = [
      "<img src=x onerror=alert(1)> **bold** `<b>` [a](javascript:alert) [b](https://example.org/)",
      "",
      "1. one",
      "   - inner",
      "2. two",
      "",
      "```python",
      'print("<script>")',
      "```",
    ].join("\n");
    const call = { index: 0, function: { name: "look", arguments: '{"at":' } };
    const rest = { index: 0, function: { arguments: '"it"}' } };
    await answerWith(page, [
      { reasoning_content: "let me " },
      { reasoning_content: "think" },
      ...[...text].map((content) => ({ content })),
      { tool_calls: [call] },
      { tool_calls: [rest] },
    ]);
    await page.locator("#prompt").fill("x");
    await page.keyboard.press("Enter");
    await finished(page);
    const answer = page.locator(".message.assistant");
    assert.equal(await answer.locator("details[open]").count(), 0, "folded until somebody opens it");
    await answer.locator("details.reasoning summary").click();
    assert.equal(await answer.locator("details.reasoning pre").textContent(), "let me think");
    assert.equal(await answer.locator("details.tool summary").textContent(), "Tool call: look");
    assert.equal(await answer.locator("details.tool pre").textContent(), '{"at":"it"}');
    assert.equal(await answer.locator(".body :is(img, script, b)").count(), 0);
    assert.equal(await answer.locator(".body strong").textContent(), "bold");
    assert.deepEqual(await answer.locator(".body a").evaluateAll((all) => all.map((a) => a.href)), ["https://example.org/"]);
    assert.equal(await answer.locator(".body pre code").textContent(), 'print("<script>")');
    assert.equal(await answer.locator("ol > li").count(), 2);
    assert.equal(await answer.locator("ol ul > li").textContent(), "inner");
    assert.match(await answer.locator(".stats").textContent(), /^7 prompt \(5 cached\) · 9 tokens/);
  },

  async "a server that asks for a key gets it, from this tab only"() {
    const page = await open();
    expected = /status of 401/;
    const keys = [];
    await page.route("**/v1/*/*", (route) => {
      keys.push(route.request().headers().authorization);
      const error = { error: { message: "this server needs an API key" } };
      return route.fulfill({ status: 401, json: error });
    });
    await page.locator("#prompt").fill("x");
    await page.keyboard.press("Enter");
    await page.locator("#key-dialog[open]").waitFor();
    await page.keyboard.type("sk-secret");
    await page.keyboard.press("Enter");
    await page.locator("#key-dialog").waitFor({ state: "hidden" });
    await page.unroute("**/v1/*/*");
    await answerWith(page, [{ content: "in" }], keys);
    await again(page);
    assert.equal(await finished(page), "in");
    assert.deepEqual(keys, [undefined, "Bearer sk-secret"]);
    const kept = await page.evaluate(() => [JSON.stringify({ ...localStorage }), sessionStorage.getItem("atom.key")]);
    assert.ok(!kept[0].includes("sk-secret") && kept[1] === "sk-secret");
    const other = await page.context().newPage();
    await other.goto(`${url}/`);
    assert.equal(await other.evaluate(() => sessionStorage.getItem("atom.key")), null);
  },

  async "every control has a name, and every text can be read in both themes"() {
    const page = await open({ colorScheme: "light" });
    await answerWith(page, [{ reasoning_content: "hm" }, { content: "Some `code`\n\n```\nblock\n```" }]);
    await page.locator("#prompt").fill("x");
    await page.keyboard.press("Enter");
    await finished(page);
    const unnamed = await page.evaluate(() => {
      const name = (node) => node.ariaLabel || node.textContent.trim() || node.labels?.[0]?.textContent.trim();
      return [...document.querySelectorAll("button, input, textarea, canvas")].filter((node) => !name(node)).map((node) => node.outerHTML);
    });
    assert.deepEqual(unnamed, []);
    const grounds = [];
    const contrast = async () => {
      grounds.push(await page.evaluate(() => getComputedStyle(document.body).backgroundColor));
      for (const view of ["chat", "group"]) {
        await page.locator(`#tab-${view}`).click();
        const poor = await page.evaluate(poorlyReadable);
        assert.deepEqual(poor, [], view);
      }
    };
    await contrast();
    await page.emulateMedia({ colorScheme: "dark" });
    await contrast();
    assert.notEqual(grounds[0], grounds[1], "the system's theme holds");
    for (const [name, ground] of [["light", grounds[0]], ["dark", grounds[1]]]) {
      await page.locator("#theme").click();
      const said = await page.locator("#theme").getAttribute("aria-label");
      assert.equal(said, `Theme: ${name}`);
      assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), ground);
    }
    await page.emulateMedia({ colorScheme: "light" });
    await page.reload();
    assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), grounds[1], "kept");
  },

  async "a phone's width is enough"() {
    const page = await open({ viewport: { width: 360, height: 740 } });
    await page.locator("#prompt").fill("Give me a short list of three fruits.");
    await page.locator("#send").click();
    await finished(page);
    const fits = async (what) => {
      // Code and tables scroll by themselves; what holds them must not.
      const wide = await page.evaluate(() => {
        const boxes = [document.documentElement, ...document.querySelectorAll("#scroll, #group, #tiles, aside")];
        return boxes.filter((box) => box.scrollWidth > box.clientWidth).map((box) => `${box.tagName} ${box.scrollWidth}`);
      });
      assert.deepEqual(wide, [], what);
      assert.equal(await page.evaluate(() => document.documentElement.clientWidth), 360);
    };
    await fits("the chat");
    assert.ok(await page.locator("#send").isVisible());
    await page.locator("#settings summary").click();
    await page.locator("[name=seed]").fill("7");
    await fits("the settings");
    assert.ok(await page.locator("#send").isVisible(), "the message box stays in reach");
    await page.locator("#settings summary").click();
    await page.screenshot({ path: `${shots}/page-narrow.png` });
    await page.locator("#tab-group").click();
    await page.locator("#rows tr").first().waitFor();
    await fits("the group");
  },

  async "parsers take any text at any cut"() {
    await checkParsers(await open());
  },

  async "the group moves while somebody computes"() {
    await checkGroup({ open, url, shots });
  },

  async "a conversation goes on, with speeds"() {
    const page = await open({ colorScheme: "light" });
    await page.locator("[name=temperature]").fill("0");
    await page.locator("[name=max_tokens]").fill("200");
    for (const text of [FRANCE, "Write a Python function that adds two numbers, and explain it in two sentences."]) {
      await page.locator("#prompt").fill(text);
      await page.keyboard.press("Enter");
      await finished(page);
    }
    const stats = await page.locator(".message .stats").last().textContent();
    const [, speed] = / · ([\d.]+) tokens\/s/.exec(stats);
    assert.ok(speed > 0 && (await page.locator("#totals").textContent()).includes(`${speed} tokens/s`), stats);
    await page.screenshot({ path: `${shots}/page-chat.png` });
  },
};

/** Presses Tab until the focus is on the control of this name; a round of the page without it is a failure. */
async function tabTo(page, name, key = "Tab") {
  for (let presses = 0; presses < 60; presses += 1) {
    await page.keyboard.press(key);
    const here = await page.evaluate(() => {
      const node = document.activeElement;
      return [node.name, node.id, node.textContent.trim()];
    });
    if (here.includes(name)) return;
  }
  assert.fail(`no ${key} leads to ${name}`);
}

/** Waits for the end of the answer, and gives its text. */
async function finished(page) {
  await page.locator(".message.assistant").last().waitFor();
  await page.waitForFunction(() => !document.querySelector(".message.live"));
  const last = page.locator(".message.assistant").last();
  return last.locator(".body").innerText();
}

async function again(page) {
  await page.locator(".message.assistant").last().getByRole("button", { name: "Regenerate" }).click();
}

/** The same request without the page. */
async function ask(body) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  return response.json();
}

/** Lets the page get these deltas in place of the model's. */
async function answerWith(page, deltas, keys) {
  await page.route("**/v1/chat/completions", (route) => {
    keys?.push(route.request().headers().authorization);
    const chunks = deltas.map((delta) => ({ choices: [{ index: 0, delta }] }));
    const usage = { prompt_tokens: 7, completion_tokens: 9, prompt_tokens_details: { cached_tokens: 5 } };
    chunks.push({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] }, { choices: [], usage });
    const frames = chunks.map((chunk) => `: ping\r\n\r\ndata: ${JSON.stringify(chunk)}\r\n\r\n`);
    const body = `${frames.join("")}data: [DONE]\n\n`;
    return route.fulfill({ contentType: "text/event-stream", body });
  });
}

/** Texts whose contrast is below what WCAG 2 asks for (4.5 to 1). Runs in the page. */
function poorlyReadable() {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return rgba("Canvas");
  };
  const found = new Set();
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(".hidden, .skip")) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.add(`${node.tagName} ${node.className} “${node.textContent.trim().slice(0, 30)}” ${ratio.toFixed(2)}`);
  }
  return [...found];
}

const only = process.env.ONLY;
let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  if (only && !name.includes(only)) continue;
  const start = performance.now();
  troubles.length = 0;
  expected = /^$/;
  try {
    await test();
    assert.deepEqual(troubles, []);
    console.log(`ok    ${name} (${((performance.now() - start) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL  ${name}\n${error.stack}\n${troubles.join("\n")}`);
    const pages = browser.contexts().flatMap((context) => context.pages());
    await pages[0]?.screenshot({ path: `${shots}/failed.png` }).catch(() => {});
  }
  for (const context of browser.contexts()) await context.close();
}
await browser.close();
process.exitCode = failed ? 1 : 0;
