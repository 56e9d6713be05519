"use strict";
// What every page's script draws with: words, figures with their numbers as a table, charts in the page's colours.
const drawing = (colours) => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  const show = (value) => {
    if (value === null || value === undefined) return "–";
    if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(3);
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  };
  const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== null) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };

  const config = () => {
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    const mode = dark.matches ? "dark" : "light";
    const words = { labelColor: ink("--quiet"), titleColor: ink("--quiet"), labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
    return {
      background: "transparent",
      font: ink("--font"),
      view: { stroke: null },
      axis: { ...words, domainColor: ink("--line"), tickColor: ink("--line"), gridColor: ink("--line"), gridOpacity: 0.6, tickSize: 4 },
      legend: { ...words, symbolStrokeWidth: 2 },
      range: { category: colours.series[mode], heatmap: colours.ramp[mode], ramp: colours.ramp[mode] },
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
  const copy = (spec) => JSON.parse(JSON.stringify(spec));

  const figure = (parent, caption, note) => {
    const element = make("figure", null);
    const words = make("figcaption", caption);
    if (note) words.append(" ", make("span", note, { class: "note" }));
    const box = make("div", null, { class: "chart", tabindex: "0", role: "region", "aria-label": caption });
    element.append(words, box);
    parent.append(element);
    return { element, box };
  };
  const tableOf = (head, rows) => {
    const table = make("table", null);
    const top = make("tr", null);
    head.forEach((text) => top.append(make("th", text, { scope: "col" })));
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
  // The legend, as text that wraps: a stroke before each name; nothing where one line needs no name. `more` is the stroke
  // of the series after those that have a colour of their own.
  const legend = (element, points, more = "solid") => {
    const [series, parts] = [order(points, "series"), order(points, "part")];
    const line = make("p", null, { class: "legend" });
    const key = (name, look) => line.append(make("span", name, { class: "key", style: look }));
    const inks = colours.series.light.length;
    if (series.length > 1) series.forEach((name, i) => key(name, `--key: var(--series-${i % inks}); --stroke: ${i < inks ? "solid" : more}`));
    if (parts.length > 1) parts.forEach((name, i) => key(name, `--key: var(--quiet); --stroke: ${i ? "dashed" : "solid"}`));
    if (!line.childNodes.length) return;
    const caption = element.querySelector("figcaption");
    if (caption) caption.after(line);
    else element.append(line);
  };
  const table = (points, key, title) => {
    const line = (p) => [p.series, p.part].filter(Boolean).join(", ") || "Value";
    const names = [...new Set(points.map(line))];
    const rows = new Map();
    points.forEach((p) => rows.set(p[key], { ...rows.get(p[key]), [line(p)]: p.shown }));
    return [[title, ...names], [...rows].map(([place, row]) => [String(place), ...names.map((name) => row[name] || "–")])];
  };

  return { dark, show, make, copy, order, draw, figure, tableOf, asTable, legend, table };
};
