// Keys of the keyboard, the cursor of charts, and whether the values are current. Pages work without it.
"use strict";

const pulse = document.getElementById("pulse");
const say = (text, isLive) => {
  if (pulse === null) return;
  pulse.textContent = text;
  pulse.className = isLive ? "good" : "warn";
};

document.addEventListener("htmx:sse:after:message", () => say("Live.", true));
document.addEventListener("htmx:sse:error", () => say("No connection: the values are old.", false));
document.addEventListener("htmx:sse:close", () => say("No updates: the values are old.", false));

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

// The values at the cursor of a chart, from its table. The legend shows them; without a cursor it has the latest values.
const chartOf = (lines) => {
  const figure = lines.closest("figure");
  const rows = [...figure.querySelectorAll("tbody tr")].reverse();
  const words = [...figure.querySelectorAll(".legend li")];
  return { rows, words, latest: words.map((item) => (item.querySelector("b") ?? item).textContent) };
};

for (const lines of document.querySelectorAll("svg.lines")) {
  const { rows, words, latest } = chartOf(lines);
  const cursor = lines.querySelector(".cursor");
  let place = rows.length - 1;
  const showRow = (index) => {
    place = Math.min(Math.max(index, 0), rows.length - 1);
    const [time, ...values] = [...rows[place].cells].map((cell) => cell.textContent);
    cursor.setAttribute("d", `M${rows[place].dataset.x} 0V30`);
    words[0].textContent = time.slice(5, 16);
    values.forEach((value, i) => { words[i + 1].querySelector("b").textContent = value; });
  };
  const leave = () => {
    cursor.setAttribute("d", "");
    words.forEach((item, i) => { (item.querySelector("b") ?? item).textContent = latest[i]; });
  };
  lines.addEventListener("pointermove", (event) => {
    const box = lines.getBoundingClientRect();
    showRow(Math.round(((event.clientX - box.left) / box.width) * (rows.length - 1)));
  });
  lines.addEventListener("pointerleave", leave);
  lines.addEventListener("blur", leave);
  lines.addEventListener("focus", () => showRow(place));
  lines.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      showRow(place + step);
    }
  });
}
