// Makes the table of runs sort and filter, and hides the lines of runs that are not listed or not ticked there.

const table = document.getElementById("runs");
const rows = [...table.tBodies[0].rows];  // row i is run i, wherever it stands
const boxes = rows.map(row => row.querySelector("input"));
const filter = document.querySelector("input[type=search]");

function update() {
  const words = filter.value.toLowerCase().split(/\s+/);
  for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  const shown = rows.map((row, i) => !row.hidden && boxes[i].checked);
  for (const line of document.querySelectorAll("[data-runs]")) {
    line.classList.toggle("hidden", !line.dataset.runs.split(" ").some(run => shown[run]));
  }
}

function sortBy(head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = ({ cells: { [head.cellIndex]: cell } }) => cell.dataset.value ?? cell.textContent.trim();
  const compare = (a, b) => {
    const [u, v] = [value(a), value(b)];
    if (!u || !v) return !u - !v;  // empty ones stay last
    const order = isNaN(u) || isNaN(v) ? u.localeCompare(v, "en", { numeric: true }) : u - v;
    return down ? -order : order;
  };
  table.tBodies[0].append(...rows.toSorted(compare));
}

for (const head of table.tHead.rows[0].cells) {
  head.tabIndex = 0;
  head.addEventListener("click", () => sortBy(head));
  head.addEventListener("keydown", event => { if (event.key === "Enter") sortBy(head); });
}
document.querySelector("button").addEventListener("click", () => {
  const none = boxes.every(box => box.checked);
  for (const box of boxes) box.checked = !none;
  update();
});
filter.addEventListener("input", update);
table.addEventListener("change", update);
document.documentElement.classList.add("js");
update();
