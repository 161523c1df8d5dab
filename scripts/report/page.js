// Draws the charts of a report and makes its table sort, filter and choose. scripts/report.py describes the data.

const { runs, groups } = JSON.parse(document.getElementById("data").textContent);
const shown = new Set(runs.keys());
const byNumber = (a, b) => a - b;
const lengths = [...new Set(runs.flatMap(run => Object.keys(run.final.val_loss ?? {})))].sort(byNumber);
const curveLengths = [...new Set(runs.flatMap(run => Object.keys(run.validation)))].sort(byNumber);

// ---- elements --------------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

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

// ---- numbers ---------------------------------------------------------------------------------------------------------

const short = value => {
  const [factor, unit] = [[1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([f]) => Math.abs(value) >= f) ?? [1, ""];
  return +(value / factor).toPrecision(3) + unit;
};
const exact = value => value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(3) : String(+value.toFixed(4));

function linearTicks(low, high, count = 6) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw);
  const ticks = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) ticks.push(+(k * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const factors = to - from > 3 ? [1] : [1, 2, 5];
  for (let power = from; power <= to; power++) {
    ticks.push(...factors.map(factor => factor * 10 ** power).filter(tick => tick >= low && tick <= high));
  }
  return ticks.length >= 3 ? ticks : linearTicks(low, high);
}

function meanAndError(values) {
  const n = values.length, mean = values.reduce((a, b) => a + b, 0) / n;
  if (n < 2) return { mean, error: null, n };
  const variance = values.reduce((a, b) => a + (b - mean) ** 2, 0) / (n - 1);
  return { mean, error: Math.sqrt(variance / n), n };
}

// The mean of the `width` points around each; at the ends of fewer. Gaps stay gaps.
function smooth(points, width) {
  const half = (width - 1) / 2;
  return points.map((point, i) => {
    const near = points.slice(Math.max(0, i - half), i + half + 1).filter(p => p.y != null);
    return point.y == null ? point : { ...point, y: meanAndError(near.map(p => p.y)).mean };
  });
}

// ---- series ----------------------------------------------------------------------------------------------------------

const CIRCLE = "M-3,0a3,3 0 1 0 6,0a3,3 0 1 0 -6,0z";
const ON_PART = "on a part of the validation tokens";
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

// ---- a chart ---------------------------------------------------------------------------------------------------------

// options: series, xLabel, yLabel, xLog, yLog, marks, and where they differ from the usual xTicks [[x, text]], xText,
// from (the lowest x drawn) and guide {x, text}, an upright line.
function draw(plot, width, options) {
  const { xLog, yLog, xText = exact } = options;
  const fits = p => p.y != null && (!xLog || p.x > 0) && (!yLog || p.y > 0) && p.x >= (options.from ?? -Infinity);
  const series = options.series.map(s => ({ ...s, points: s.points.filter(p => fits(p) || p.y == null) }));
  const points = series.flatMap(s => s.points.filter(fits));
  plot.replaceChildren();
  if (!points.length) {
    plot.append(element("p", { class: "empty" }, "nothing to draw for the runs shown"));
    return;
  }
  const height = 320;
  const box = { left: 62, right: width - 14, top: 10, bottom: height - 46 };

  let xLow = Infinity, xHigh = -Infinity, yLow = Infinity, yHigh = -Infinity;
  for (const p of points) {
    xLow = Math.min(xLow, p.x), xHigh = Math.max(xHigh, p.x);
    yLow = Math.min(yLow, p.y - (yLog ? 0 : p.error ?? 0)), yHigh = Math.max(yHigh, p.y + (p.error ?? 0));
  }
  if (xLow === xHigh) xLog ? (xLow /= 2, xHigh *= 2) : (xLow -= 1, xHigh += 1);
  if (yLow === yHigh) yLog ? (yLow /= 1.1, yHigh *= 1.1) : (yLow -= 0.1, yHigh += 0.1);
  const margin = yLog ? (yHigh / yLow) ** 0.04 : 0.04 * (yHigh - yLow);
  [yLow, yHigh] = yLog ? [yLow / margin, yHigh * margin] : [yLow - margin, yHigh + margin];
  const scale = (low, high, a, b, log) => {
    const f = log ? Math.log : value => value;
    return value => a + (b - a) * (f(value) - f(low)) / (f(high) - f(low));
  };
  const x = scale(xLow, xHigh, box.left + 8, box.right - 8, xLog);
  const y = scale(yLow, yHigh, box.bottom, box.top, yLog);

  const image = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const ends = series.map(s => `${s.label} ${exact(s.points.findLast(fits)?.y ?? NaN)}`);
  image.setAttribute("aria-label", `${options.yLabel} against ${options.xLabel}; the lines end at: ${ends.join("; ")}`);
  let free = -Infinity;  // labels that would overlap are left out
  const usual = () => (xLog ? logTicks : linearTicks)(xLow, xHigh, width < 500 ? 4 : 7);
  for (const [tick, text] of options.xTicks ?? usual().map(tick => [tick, xText(tick)])) {
    if (tick < xLow || tick > xHigh) continue;
    image.append(svg("path", { class: "grid", d: `M${x(tick)},${box.top}V${box.bottom}` }));
    if (x(tick) - 3.5 * text.length < free) continue;
    free = x(tick) + 3.5 * text.length + 6;
    image.append(svg("text", { x: x(tick), y: box.bottom + 17, "text-anchor": "middle" }, text));
  }
  for (const tick of (yLog ? logTicks : linearTicks)(yLow, yHigh)) {
    image.append(svg("path", { class: "grid", d: `M${box.left},${y(tick)}H${box.right}` }));
    image.append(svg("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, exact(tick)));
  }
  image.append(svg("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, options.xLabel));
  const across = `translate(13 ${(box.top + box.bottom) / 2}) rotate(-90)`;
  image.append(svg("text", { transform: across, "text-anchor": "middle" }, options.yLabel));
  if (options.guide && options.guide.x >= xLow && options.guide.x <= xHigh) {
    const at = x(options.guide.x), late = at > (box.left + box.right) / 2;
    image.append(svg("path", { class: "guide", d: `M${at},${box.top}V${box.bottom}` }));
    const place = { class: "soft", x: at + (late ? -4 : 4), y: box.top + 10, "text-anchor": late ? "end" : "start" };
    image.append(svg("text", place, options.guide.text));
  }

  for (const s of series) {
    const layer = svg("g", { class: `${s.group.class}${s.open ? " open" : ""}`, opacity: s.group.opacity });
    const banded = s.points.filter(p => fits(p) && p.error != null && (!yLog || p.y > p.error));
    if (banded.length > 1) {
      const edge = (p, sign) => `${x(p.x).toFixed(1)},${y(p.y + sign * p.error).toFixed(1)}`;
      const around = [...banded.map(p => edge(p, 1)), ...banded.toReversed().map(p => edge(p, -1))];
      layer.append(svg("path", { class: "band", d: `M${around.join("L")}Z` }));
    }
    let d = "", pen = "M";
    for (const p of s.points) {
      if (!fits(p)) { pen = "M"; continue; }
      d += `${pen}${x(p.x).toFixed(1)},${y(p.y).toFixed(1)}`;
      pen = "L";
    }
    layer.append(svg("path", { class: "line", "stroke-dasharray": s.group.dash, d }));
    s.layer = layer;
    s.dots = s.points.filter(fits).map(p => ({ p, x: x(p.x), y: y(p.y) }));
    if (options.marks || s.points.length < 3) {
      const look = p => p.part ? { class: "mark part", d: CIRCLE } : { class: "mark", d: s.group.marker };
      layer.append(...s.dots.map(({ p, x, y }) => svg("path", { ...look(p), transform: `translate(${x} ${y})` })));
    }
    image.append(layer);
  }

  const tip = element("div", { class: "tip", hidden: "" });
  const light = chosen => {  // the series chosen stand out
    image.classList.toggle("lit", chosen.length > 0);
    for (const s of series) s.layer.classList.toggle("hot", chosen.includes(s));
  };
  const leave = () => { tip.hidden = true; light([]); };
  const point = event => {
    const frame = image.getBoundingClientRect();
    const mouse = [event.clientX - frame.left, event.clientY - frame.top];
    let best = { distance: 40 ** 2 };
    for (const s of series) for (const dot of s.dots) {
      const distance = (dot.x - mouse[0]) ** 2 + (dot.y - mouse[1]) ** 2;
      if (distance < best.distance) best = { distance, s, dot };
    }
    if (!best.s) return leave();
    const { s, dot: { p } } = best;
    light([s]);
    const error = p.error != null ? ` \u00b1 ${exact(p.error)}` : "";
    const count = p.n ? ` (mean of ${p.n} run${p.n > 1 ? "s" : ""})` : "";
    const lines = [`${options.yLabel}: ${exact(p.y)}${error}${count}`, `${options.xLabel}: ${xText(p.x)}`];
    tip.textContent = [s.label, ...lines, ...p.part ? [ON_PART] : []].join("\n");
    tip.hidden = false;
    tip.style.top = `${Math.max(0, best.dot.y - tip.offsetHeight - 8)}px`;
    tip.style.left = `${Math.max(0, Math.min(best.dot.x + 8, width - tip.offsetWidth))}px`;
  };
  image.addEventListener("pointermove", point);
  image.addEventListener("pointerdown", point);
  image.addEventListener("pointerleave", leave);

  const legend = element("ul", { class: "legend" });
  for (const group of new Set(series.map(s => s.group))) {
    const size = { viewBox: "-14 -6 28 12", width: 28, height: 12 };
    const sample = svg("svg", { class: `swatch ${group.class}`, opacity: group.opacity, ...size });
    sample.append(svg("path", { class: "line", d: "M-14,0H14", "stroke-dasharray": group.dash }));
    if (options.marks) sample.append(svg("path", { class: "mark", d: group.marker }));
    legend.append(element("li", {
      onpointerenter: () => light(series.filter(s => s.group === group)),
      onpointerleave: leave,
    }, sample, group.label));
  }
  if (points.some(p => p.part)) {
    const sample = svg("svg", { class: "swatch", viewBox: "-14 -6 28 12", width: 28, height: 12 });
    sample.append(svg("path", { class: "mark part", d: CIRCLE }));
    legend.append(element("li", {}, sample, ON_PART));
  }
  plot.append(image, tip, legend);
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
