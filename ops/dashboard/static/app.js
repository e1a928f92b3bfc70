// Keys of the keyboard, and whether the figures on show are of this moment. Pages work without it.
"use strict";

const pulse = document.getElementById("pulse");
const say = (text, isLive) => {
  if (pulse === null) return;
  pulse.textContent = text;
  pulse.className = isLive ? "good" : "warn";
};

document.addEventListener("htmx:sse:after:message", () => say("Live.", true));
document.addEventListener("htmx:sse:error", () => say("The figures stand still: no connection.", false));
document.addEventListener("htmx:sse:close", () => say("The figures stand still.", false));

const rows = () => [...document.querySelectorAll("tbody tr")].filter((row) => row.querySelector("a"));
let chosen = -1;

const choose = (step) => {
  const all = rows();
  if (all.length === 0) return;
  chosen = Math.min(Math.max(chosen + step, 0), all.length - 1);
  all[chosen].querySelector("a").focus();
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    "/": () => document.querySelector("[data-search]")?.focus(),
    j: () => choose(1),
    k: () => choose(-1),
    "?": () => document.getElementById("help")?.showModal(),
  };
  const action = actions[event.key];
  if (action !== undefined) {
    event.preventDefault();
    action();
  }
});
