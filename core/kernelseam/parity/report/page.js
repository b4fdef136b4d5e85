"use strict";
// The filter: cases by part of a name and by outcome. Groups open while it is on, and go back to what they were.
const form = document.querySelector(".toolbar"), text = form.querySelector("[type=search]");
const groups = [...document.querySelectorAll("details.group")];
let before = null;
form.hidden = false;
function apply() {
  const part = text.value.trim().toLowerCase(), state = form.elements.state.value, on = Boolean(part || state);
  if (on && !before) before = groups.map((g) => g.open);
  groups.forEach((g, i) => {
    let last = false, any = false;
    for (const row of g.querySelectorAll("tbody tr")) {
      const of_case = !row.classList.contains("why");
      const shown = of_case
        ? row.cells[0].textContent.toLowerCase().includes(part) && (!state || row.dataset.states.split(" ").includes(state))
        : last;
      row.hidden = !shown;
      last = shown;
      any ||= shown;
    }
    g.hidden = !any;
    g.open = on ? any : before ? before[i] : g.open;
  });
  if (!on) before = null;
}
form.addEventListener("input", apply);
form.addEventListener("submit", (e) => e.preventDefault());
for (const button of form.querySelectorAll("[data-open]"))
  button.addEventListener("click", () => groups.forEach((g) => (g.open = Boolean(button.dataset.open))));
