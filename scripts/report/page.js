// Makes the table of a report sort, filter and choose, and says which charts there are. page.py describes the data.

const { runs, groups } = JSON.parse(document.getElementById("data").textContent);
const shown = new Set(runs.keys());
const byNumber = (a, b) => a - b;
const lengths = [...new Set(runs.flatMap(run => Object.keys(run.final.val_loss ?? {})))].sort(byNumber);
const curveLengths = [...new Set(runs.flatMap(run => Object.keys(run.validation)))].sort(byNumber);

// ---- controls --------------------------------------------------------------------------------------------------------

const button = (text, onclick) => element("button", { type: "button", onclick }, text);

// A labelled select or check box; read() gives its value.
function select(label, options, chosen, onchange) {
  const input = element("select", { onchange }, ...options.map(([value, text]) => element("option", { value }, text)));
  input.value = chosen;
  return { node: element("label", {}, label + " ", input), read: () => input.value };
}

function check(label, checked, onchange) {
  const input = element("input", { type: "checkbox", onchange });
  input.checked = checked;
  return { node: element("label", {}, input, " " + label), read: () => input.checked };
}

// ---- series ----------------------------------------------------------------------------------------------------------

const finished = run => run.state === "finished";

// One series a run shown, or with means one a group. pointsOf(run) gives [{x, y}], y null where there is no number.
// With atEnd the points are those of the last validation, so a mean is over the runs of a group that came furthest.
function makeSeries(pointsOf, atEnd = false) {
  const visible = runs.filter((run, index) => shown.has(index) && (!atEnd || finished(run) || unfinished.read()));
  const all = visible.sort((a, b) => a.group - b.group).map(run => ({ run, points: pointsOf(run) }));
  const lines = all.filter(({ points }) => points.some(p => p.y != null));
  const open = run => atEnd && !finished(run);
  const note = run => open(run) ? ` (${run.state}, step ${run.final.step} of ${run.steps ?? "?"})` : "";
  if (!means.read()) {
    return lines.map(({ run, points }) => (
      { group: groups[run.group], label: run.name + note(run), open: open(run), points }
    ));
  }
  return groups.flatMap((group, index) => {
    let members = lines.filter(({ run }) => run.group === index);
    if (atEnd) {
      const furthest = Math.max(...members.map(({ run }) => run.final.step));
      members = members.filter(({ run }) => run.final.step === furthest);
    }
    if (!members.length) return [];
    const at = new Map();
    for (const { points } of members) {
      for (const p of points) if (p.y != null) at.set(p.x, [...(at.get(p.x) ?? []), p]);
    }
    const points = [...at].sort(([a], [b]) => a - b).map(([x, same]) => {
      const { mean, error, n } = meanAndError(same.map(p => p.y));
      return { x, y: mean, error, n, part: same.some(p => p.part) };
    });
    const [{ run }] = members;
    return [{ group, label: group.label + note(run), open: open(run), points }];
  });
}

const zipped = (x, y, part) => (x ?? []).map((value, i) => ({ x: value, y: y?.[i] ?? null, part: !!part?.[i] }));

// The mean of the `width` points around each; at the ends of fewer. Gaps stay gaps.
function smooth(points, width) {
  const half = (width - 1) / 2;
  return points.map((point, i) => {
    const near = points.slice(Math.max(0, i - half), i + half + 1).filter(p => p.y != null);
    return point.y == null ? point : { ...point, y: meanAndError(near.map(p => p.y)).mean };
  });
}

// ---- the charts ------------------------------------------------------------------------------------------------------

const starts = [["0", "all"], ["0.1", "after 10 %"], ["0.5", "second half"], ["0.9", "last tenth"]];
const widths = [["1", "none"], ["5", "5 points"], ["21", "21 points"]];
const lengthOptions = list => list.map(length => [length, `${length} tokens`]);
const log = (what, checked = false) => check(`log ${what}`, checked, redraw);

