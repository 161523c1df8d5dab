// Draws a chart as SVG, with a legend, and a tip at the point nearest to the pointer. page.js says which charts.

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

// ---- a chart ---------------------------------------------------------------------------------------------------------

const CIRCLE = "M-3,0a3,3 0 1 0 6,0a3,3 0 1 0 -6,0z";
const ON_PART = "on a part of the validation tokens";

// options: series, xLabel, yLabel, xLog, yLog, marks, and where they differ from the usual xTicks [[x, text]], xText,
// from (the lowest x drawn) and guide {x, text}, an upright line.
function draw(plot, width, options) {
  const { xLog, yLog } = options;
  options = { xText: exact, from: -Infinity, ...options };
  const fits = p => p.y != null && (!xLog || p.x > 0) && (!yLog || p.y > 0) && p.x >= options.from;
  const series = options.series.map(s => ({ ...s, points: s.points.filter(p => fits(p) || p.y == null) }));
  const points = series.flatMap(s => s.points.filter(fits));
  plot.replaceChildren();
  if (!points.length) {
    plot.append(element("p", { class: "empty" }, "nothing to draw for the runs shown"));
    return;
  }
  const frame = makeFrame(points, width, options);
  const image = svg("svg", { width, height: frame.height, viewBox: `0 0 ${width} ${frame.height}`, role: "img" });
  const ends = series.map(s => `${s.label} ${exact(s.points.findLast(fits)?.y ?? NaN)}`);
  image.setAttribute("aria-label", `${options.yLabel} against ${options.xLabel}; the lines end at: ${ends.join("; ")}`);
  drawAxes(image, frame, options);
  for (const s of series) drawSeries(image, frame, s, fits, options);

  const tip = element("div", { class: "tip", hidden: "" });
  const light = chosen => {  // the series chosen stand out
    image.classList.toggle("lit", chosen.length > 0);
    for (const s of series) s.layer.classList.toggle("hot", chosen.includes(s));
  };
  const leave = () => { tip.hidden = true; light([]); };
  const point = event => {
    const { left, top } = image.getBoundingClientRect();
    const nearest = nearestDot(series, event.clientX - left, event.clientY - top);
    if (!nearest) return leave();
    light([nearest.s]);
    showTip(tip, nearest, width, options);
  };
  image.addEventListener("pointermove", point);
  image.addEventListener("pointerdown", point);
  image.addEventListener("pointerleave", leave);
  plot.append(image, tip, makeLegend(series, points, light, leave, options));
}

// Where the axes are in the image, what they range over, and the place of a number: x(value), y(value).
function makeFrame(points, width, { xLog, yLog }) {
  const height = 320, box = { left: 62, right: width - 14, top: 10, bottom: height - 46 };
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
  return { width, height, box, xLow, xHigh, yLow, yHigh, x, y };
}

function drawAxes(image, { width, height, box, xLow, xHigh, yLow, yHigh, x, y }, options) {
  const { xLog, yLog, xText } = options;
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
}

// Band, line and marks; s.layer and s.dots are then there for the pointer.
function drawSeries(image, { x, y }, s, fits, { yLog, marks }) {
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
  if (marks || s.points.length < 3) {
    const look = p => p.part ? { class: "mark part", d: CIRCLE } : { class: "mark", d: s.group.marker };
    layer.append(...s.dots.map(({ p, x, y }) => svg("path", { ...look(p), transform: `translate(${x} ${y})` })));
  }
  image.append(layer);
}

function nearestDot(series, x, y) {
  let best, least = 40 ** 2;
  for (const s of series) for (const dot of s.dots) {
    const distance = (dot.x - x) ** 2 + (dot.y - y) ** 2;
    if (distance < least) least = distance, best = { s, dot };
  }
  return best;
}

function showTip(tip, { s, dot }, width, { xLabel, yLabel, xText }) {
  const { p } = dot;
  const error = p.error != null ? ` \u00b1 ${exact(p.error)}` : "";
  const count = p.n ? ` (mean of ${p.n} run${p.n > 1 ? "s" : ""})` : "";
  const lines = [`${yLabel}: ${exact(p.y)}${error}${count}`, `${xLabel}: ${xText(p.x)}`];
  tip.textContent = [s.label, ...lines, ...p.part ? [ON_PART] : []].join("\n");
  tip.hidden = false;
  tip.style.top = `${Math.max(0, dot.y - tip.offsetHeight - 8)}px`;
  tip.style.left = `${Math.max(0, Math.min(dot.x + 8, width - tip.offsetWidth))}px`;
}

function makeLegend(series, points, light, leave, { marks }) {
  const legend = element("ul", { class: "legend" });
  const size = { viewBox: "-14 -6 28 12", width: 28, height: 12 };
  for (const group of new Set(series.map(s => s.group))) {
    const sample = svg("svg", { class: `swatch ${group.class}`, opacity: group.opacity, ...size });
    sample.append(svg("path", { class: "line", d: "M-14,0H14", "stroke-dasharray": group.dash }));
    if (marks) sample.append(svg("path", { class: "mark", d: group.marker }));
    legend.append(element("li", {
      onpointerenter: () => light(series.filter(s => s.group === group)),
      onpointerleave: leave,
    }, sample, group.label));
  }
  if (points.some(p => p.part)) {
    const sample = svg("svg", { class: "swatch", ...size });
    sample.append(svg("path", { class: "mark part", d: CIRCLE }));
    legend.append(element("li", {}, sample, ON_PART));
  }
  return legend;
}

