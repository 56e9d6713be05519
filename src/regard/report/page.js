"use strict";
// What every page draws: figures with their numbers as a table, Vega-Lite charts in the page's colors. It fills the
// boxes of `data.panels` and `data.maps`; the script of a page with other parts follows it and takes what it needs from `regard`.
const regard = (() => {
  const data = JSON.parse(document.getElementById("regard-data").textContent);
  const { colors, panels = {}, maps = [] } = data;
  const $ = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const palette = (name) => colors[name][dark.matches ? "dark" : "light"];
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const drawn = new Map();

  const show = (value) => {
    if (value === null || value === undefined) return "–";
    const far = value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7);
    const text = far ? Number(value.toPrecision(4)).toExponential() : value.toLocaleString("en", { maximumSignificantDigits: 5 });
    return text.replaceAll("-", "−");
  };
  const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== null) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };

  // ---- colors ----
  const channels = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  // The red, green and blue at a share of the way from the first color of a ramp to its last.
  const mixed = (share, ramp = palette("ramp")) => {
    const place = Math.min(1, Math.max(0, share)) * (ramp.length - 1);
    const [low, high] = [ramp[Math.floor(place)], ramp[Math.ceil(place)]].map(channels);
    return low.map((value, i) => Math.round(value + (high[i] - value) * (place % 1)));
  };
  // Black or white, whichever has more contrast on a color: by WCAG both have the same at this luminance, 4.6.
  const legible = (color) => {
    const [r, g, b] = color.map((value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
  };

  const config = () => {
    const words = { labelColor: ink("--quiet"), titleColor: ink("--quiet"), labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
    return {
      background: "transparent",
      font: ink("--font"),
      view: { stroke: null },
      axis: { ...words, domainColor: ink("--line"), tickColor: ink("--line"), gridColor: ink("--line"), gridOpacity: 0.6, tickSize: 4 },
      legend: { ...words, symbolStrokeWidth: 2 },
      range: { category: palette("series"), heatmap: palette("ramp"), ramp: palette("ramp") },
    };
  };
  // Draws after whatever is still being drawn in this box; resolves to the Vega view.
  const draw = (box, spec, datasets, description) => {
    const full = { ...spec, description, datasets, config: config() };
    const options = { mode: "vega-lite", actions: false, renderer: "svg", ast: true, tooltip: { theme: dark.matches ? "dark" : "light" } };
    const before = drawn.get(box) || Promise.resolve(null);
    const now = before.then(async (old) => {
      if (old) old.finalize();
      return window.vegaEmbed(box, full, options);
    });
    drawn.set(box, now);
    return now.then((result) => result.view);
  };

  const figure = (parent, caption, note) => {
    const element = make("figure", null);
    const words = make("figcaption", caption);
    if (note) words.append(" ", make("span", note, { class: "note" }));
    const box = make("div", null, { class: "chart", tabindex: "0", role: "region", "aria-label": caption });
    element.append(words, box);
    parent.append(element);
    return { element, box };
  };
  // Without the middle where it is long: names of tasks often differ at the end.
  const kept = (most) => [Math.floor((most - 1) / 3), most - 1 - Math.floor((most - 1) / 3)];
  const shorten = (text, most = 24) => (String(text).length > most ? `${text.slice(0, kept(most)[0])}…${text.slice(-kept(most)[1])}` : text);
  // The same of a chart's labels, as an expression of Vega, which would cut their ends.
  const shortLabels = (most) => `length(datum.label) > ${most} ? slice(datum.label, 0, ${kept(most)[0]}) + '…' + slice(datum.label, -${kept(most)[1]}) : datum.label`;
  const tableOf = (head, rows) => {
    const table = make("table", null);
    const top = make("tr", null);
    head.forEach((text) => top.append(make("th", shorten(text), { scope: "col", ...(shorten(text) === text ? {} : { title: text }) })));
    table.append(make("thead", null), make("tbody", null));
    table.tHead.append(top);
    rows.forEach((row) => {
      const line = make("tr", null);
      row.forEach((text, i) => line.append(i ? make("td", text) : make("th", text, { scope: "row" })));
      table.tBodies[0].append(line);
    });
    return table;
  };
  // The figure's numbers as a table, written when it is first opened.
  const asTable = (parent, caption, write) => {
    const details = make("details", null, { class: "numbers" });
    const box = make("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${caption}` });
    details.append(make("summary", "Numbers"), box);
    details.addEventListener("toggle", () => { if (details.open) box.replaceChildren(tableOf(...write())); });
    parent.append(details);
  };

  const order = (points, key) => [...new Set(points.map((p) => p[key]))];
  // A legend, as text that wraps: a stroke before each name.
  const keys = (element, entries) => {
    if (!entries.length) return;
    const line = make("p", null, { class: "legend" });
    entries.forEach(([name, look]) => line.append(make("span", name, { class: "key", style: look })));
    const caption = element.querySelector("figcaption");
    if (caption) caption.after(line);
    else element.append(line);
  };
  const INKS = colors.series.light.length;
  const STROKES = ["solid", "dashed", "dotted"];
  const DASHES = [[1, 0], [5, 3], [1.5, 2.5]];
  const table = (points, key, title) => {
    const names = order(points, "series");
    const rows = new Map();
    points.forEach((p) => rows.set(p[key], { ...rows.get(p[key]), [p.series]: p.shown }));
    return [[title, ...names], [...rows].sort(([a], [b]) => (typeof a === "number" ? a - b : 0)).map(([place, row]) => [String(place), ...names.map((name) => row[name] || "–")])];
  };

  // ---- lines ----
  const nominal = (field, more = {}) => ({ field, type: "nominal", ...more });
  const tooltip = (titles) => Object.entries(titles).map(([field, title]) => ({ ...nominal(field), title, ...(field === "step" ? { type: "quantitative" } : {}) }));
  const fitted = (height) => ({ width: "container", height, autosize: { type: "fit-x", contains: "padding" } });
  // A color, dash or shape for each line by its name.
  const byLine = (domain, range) => nominal("series", { sort: null, legend: null, scale: { domain, range } });
  const AREA = { type: "area", opacity: 0.16 };
  const RULE = { type: "rule", strokeWidth: 1.25, opacity: 0.55 };

  // ---- panels: figures of lines that share a section ----
  const TITLES = { step: "Step", layer: "Layer", position: "Position", tasks: "Tasks learnt", after: "Tasks learnt", task_index: "Task", fraction: "Dynamic heads" };
  // There is no half task, layer or position: a tick at each place, or at every second, third and so on; of positions,
  // which may be many and uneven, only where they are few.
  const WHOLE = ["layer", "tasks", "after", "task_index"];
  const TICKS = 7;
  const wholeTicks = (panel) => {
    const places = [...new Set(panel.points.map((point) => point[panel.axis]))].sort((a, b) => a - b);
    if (!WHOLE.includes(panel.axis) && !(panel.axis === "position" && places.length <= TICKS)) return {};
    const every = Math.ceil(places.length / TICKS);
    return { values: places.filter((_, i) => i % every === 0), format: "d" };
  };
  // The x axis of a panel; `ticks` puts names at places.
  const across = ({ axis, ticks, ...panel }) => {
    const named = ticks && `${JSON.stringify(ticks.names)}[indexof(${JSON.stringify(ticks.places)}, datum.value)]`;
    const look = ticks ? { values: ticks.places, labelExpr: named } : { tickMinStep: 1, tickCount: 6 };
    return {
      field: ticks ? "place" : axis,
      type: "quantitative",
      title: TITLES[axis],
      axis: { grid: false, labelFlush: false, labelOverlap: true, labelSeparation: 8, ...look, ...wholeTicks({ axis, ...panel }) },
      scale: { nice: false, zero: false, ...(ticks ? { padding: 10 } : {}) },
    };
  };
  // The name, ink and stroke of each line: told by the panel, else one ink after the other, then with other strokes.
  const styles = (panel) => panel.lines || order(panel.points, "series").map((name, i) => [name, i % INKS, Math.floor(i / INKS) % STROKES.length]);
  const panelLegend = (element, panel) => {
    const found = styles(panel);
    keys(element, found.length > 1 ? found.map(([name, ink, stroke]) => [name, `--key: var(--series-${ink}); --stroke: ${STROKES[stroke]}`]) : []);
  };
  // A scale from the smallest number to the largest. Around one number alone it is a tenth to each side: of its own accord
  // Vega draws a single tick there, rounded to a whole number.
  const spread = (numbers) => {
    const known = numbers.filter((value) => Number.isFinite(value));
    const [low, high] = [Math.min(...known), Math.max(...known)];
    return { zero: false, ...(low === high ? { domain: low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [0, 1] } : {}) };
  };
  // The chart of a panel: lines, intervals from low to high where it has some, and dots, unseen where they would run together.
  const DOTTED = 48;
  const panelSpec = (panel) => {
    const found = styles(panel);
    const domain = found.map(([name]) => name);
    const color = byLine(domain, found.map(([, ink]) => palette("series")[ink]));
    const strokeDash = byLine(domain, found.map(([, , stroke]) => DASHES[stroke]));
    const x = across(panel);
    const y = { field: "value", type: "quantitative", title: null, axis: { tickCount: 4 }, scale: spread(panel.points.flatMap(({ value, low, high }) => [value, low, high])) };
    const interval = { y: { field: "low", type: "quantitative", title: null }, y2: { field: "high" } };
    const most = Math.max(...domain.map((name) => panel.points.filter((point) => point.series === name).length));
    const dot = { type: "point", filled: true, opacity: most > DOTTED ? 0 : 1, size: panel.ticks ? 26 : 20, aria: false };
    const titles = { [panel.axis]: TITLES[panel.axis].toLowerCase(), series: "line", shown: "value" };
    const layer = [
      { mark: { ...(panel.ticks ? RULE : AREA), aria: false }, encoding: { x, color, ...interval } },
      { mark: { type: "line", strokeWidth: 1.75, aria: false }, encoding: { x, y, color, strokeDash } },
      { mark: dot, encoding: { x, y, color, tooltip: tooltip(titles) } },
    ];
    return { data: { name: "points" }, layer: panel.points.every((point) => point.low === null) ? layer.slice(1) : layer, ...fitted(190) };
  };
  // Draws panels of lines into a box; panels with the same lines share one legend above them.
  const drawLines = (parent, panels) => {
    parent.replaceChildren();
    const shared = panels.length > 1 && new Set(panels.map((panel) => JSON.stringify(styles(panel)))).size === 1;
    if (shared) panelLegend(parent, panels[0]);
    for (const panel of panels) {
      const title = TITLES[panel.axis];
      const { element, box } = figure(parent, panel.caption, panel.note);
      if (!shared) panelLegend(element, panel);
      draw(box, panelSpec(panel), { points: panel.points }, [panel.caption, panel.note, `by ${title.toLowerCase()}`].filter(Boolean).join(", "));
      asTable(element, panel.caption, () => table(panel.points, panel.axis, title));
    }
  };

  // ---- dots: an ink and a shape for each series ----
  const SHAPES = ["circle", "triangle-up", "square"];
  const GLYPHS = ["●", "▲", "■"];
  const DOTS = ["Method", "Run"];
  const dotSpec = ({ axis, lines, points, names = DOTS }) => {
    const domain = lines.map(([name]) => name);
    const side = (field) => ({ field, type: "quantitative", scale: { ...spread(points.map((point) => point[field])), padding: 8 } });
    return {
      data: { name: "points" },
      mark: { type: "point", filled: true, opacity: 0.75, size: 48, aria: false },
      encoding: {
        x: { ...side("x"), title: axis, axis: { tickCount: 5, grid: false, labelFlush: false, labelOverlap: true, labelSeparation: 8 } },
        y: { ...side("value"), title: null, axis: { tickCount: 5 } },
        color: byLine(domain, lines.map(([, ink]) => palette("series")[ink])),
        shape: byLine(domain, lines.map(([, , shape]) => SHAPES[shape])),
        tooltip: tooltip({ series: names[0].toLowerCase(), what: names[1].toLowerCase(), shown: "value" }),
      },
      ...fitted(230),
    };
  };
  const drawDots = (parent, panels) => {
    const there = new Set(panels.flatMap((panel) => order(panel.points, "series")));
    const legend = make("p", null, { class: "legend" });
    panels[0].lines.filter(([name]) => there.has(name)).forEach(([name, ink, shape]) => {
      const entry = make("span", null);
      entry.append(make("span", GLYPHS[shape], { style: `color: var(--series-${ink})`, "aria-hidden": "true" }), ` ${name}`);
      legend.append(entry);
    });
    parent.replaceChildren(legend);
    for (const panel of panels) {
      const { element, box } = figure(parent, panel.caption, panel.note);
      draw(box, dotSpec(panel), { points: panel.points }, `${panel.caption}: ${panel.note} over ${panel.axis}`);
      asTable(element, panel.caption, () => [[...(panel.names ?? DOTS), "Values"], panel.points.map((p) => [p.series, p.what, p.shown])]);
    }
  };

  // ---- layers × heads ----
  // A map of `cells`: `xs` are heads, or what `title` says. A cell may be `picked`: it has a frame, and others can be clicked.
  const drawMap = (parent, { caption, note = "", title = "Head", short = title, xs, layers, cells, scale, picked }) => {
    const { element, box } = figure(parent, caption, note);
    if (!cells.length) return null;
    const room = Math.max(200, element.clientWidth - 64);
    const wide = Math.min(40, Math.max(title === "Head" ? 12 : 6, Math.floor(room / xs.length)));
    const side = (field, title, domain, axis) => ({ field, type: "ordinal", title, axis: { labelOverlap: true, ticks: false, ...axis }, scale: { domain, paddingInner: wide > 12 ? 0.06 : 0, paddingOuter: 0 } });
    const x = side("x", title, xs, { labelAngle: 0, labelSeparation: 6 });
    const y = side("layer", "Layer", layers);
    const legend = { orient: "top", gradientLength: 160, gradientThickness: 8, tickCount: 3 };
    const color = { field: "value", type: "quantitative", title: null, legend, scale };
    const rect = { type: "rect", aria: false, cursor: picked ? "pointer" : "default" };
    const frame = { ...rect, fillOpacity: 0, strokeWidth: 2.5, stroke: ink("--mark") };
    const layer = [
      { data: { name: "cells" }, mark: rect, encoding: { x, y, color, tooltip: tooltip({ layer: "layer", x: title.toLowerCase(), shown: "value" }) } },
      ...(picked ? [{ data: { name: "picked" }, mark: frame, encoding: { x, y } }] : []),
    ];
    const numbers = new Map(cells.map((cell) => [`${cell.layer} ${cell.x}`, cell.number || cell.shown]));
    asTable(element, caption, () => [
      ["Layer", ...xs.map((x) => `${short} ${x}`)],
      layers.map((layer) => [String(layer), ...xs.map((x) => numbers.get(`${layer} ${x}`) || "–")]),
    ]);
    const spec = { width: { step: wide }, height: { step: Math.min(32, Math.max(12, wide)) }, layer };
    return draw(box, spec, { cells, ...(picked ? { picked: [picked] } : {}) }, `${caption}: layers by ${title.toLowerCase()}s`);
  };
  // The map at the step that the slider is at.
  const atStep = (map) => {
    const at = Math.min(Number(slider.value), map.steps.length - 1);
    const cells = map.layers.flatMap((layer, i) => map.heads.map((x, j) => ({ layer, x, value: map.values[at][i][j] })));
    const known = cells.filter((cell) => cell.value !== null).map((cell) => ({ ...cell, shown: show(cell.value) }));
    const step = map.steps[at].toLocaleString("en");
    $(`${slider.id}-shown`).textContent = step;
    slider.setAttribute("aria-valuetext", `step ${step}`);
    return { ...map, caption: `${map.caption}, step ${step}`, cells: known, scale: { domain: [0, map.top] } };
  };
  const [mapBox, slider] = maps.length ? ["maps", "step"].map($) : [];
  const drawMaps = () => {
    if (mapBox) mapBox.replaceChildren();
    for (const map of maps) drawMap(mapBox, { xs: map.heads, ...(map.steps ? atStep(map) : { ...map, scale: { domain: [0, map.last || 1], reverse: true } }) });
  };

  // Calls `all` when the page's colors change, `wide` when its width has.
  const redraw = (all, wide) => {
    dark.addEventListener("change", all);
    let width = window.innerWidth;
    let waiting = 0;
    window.addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        if (window.innerWidth !== width) { width = window.innerWidth; wide(); }
      }, 200);
    });
  };
  const start = () => {
    for (const [id, group] of Object.entries(panels)) (group[0].kind === "dots" ? drawDots : drawLines)($(id), group);
    drawMaps();
  };
  if (slider) slider.addEventListener("input", drawMaps);
  redraw(start, drawMaps);
  start();

  return { data, $, palette, mixed, legible, ink, show, make, draw, figure, tableOf, asTable, shortLabels, nominal, tooltip, drawLines, drawMap, redraw };
})();