// What the charts over tokens have in common: a choice of their part, and both axes.
const overTokens = (what, start, checked = false) => (
  { start: select("tokens", starts, start, redraw), xLog: log("tokens"), yLog: log(what, checked) }
);
function tokensAxis({ start, xLog, yLog }) {
  const end = ({ train, validation }) => train.tokens?.at(-1) ?? Object.values(validation)[0]?.tokens.at(-1) ?? 0;
  const most = Math.max(0, ...[...shown].map(index => end(runs[index])));
  return { xLabel: "tokens trained on", xText: short, from: start * most, xLog, yLog };
}

// Positions 2^(k-1) .. 2^k - 1 of bin k; the last ends with the sequence.
function binText(k, length) {
  const first = k ? 2 ** (k - 1) : 0, last = Math.min(2 ** k, length) - 1;
  return last > first ? `${first}-${last}` : `${first}`;
}

function trainedAt(place) {
  const trained = new Set([...shown].map(index => runs[index].train_length));
  const [length] = trained;
  return trained.size === 1 && length ? { x: place(length), text: `trained at ${length}` } : undefined;
}

const indexed = values => (values ?? []).map((y, x) => ({ x, y }));
const byLength = losses => Object.entries(losses ?? {}).map(([x, y]) => ({ x: +x, y })).sort((a, b) => a.x - b.x);

const charts = [
  {
    title: "Validation loss",
    controls: {
      length: select("at", lengthOptions(curveLengths), curveLengths.at(-1) ?? "", redraw),
      ...overTokens("loss", "0.1"),
    },
    options: chosen => ({
      series: makeSeries(({ validation: { [chosen.length]: at } }) => zipped(at?.tokens, at?.loss, at?.part)),
      yLabel: `loss at ${chosen.length} (nats a token)`,
      marks: true,
      ...tokensAxis(chosen),
    }),
  },
  {
    title: "Training loss",
    controls: { width: select("smoothing", widths, "5", redraw), ...overTokens("loss", "0.1") },
    options: chosen => ({
      series: makeSeries(run => smooth(zipped(run.train.tokens, run.train.loss), +chosen.width)),
      yLabel: "training loss (nats a token)",
      ...tokensAxis(chosen),
    }),
  },
  {
    id: "length",
    controls: { yLog: log("loss") },
    options: ({ yLog }) => ({
      series: makeSeries(run => byLength(run.final.val_loss), true),
      xLabel: "validation length (tokens)",
      xLog: true,
      xTicks: lengths.map(length => [+length, length]),
      yLabel: "loss (nats a token)",
      yLog,
      marks: true,
      guide: trainedAt(length => length),
    }),
  },
  {
    title: "Last validation loss by position in the sequence",
    controls: {
      length: select("in sequences of", lengthOptions(lengths), lengths.at(-1) ?? "", redraw),
      yLog: log("loss"),
    },
    options: ({ length, yLog }) => ({
      series: makeSeries(run => indexed(run.final.val_loss_by_position?.[length]), true),
      xLabel: "positions (tokens), each range by its first",
      xText: k => binText(k, length),
      xTicks: [...Array(32).keys()].map(k => [k, String(k && 2 ** (k - 1))]),
      yLabel: "loss (nats a token)",
      yLog,
      marks: true,
      guide: trainedAt(trained => Math.log2(trained) + 0.5),  // between the ranges that it parts
    }),
  },
  ...[["mean", "mean"], ["std", "standard deviation"]].map(([key, what]) => ({
    title: `Attention scores by layer at the last validation: ${what}`,
    controls: {},
    options: () => ({
      series: makeSeries(run => indexed(run.final[`scores_${key}`]), true),
      xLabel: "layer",
      xTicks: [...Array(200).keys()].map(k => [k, String(k)]),
      yLabel: `${what} of the scores`,
      marks: true,
    }),
  })),
  {
    title: "Gradient norm",
    controls: { width: select("smoothing", widths, "5", redraw), ...overTokens("norm", "0", true) },
    options: chosen => ({
      series: makeSeries(run => smooth(zipped(run.train.tokens, run.train.grad_norm), +chosen.width)),
      yLabel: "gradient norm",
      ...tokensAxis(chosen),
    }),
  },
];

