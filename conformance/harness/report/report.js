"use strict";
const all = (selector) => [...document.querySelectorAll(selector)];
const bar = document.getElementById("bar");
const model = document.getElementById("model");
const buttons = all("#bar button[data-verdict]");
const items = all("[data-v]");

const filter = () => {
  const verdicts = new Set(buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.verdict));
  for (const item of items) {
    item.hidden = !verdicts.has(item.dataset.v) || (model.value !== "" && item.dataset.m !== model.value);
  }
  for (const group of all(".group")) {
    group.hidden = !group.querySelector("[data-v]:not([hidden])");
  }
  const rows = all("tr[data-v]");
  document.getElementById("shown").value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} checks`;
};

for (const button of buttons) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    filter();
  });
}
model.addEventListener("change", filter);

const copy = async (pre) => {
  try {
    await navigator.clipboard.writeText(pre.textContent);
  } catch {
    getSelection().selectAllChildren(pre);
    document.execCommand("copy");
  }
};
for (const place of all(".copyable")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await copy(place.querySelector("pre"));
    button.textContent = "Copied";
  });
  place.prepend(button);
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});

const reveal = () => {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target) {
    target.closest("details")?.setAttribute("open", "");
    target.scrollIntoView();
  }
};
addEventListener("hashchange", reveal);

let closed = [];
addEventListener("beforeprint", () => {
  closed = all("details.print:not([open])");
  closed.forEach((details) => { details.open = true; });
});
addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));

bar.hidden = false;
filter();
reveal();
