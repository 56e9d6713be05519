(() => {
  const { data, $, palette, ink, show, draw, figure, asTable, nominal, tooltip, drawLines, redraw } = regard;
  const chosen = (id) => $(id).value;
  const drawCurves = () => drawLines($("curves-lines"), data.curves[chosen("curves-setting")]);

  // ---- cells with their numbers ----
  const grid = (parent, found) => {
    const { element, box } = figure(parent, found.caption, found.note);
    const room = Math.max(180, element.clientWidth - found.margin);
    const wide = Math.min(56, Math.max(14, Math.floor(room / found.columns.length)));
    const axis = { labelLimit: 110, ticks: false, domain: false };
    const side = (field, domain, more) => nominal(field, { sort: null, title: null, axis: { ...axis, ...more }, scale: { domain, paddingInner: 0.06, paddingOuter: 0 } });
    const x = side("x", found.columns, { orient: "top", labelAngle: -40, labelOverlap: false });
    const shared = { x, y: side("y", found.rows), tooltip: tooltip({ what: "cell", shown: "value" }) };
    const legend = { orient: "bottom", gradientLength: 160, gradientThickness: 8, tickCount: 3 };
    const color = { field: "value", type: "quantitative", title: null, legend, scale: found.scale };
    const opacity = { condition: { test: "datum.ahead", value: 0.35 }, value: 1 };
    const contrast = { condition: { test: "datum.strong", value: ink("--paper") }, value: ink("--ink") };
    const cells = { mark: { type: "rect", aria: false }, encoding: { ...shared, color, opacity } };
    const texts = { mark: { type: "text", fontSize: wide < 34 ? 9 : 11, aria: false }, encoding: { ...shared, text: nominal("short"), color: contrast } };
    const layer = wide < 26 ? [cells] : [cells, texts];
    const spec = { data: { name: "cells" }, width: { step: wide }, height: { step: Math.min(36, Math.max(18, wide)) }, layer };
    draw(box, spec, { cells: found.cells }, `${found.caption}: ${found.note}`);
    const shown = new Map(found.cells.map((cell) => [`${cell.i} ${cell.j}`, cell.shown]));
    asTable(element, found.caption, () => [
      [found.corner, ...found.columns],
      found.rows.map((name, i) => [name, ...found.columns.map((_, j) => shown.get(`${i} ${j}`) || "–")]),
    ]);
  };
  // Names that stand twice would share a column.
  const apart = (names) => names.map((name, i) => (names.indexOf(name) < i ? `${name} (${i + 1})` : name));

  // The cells of nested values that are known; `read` adds to each what it shows.
  const cellsOf = (values, columns, rows, read) =>
    (values || []).flatMap((line, i) => line.map((value, j) => ({ value, i, j, x: columns[j], y: rows[i], ahead: false })))
      .filter(({ value }) => value !== null && value[0] !== null)
      .map((cell) => ({ ...cell, ...read(cell) }));

  // ---- the accuracy matrix ----
  const afterName = (after) => (after ? `after ${after}` : "before");
  const matrixOf = (method, run, setting) => {
    const { afters, cells, low, tasks } = data.matrix;
    const found = (cells[setting][method] || {})[run];
    const bottom = low[setting];
    const [columns, rows] = [apart(tasks[run]), afters[setting].map(afterName)];
    return {
      caption: method,
      note: `${data.matrix.settings[setting]}, ${run}${found ? "" : ": not run"}`,
      corner: "Tasks learnt",
      margin: 64,
      columns,
      rows,
      cells: cellsOf(found, columns, rows, ({ value, i, j, x, y }) => {
        const ahead = j + 1 > afters[setting][i];
        const strong = !ahead && (value - bottom) / (100 - bottom) > 0.55;
        return { ahead, strong, what: `${x}, ${y}${ahead ? ", not yet learnt" : ""}`, short: value.toFixed(value < 99.95 ? 1 : 0), shown: `${show(value)} %` };
      }),
      scale: { domain: [bottom, 100] },
    };
  };
  const drawMatrix = () => {
    const [first, second] = [chosen("matrix-method"), chosen("matrix-beside")];
    const methods = second && second !== first ? [first, second] : [first];
    $("matrix-grids").replaceChildren();
    methods.forEach((method) => grid($("matrix-grids"), matrixOf(method, chosen("matrix-run"), chosen("matrix-setting"))));
  };

  // ---- gradients of pairs of tasks ----
  const drawInterference = () => {
    const { tasks, top, cells } = data.interference;
    const [method, after] = [chosen("interference-method"), chosen("interference-after")];
    const names = apart(tasks);
    const written = cellsOf(cells[method][after], names, names, ({ value: [cosine, dot], x, y }) => ({
      value: Math.max(-top, Math.min(top, cosine)),
      strong: Math.abs(cosine) > 0.6 * top,
      what: `${y} and ${x}`,
      short: cosine.toFixed(2).replace("-", "−"),
      shown: `cosine ${show(cosine)}, dot product ${show(dot)}`,
    }));
    $("interference-grids").replaceChildren();
    grid($("interference-grids"), {
      caption: method,
      note: `Cosine after ${after} learnt${written.length ? "" : ": not measured"}`,
      corner: "Task",
      margin: 120,
      columns: names,
      rows: names,
      cells: written,
      scale: { domain: [-top, 0, top], range: [palette("series")[1], palette("ramp")[0], palette("series")[0]] },
    });
  };

  // ---- gates: weights of tasks and blocks, and what is measured of each task ----
  const drawGate = () => {
    const { tasks, times, blocks: called, cells, lines: panels } = data.gate;
    const method = chosen("gate-method");
    const names = apart(tasks);
    const blocks = called[method].map((_, j) => String(j + 1));
    $("gate-grids").replaceChildren();
    Object.entries(cells[method]).forEach(([time, found]) => {
      const written = cellsOf(found, blocks, names, (cell) => ({
        strong: cell.value > 0.55,
        what: `rows of ${cell.y}, ${called[method][cell.j]}`,
        short: cell.value.toFixed(2),
        shown: show(cell.value),
      }));
      grid($("gate-grids"), {
        caption: `${method}, ${times[time]}`,
        note: `Mean weight of each block (columns) in each task (rows)${written.length ? "" : ": not measured"}`,
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
    drawLines($("diagnostics-lines"), panels.filter((panel) => panel.points.length));
  };

  // What each part draws into, and the fields that choose; parts that the page lacks are left out.
  const parts = [
    [drawMatrix, ["matrix-grids", "matrix-method", "matrix-beside", "matrix-run", "matrix-setting"]],
    [drawCurves, ["curves-lines", "curves-setting"]],
    [drawDiagnostics, ["diagnostics-lines", "diagnostics-method", "diagnostics-task"]],
    [drawInterference, ["interference-grids", "interference-method", "interference-after"]],
    [drawGate, ["gate-grids", "gate-method"]],
  ].filter(([, [box]]) => $(box));
  const start = () => parts.forEach(([drawPart]) => drawPart());
  parts.forEach(([drawPart, [, ...fields]]) => fields.forEach((id) => $(id).addEventListener("change", drawPart)));
  redraw(start, () => parts.filter(([, [box]]) => box.endsWith("-grids")).forEach(([drawPart]) => drawPart()));
  start();
})();