function redraw() {
  const widths = charts.map(({ plot }) => plot.clientWidth);  // all before any is drawn: measuring costs a layout
  charts.forEach(({ plot, controls, options }, i) => {
    const chosen = Object.entries(controls).map(([name, control]) => [name, control.read()]);
    draw(plot, Math.max(280, widths[i]), options(Object.fromEntries(chosen)));
  });
  document.documentElement.dataset.drawn = document.querySelectorAll(".plot > svg").length;
}

// ---- the table -------------------------------------------------------------------------------------------------------

const table = document.getElementById("runs");
const rows = [...table.tBodies[0].rows];  // row i is run i, wherever it stands
const boxes = [];

function show(indices) {
  shown.clear();
  for (const index of indices) shown.add(index);
  update();
}

function update() {
  rows.forEach((row, index) => {
    boxes[index].checked = shown.has(index);
    row.classList.toggle("off", !shown.has(index));
  });
  status.textContent = `${shown.size} of ${runs.length} runs in the charts`;
  redraw();
}

rows.forEach((row, index) => {
  const name = runs[index].name;
  boxes[index] = element("input", { type: "checkbox", "aria-label": `show ${name} in the charts`, onchange: () => {
    boxes[index].checked ? shown.add(index) : shown.delete(index);
    update();
  } });
  const only = button("only", () => show([index]));
  only.setAttribute("aria-label", `show only ${name}`);
  row.cells[0].append(boxes[index], only);
});

function sortBy(head, column) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[column].dataset.value;
  const compare = (a, b) => {
    const [u, v] = [value(a), value(b)];
    if (u === undefined || v === undefined) return (u === undefined) - (v === undefined);  // empty ones stay last
    const order = isNaN(u) || isNaN(v) ? u.localeCompare(v, "en", { numeric: true }) : u - v;
    return down ? -order : order;
  };
  table.tBodies[0].append(...rows.toSorted(compare));
}

[...table.tHead.rows[0].cells].slice(1).forEach((head, i) => {
  head.replaceChildren(element("button", { type: "button", onclick: () => sortBy(head, i + 1) }, ...head.childNodes));
});

const filter = element("input", { type: "search", placeholder: "words in any column", "aria-label": "filter" });
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/);
  for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
});
const status = element("span", { role: "status" });
const seeds = groups.some(group => group.runs > 1);
const means = check("means over seeds, with a band of \u00b11 standard error", seeds, redraw);
const unfinished = check("unfinished runs in charts of the last validation", !runs.some(finished), redraw);
document.getElementById("controls").append(
  filter,
  button("show the listed only", () => show([...runs.keys()].filter(index => !rows[index].hidden))),
  button("show all", () => show(runs.keys())),
  button("show none", () => show([])),
  means.node,
  unfinished.node,
  status,
);

const holder = document.getElementById("charts");
for (const chart of charts) {
  const fresh = () => element("figure", {}, element("figcaption", {}, chart.title), element("div", { class: "plot" }));
  const figure = chart.id ? document.getElementById(chart.id) : fresh();  // one is there without JavaScript too
  chart.plot = figure.querySelector(".plot");
  const controls = Object.values(chart.controls).map(control => control.node);
  if (controls.length) chart.plot.before(element("div", { class: "controls" }, ...controls));
  holder.append(figure);
}
document.documentElement.classList.add("js");
update();

let width = holder.clientWidth;
new ResizeObserver(() => {
  if (holder.clientWidth !== width) {
    width = holder.clientWidth;
    redraw();
  }
}).observe(holder);
