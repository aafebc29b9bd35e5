// The page: views, theme, key and state; what the views do is in chat.js and group.js.

import { Chat } from "./chat.js";
import { Group } from "./group.js";
import { apiKey, call } from "./server.js";

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
/** A server that goes away is noticed by the next message anyway. */
const HEALTH_EVERY_MS = 10_000;

let model = "";
const chat = new Chat({ notify, model: () => model });
const group = new Group();

// Views.

const TABS = ["chat", "group"];

function show(name) {
  for (const tab of TABS) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  watch();
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
}

/** The stream of steps is open only while somebody can see it. */
function watch() {
  if (!$("group").hidden && !document.hidden) group.start();
  else group.stop();
}

for (const tab of TABS) {
  $(`tab-${tab}`).addEventListener("click", () => show(tab));
  $(`tab-${tab}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = TABS[(TABS.indexOf(tab) + 1) % TABS.length];
    show(other);
    $(`tab-${other}`).focus();
  });
}
document.addEventListener("visibilitychange", watch);

// Keys that work everywhere.

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, dialog");
  if (event.key === "Escape" && !$("key-dialog").open) {
    chat.stop();
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    show("chat");
    $("prompt").focus();
  }
});

// Theme: as the system, or as chosen here.

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  const name = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
  $("theme-name").textContent = ` ${name}`;
  $("theme").setAttribute("aria-label", `Theme: ${theme === "auto" ? "as the system" : theme}`);
  group.lanes.draw();
}

$("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
  setTheme(theme);
  try {
    localStorage.setItem("atom.theme", theme);
  } catch {
    // It holds until the page is closed.
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => group.lanes.draw());

// The key, where the server wants one.

function askForKey() {
  $("key-open").hidden = false;
  $("key").value = apiKey.read();
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

addEventListener("key-needed", askForKey);
$("key-open").addEventListener("click", askForKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", () => {
  apiKey.write($("key").value.trim());
  $("key").value = "";
  greet();
  watch();
});

// What serves, and how it is.

async function greet() {
  try {
    const models = await (await call("v1/models")).json();
    model = models.data?.[0]?.id ?? "";
    $("model").textContent = model;
    document.title = model ? `${model} · atom` : "atom";
  } catch (error) {
    if (error.status !== 401) notify(error.message);
  }
}

async function look() {
  let [state, words] = ["down", "not reachable"];
  try {
    const response = await fetch("health", { cache: "no-store" });
    const health = await response.json();
    state = health.ready ? "ready" : health.live ? "unready" : "down";
    words = health.ready ? "ready" : (health.reason ?? "not ready");
  } catch {
    // Whatever it is, it is not there.
  }
  if ($("state").textContent !== words) $("state").textContent = words;
  $("state").dataset.state = state;
}

let toastEnds;
function notify(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toastEnds);
  toastEnds = setTimeout(() => ($("toast").hidden = true), 6000);
}

setTheme(root.dataset.theme ?? "auto");
if (innerWidth < 900) $("settings").open = false;
show(location.hash === "#group" ? "group" : "chat");
greet();
look();
setInterval(() => document.hidden || look(), HEALTH_EVERY_MS);
if (matchMedia("(pointer: fine)").matches && location.hash !== "#group") $("prompt").focus();
