(() => {
  const data = JSON.parse(document.getElementById("regard-data").textContent);
  const { charts, colours } = data;
  const $ = (id) => document.getElementById(id);
  const { dark, show, make, copy, draw, figure, asTable, panelLines, drawPanels, redraw } = drawing(colours);
  const chosen = (id) => $(id).value;

  // ---- lines over tasks learnt, or over layers ----
  // Ticks at whole numbers only: there is no half task and no half layer.
  const TICKS = 7;
  const lines = (panel) => {
    const spec = panelLines(charts[panel.axis], panel);
    const places = [...new Set(panel.points.map((point) => point[panel.axis]))].sort((a, b) => a - b);
    const every = Math.ceil(places.length / TICKS);
    const values = places.filter((_, i) => i % every === 0);
    for (const layer of spec.layer) Object.assign(layer.encoding.x.axis, { values, format: "d" });
    return spec;
  };
  const TITLES = { after: "Tasks learnt", layer: "Layer", task_index: "Task" };
  const drawLines = (parent, panels) => drawPanels(parent, panels, (panel) => panel.axis, (panel) => TITLES[panel.axis], lines);
  const drawCurves = () => {
    if ($("curves-lines")) drawLines($("curves-lines"), data.curves[chosen("curves-setting")]);
  };

  // ---- dots: an ink and a shape for each method ----
  const SHAPES = ["circle", "triangle-up", "square"];
  const GLYPHS = ["●", "▲", "■"];
  const dotsSpec = (panel) => {
    const spec = copy(charts.dots);
    const inks = colours.series[dark.matches ? "dark" : "light"];
    const names = panel.lines.map(([name]) => name);
    spec.encoding.x.title = panel.axis;
    spec.encoding.color.scale = { domain: names, range: panel.lines.map(([, ink]) => inks[ink]) };
    spec.encoding.shape.scale = { domain: names, range: panel.lines.map(([, , stroke]) => SHAPES[stroke]) };
    return { ...spec, width: "container", height: 230, autosize: { type: "fit-x", contains: "padding" } };
  };
  const drawDots = (id) => {
    const parent = $(id);
    if (!parent) return;
    const panels = data[id.split("-")[0]];
    const there = new Set(panels.flatMap((panel) => panel.points.map((point) => point.series)));
    const legend = make("p", null, { class: "legend" });
    data.styles.filter(([name]) => there.has(name)).forEach(([name, ink, stroke]) => {
      const entry = make("span", null);
      entry.append(make("span", GLYPHS[stroke], { style: `color: var(--series-${ink})`, "aria-hidden": "true" }), ` ${name}`);
      legend.append(entry);
    });
    parent.replaceChildren(legend);
    for (const panel of panels) {
      const { element, box } = figure(parent, panel.caption, panel.note);
      draw(box, dotsSpec(panel), { points: panel.points }, `${panel.caption}: ${panel.note} over ${panel.axis}`);
      asTable(element, panel.caption, () => [["Method", "Run", "Values"], panel.points.map((p) => [p.series, p.what, p.shown])]);
    }
  };

  // ---- cells with their numbers ----
  const grid = (parent, found) => {
    const { element, box } = figure(parent, found.caption, found.note);
    const room = Math.max(180, element.clientWidth - found.margin);
    const wide = Math.min(56, Math.max(14, Math.floor(room / found.columns.length)));
    const spec = copy(charts.grid);
    const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const [cells, texts] = spec.layer;
    Object.assign(spec, { width: { step: wide }, height: { step: Math.min(36, Math.max(18, wide)) } });
    for (const layer of spec.layer) {
      layer.encoding.x.scale = { domain: found.columns, paddingInner: 0.06, paddingOuter: 0 };
      layer.encoding.y.scale = { domain: found.rows, paddingInner: 0.06, paddingOuter: 0 };
    }
    cells.encoding.color.scale = found.scale;
    texts.encoding.color = { condition: { test: "datum.strong", value: ink("--paper") }, value: ink("--ink") };
    texts.mark.fontSize = wide < 34 ? 9 : 11;
    if (wide < 26) spec.layer.pop();
    draw(box, spec, { cells: found.cells }, `${found.caption}: ${found.note}`);
    const shown = new Map(found.cells.map((cell) => [`${cell.i} ${cell.j}`, cell.shown]));
    asTable(element, found.caption, () => [
      [found.corner, ...found.columns],
      found.rows.map((name, i) => [name, ...found.columns.map((_, j) => shown.get(`${i} ${j}`) || "–")]),
    ]);
  };
  // Names that stand twice would share a column.
  const apart = (names) => names.map((name, i) => (names.indexOf(name) < i ? `${name} (${i + 1})` : name));

  // ---- the accuracy matrix ----
  const afterName = (after) => (after ? `after ${after}` : "before");
  const matrixOf = (method, run, setting) => {
    const { afters, cells, low, tasks } = data.matrix;
    const found = (cells[setting][method] || {})[run];
    const bottom = low[setting];
    const [columns, rows] = [apart(tasks[run]), afters[setting].map(afterName)];
    const written = (found || []).flatMap((line, i) => line.map((value, j) => ({ value, i, j, x: columns[j], y: rows[i] })))
      .filter((cell) => cell.value !== null)
      .map((cell) => {
        const ahead = cell.j + 1 > afters[setting][cell.i];
        const strong = !ahead && (cell.value - bottom) / (100 - bottom) > 0.55;
        const what = `${cell.x}, ${cell.y}${ahead ? ", not yet learnt" : ""}`;
        return { ...cell, ahead, strong, what, short: cell.value.toFixed(cell.value < 99.95 ? 1 : 0), shown: `${show(cell.value)} %` };
      });
    return {
      caption: method,
      note: `${data.matrix.settings[setting]}, ${run}${found ? "" : ": not run"}`,
      corner: "Tasks learnt",
      margin: 64,
      columns,
      rows,
      cells: written,
      scale: { domain: [bottom, 100] },
    };
  };
  const drawMatrix = () => {
    const parent = $("matrix-grids");
    if (!parent) return;
    parent.replaceChildren();
    const [first, second] = [chosen("matrix-method"), chosen("matrix-beside")];
    const methods = second && second !== first ? [first, second] : [first];
    methods.forEach((method) => grid(parent, matrixOf(method, chosen("matrix-run"), chosen("matrix-setting"))));
  };

  // ---- gradients of pairs of tasks ----
  const drawInterference = () => {
    const parent = $("interference-grids");
    if (!parent) return;
    const { tasks, top, cells } = data.interference;
    const [method, after] = [chosen("interference-method"), chosen("interference-after")];
    const found = cells[method][after] || [];
    const names = apart(tasks);
    const inks = colours.series[dark.matches ? "dark" : "light"];
    const paper = colours.ramp[dark.matches ? "dark" : "light"][0];
    const written = found.flatMap((line, i) => line.map((pair, j) => ({ pair, i, j, x: names[j], y: names[i] })))
      .filter((cell) => cell.pair !== null && cell.pair[0] !== null)
      .map(({ pair: [value, dot], ...cell }) => ({
        ...cell,
        value: Math.max(-top, Math.min(top, value)),
        ahead: false,
        strong: Math.abs(value) > 0.6 * top,
        what: `${cell.y} and ${cell.x}`,
        short: value.toFixed(2).replace("-", "−"),
        shown: `cosine ${show(value)}, dot product ${show(dot)}`,
      }));
    parent.replaceChildren();
    grid(parent, {
      caption: method,
      note: `Cosine after ${after} learnt${written.length ? "" : ": not measured"}`,
      corner: "Task",
      margin: 120,
      columns: names,
      rows: names,
      cells: written,
      scale: { domain: [-top, 0, top], range: [inks[1], paper, inks[0]] },
    });
  };

  // ---- gates: weights of tasks and blocks, and what is measured of each task ----
  const drawGate = () => {
    const parent = $("gate-grids");
    if (!parent) return;
    const { tasks, times, blocks: called, cells, lines: panels } = data.gate;
    const method = chosen("gate-method");
    const names = apart(tasks);
    const blocks = called[method].map((_, j) => String(j + 1));
    parent.replaceChildren();
    Object.entries(cells[method]).forEach(([time, found]) => {
      const written = found.flatMap((line, i) => line.map((value, j) => ({ value, i, j, x: blocks[j], y: names[i] })))
        .filter((cell) => cell.value !== null)
        .map((cell) => ({
          ...cell,
          ahead: false,
          strong: cell.value > 0.55,
          what: `rows of ${cell.y}, ${called[method][cell.j]}`,
          short: cell.value.toFixed(2),
          shown: show(cell.value),
        }));
      const empty = written.length ? "" : ": not measured";
      grid(parent, {
        caption: `${method}, ${times[time]}`,
        note: `Mean weight of each block (columns) in each task (rows)${empty}`,
        corner: "Task",
        margin: 120,
        columns: blocks,
        rows: names,
        cells: written,
        scale: { domain: [0, 1] },
      });
    });
    drawLines($("gate-lines"), panels[method]);
  };

  // ---- diagnostics by layer ----
  const curve = (name, values, layers) => layers.map((layer, i) => ({ layer, series: name, part: "", value: values[i], low: null, high: null, shown: show(values[i]) }))
    .filter((point) => point.value !== null);
  const drawDiagnostics = () => {
    const parent = $("diagnostics-lines");
    if (!parent) return;
    const { statistics, methods, layers, values } = data.diagnostics;
    const [method, task] = [chosen("diagnostics-method"), chosen("diagnostics-task")];
    const known = data.styles.filter(([name]) => methods.includes(name));
    const panels = Object.entries(statistics).map(([statistic, title]) => {
      const by = values[statistic];
      const points = method
        ? ["before", "after"].flatMap((time) => curve(time, by[method][task][time], layers))
        : known.flatMap(([name]) => curve(name, by[name][task].after, layers));
      const note = method ? `${method}, ${task}` : `after the task, ${task}`;
      return { caption: title, note, axis: "layer", points, lines: method ? [["before", 4, 1], ["after", 0, 0]] : known };
    });
    drawLines(parent, panels.filter((panel) => panel.points.length));
  };

  const fields = {
    matrix: [drawMatrix, ["matrix-method", "matrix-beside", "matrix-run", "matrix-setting"]],
    curves: [drawCurves, ["curves-setting"]],
    diagnostics: [drawDiagnostics, ["diagnostics-method", "diagnostics-task"]],
    interference: [drawInterference, ["interference-method", "interference-after"]],
    gate: [drawGate, ["gate-method"]],
  };
  const grids = () => {
    drawMatrix();
    drawInterference();
    drawGate();
  };
  const start = () => {
    Object.values(fields).forEach(([redrawn]) => redrawn());
    ["metrics-dots", "cost-dots", "beside-dots", "pseudo-dots"].forEach(drawDots);
  };
  Object.values(fields).forEach(([redrawn, ids]) => ids.filter((id) => $(id)).forEach((id) => $(id).addEventListener("change", redrawn)));
  redraw(start, grids);
  start();
})();
