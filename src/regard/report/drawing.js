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
  // A legend, as text that wraps: a stroke before each name.
  const keys = (element, entries) => {
    if (!entries.length) return;
    const line = make("p", null, { class: "legend" });
    entries.forEach(([name, look]) => line.append(make("span", name, { class: "key", style: look })));
    const caption = element.querySelector("figcaption");
    if (caption) caption.after(line);
    else element.append(line);
  };
  const INKS = colours.series.light.length;
  const STROKES = ["solid", "dashed", "dotted"];
  const DASHES = [[1, 0], [5, 3], [1.5, 2.5]];
  // The legend of points by series and part; nothing where one line needs no name.
  const legend = (element, points) => {
    const [series, parts] = [order(points, "series"), order(points, "part")];
    const inks = series.map((name, i) => [name, `--key: var(--series-${i % INKS}); --stroke: solid`]);
    const strokes = parts.map((name, i) => [name, `--key: var(--quiet); --stroke: ${i ? "dashed" : "solid"}`]);
    keys(element, [...(series.length > 1 ? inks : []), ...(parts.length > 1 ? strokes : [])]);
  };
  const table = (points, key, title) => {
    const line = (p) => [p.series, p.part].filter(Boolean).join(", ") || "Value";
    const names = [...new Set(points.map(line))];
    const rows = new Map();
    points.forEach((p) => rows.set(p[key], { ...rows.get(p[key]), [line(p)]: p.shown }));
    return [[title, ...names], [...rows].map(([place, row]) => [String(place), ...names.map((name) => row[name] || "–")])];
  };

  // ---- panels: figures of lines that share a section ----
  // The name, ink and stroke of each line: told by the panel, else one ink after the other, then with other strokes.
  const styles = (panel) => panel.lines || order(panel.points, "series").map((name, i) => [name, i % INKS, Math.floor(i / INKS) % STROKES.length]);
  const panelLegend = (element, panel) => {
    const found = styles(panel);
    keys(element, found.length > 1 ? found.map(([name, ink, stroke]) => [name, `--key: var(--series-${ink}); --stroke: ${STROKES[stroke]}`]) : []);
  };
  // The chart of a panel: its inks and strokes, no intervals where it has none, no dots where they would run together.
  const DOTTED = 48;
  const panelLines = (template, panel) => {
    const spec = copy(template);
    const found = styles(panel);
    const [names, inks] = [found.map(([name]) => name), colours.series[dark.matches ? "dark" : "light"]];
    const most = Math.max(...names.map((name) => panel.points.filter((point) => point.series === name).length));
    if (most > DOTTED) spec.layer[2].mark.opacity = 0;
    if (panel.points.every((point) => point.low === null)) spec.layer.shift();
    for (const layer of spec.layer) {
      const { color, strokeDash } = layer.encoding;
      color.scale = { domain: names, range: found.map(([, ink]) => inks[ink]) };
      if (strokeDash) strokeDash.scale = { domain: names, range: found.map(([, , stroke]) => DASHES[stroke]) };
    }
    return { ...spec, width: "container", height: 190, autosize: { type: "fit-x", contains: "padding" } };
  };
  // Draws the panels into a box; panels with the same lines share one legend above them.
  const drawPanels = (parent, panels, key, title, spec) => {
    parent.replaceChildren();
    const shared = panels.length > 1 && new Set(panels.map((panel) => JSON.stringify(styles(panel)))).size === 1;
    if (shared) panelLegend(parent, panels[0]);
    for (const panel of panels) {
      const { element, box } = figure(parent, panel.caption, panel.note);
      if (!shared) panelLegend(element, panel);
      draw(box, spec(panel), { points: panel.points }, [panel.caption, panel.note, `by ${title(panel).toLowerCase()}`].filter(Boolean).join(", "));
      asTable(element, panel.caption, () => table(panel.points, key(panel), title(panel)));
    }
  };

  // ---- layers × heads, nothing to click ----
  const drawMap = (parent, map, template) => {
    const { element, box } = figure(parent, map.caption, map.note || "");
    const spec = copy(template);
    const room = Math.max(200, element.clientWidth - 64);
    const wide = Math.min(36, Math.max(10, Math.floor(room / map.heads.length)));
    Object.assign(spec, { width: { step: wide }, height: { step: Math.min(30, Math.max(12, wide)) } });
    const [fill] = spec.layer;
    const gap = { paddingInner: wide > 12 ? 0.06 : 0, paddingOuter: 0 };
    fill.mark.cursor = "default";
    fill.encoding.color.scale = map.scale;
    fill.encoding.x.scale = { domain: map.heads, ...gap };
    fill.encoding.y.scale = { domain: map.layers, ...gap };
    draw(box, { ...spec, layer: [fill] }, { cells: map.cells }, `${map.caption} of each head: layers by heads`);
    const shown = new Map(map.cells.map((cell) => [`${cell.layer} ${cell.x}`, cell.shown]));
    asTable(element, map.caption, () => [
      ["Layer", ...map.heads.map((head) => `Head ${head}`)],
      map.layers.map((layer) => [String(layer), ...map.heads.map((head) => shown.get(`${layer} ${head}`) || "–")]),
    ]);
  };

  // Calls `all` when the page's colours change, `wide` when its width has.
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

  return { dark, show, make, copy, order, draw, figure, tableOf, asTable, legend, table, panelLines, drawPanels, drawMap, redraw };
};
