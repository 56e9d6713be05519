(() => {
  const { data, $, palette, mixed, legible, ink, show, draw, figure, asTable, shortLabels, nominal, tooltip, drawLines, redraw } = regard;
  const selected = (id) => $(id).value;
  const drawCurves = () => drawLines($("curves-lines"), data.curves[selected("curves-setting")]);

  // ---- cells with their numbers ----
  const isWhite = (color) => legible(color) === "#ffffff";
  const drawGrid = (parent, { caption, note, corner = "Task", margin = 120, columns, rows, cells, scale }) => {
    const { element, box } = figure(parent, caption, note);
    const step = Math.min(56, Math.max(14, Math.floor(Math.max(180, element.clientWidth - margin) / columns.length)));
    const axis = { labelExpr: shortLabels(18), labelLimit: 180, ticks: false, domain: false };
    const side = (field, domain, more) => nominal(field, { sort: null, title: null, axis: { ...axis, ...more }, scale: { domain, paddingInner: 0.06, paddingOuter: 0 } });
    const x = side("x", columns, { orient: "top", labelAngle: -40, labelOverlap: false });
    const shared = { x, y: side("y", rows), tooltip: tooltip({ what: "cell", shown: "value" }) };
    const legend = { orient: "bottom", gradientLength: 160, gradientThickness: 8, tickCount: 3 };
    const color = { field: "value", type: "quantitative", title: null, legend, scale };
    const opacity = { condition: { test: "datum.ahead", value: 0.35 }, value: 1 };
    const contrast = { condition: [{ test: "datum.ahead", value: ink("--ink") }, { test: "datum.white", value: "#ffffff" }], value: "#000000" };
    const rects = { mark: { type: "rect", aria: false }, encoding: { ...shared, color, opacity } };
    const texts = { mark: { type: "text", fontSize: step < 34 ? 9 : 11, aria: false }, encoding: { ...shared, text: nominal("short"), color: contrast } };
    const layer = step < 26 ? [rects] : [rects, texts];
    draw(box, { data: { name: "cells" }, width: { step }, height: { step: Math.min(36, Math.max(18, step)) }, layer }, { cells }, `${caption}: ${note}`);
    const numbers = new Map(cells.map((cell) => [`${cell.i} ${cell.j}`, cell.shown]));
    asTable(element, caption, () => [
      [corner, ...columns],
      rows.map((name, i) => [name, ...columns.map((_, j) => numbers.get(`${i} ${j}`) || "–")]),
    ]);
  };
  const drawGrids = (id, grids) => {
    $(id).replaceChildren();
    grids.forEach((grid) => drawGrid($(id), grid));
  };
  // Equal names would share a column.
  const distinct = (names) => names.map((name, i) => (names.indexOf(name) < i ? `${name} (${i + 1})` : name));
  // The known cells of nested values; `describe` returns what a cell shows.
  const makeCells = (values, columns, rows, describe) =>
    (values || []).flatMap((line, i) => line.map((value, j) => ({ value, i, j, x: columns[j], y: rows[i], ahead: false })))
      .filter(({ value }) => value !== null && value[0] !== null)
      .map((cell) => ({ ...cell, ...describe(cell) }));

  // ---- the accuracy matrix ----
  const makeMatrix = (method, run, setting) => {
    const { settings, afters: { [setting]: afters }, low: { [setting]: low }, tasks, cells } = data.matrix;
    const values = (cells[setting][method] || {})[run];
    const [columns, rows] = [distinct(tasks[run]), afters.map((after) => (after ? `after ${after}` : "before"))];
    const describe = ({ value, i, j, x, y }) => {
      const ahead = j + 1 > afters[i];
      return { ahead, white: isWhite(mixed((value - low) / (100 - low))), what: `${x}, ${y}${ahead ? ", not yet learnt" : ""}`, short: value.toFixed(value < 99.95 ? 1 : 0), shown: `${show(value)} %` };
    };
    const note = `${settings[setting]}, ${run}${values ? "" : ": not run"}`;
    return { caption: method, note, corner: "Tasks learnt", margin: 64, columns, rows, cells: makeCells(values, columns, rows, describe), scale: { domain: [low, 100] } };
  };
  const drawMatrix = () => {
    const [first, second, run, setting] = ["method", "beside", "run", "setting"].map((name) => selected(`matrix-${name}`));
    const methods = second && second !== first ? [first, second] : [first];
    drawGrids("matrix-grids", methods.map((method) => makeMatrix(method, run, setting)));
  };

  // ---- gradients of pairs of tasks ----
  const drawInterference = () => {
    const { tasks, top, cells: byMethod } = data.interference;
    const [caption, after] = [selected("interference-method"), selected("interference-after")];
    const names = distinct(tasks);
    const cells = makeCells(byMethod[caption][after], names, names, ({ value: [cosine, dot], x, y }) => ({
      value: Math.max(-top, Math.min(top, cosine)),
      white: isWhite(mixed(Math.abs(cosine) / top, [palette("ramp")[0], palette("series")[cosine < 0 ? 1 : 0]])),
      what: `${y} and ${x}`,
      short: cosine.toFixed(2).replace("-", "−"),
      shown: `cosine ${show(cosine)}, dot product ${show(dot)}`,
    }));
    const note = `Cosine after ${after} learnt${cells.length ? "" : ": not measured"}`;
    const scale = { domain: [-top, 0, top], range: [palette("series")[1], palette("ramp")[0], palette("series")[0]], interpolate: "rgb" }; // not over the hues between, which are a third color
    drawGrids("interference-grids", [{ caption, note, columns: names, rows: names, cells, scale }]);
  };

  // ---- gates: weights of tasks and blocks, and what is measured of each task ----
  const drawGate = () => {
    const method = selected("gate-method");
    const { tasks, times, blocks: { [method]: blocks }, cells: { [method]: byTime }, lines } = data.gate;
    const [rows, columns] = [distinct(tasks), blocks.map((_, j) => String(j + 1))];
    drawGrids("gate-grids", Object.entries(byTime).map(([time, values]) => {
      const describe = ({ value, y, j }) => ({ white: isWhite(mixed(value)), what: `rows of ${y}, ${blocks[j]}`, short: value.toFixed(2), shown: show(value) });
      const cells = makeCells(values, columns, rows, describe);
      const note = `Mean weight of each block (columns) in each task (rows)${cells.length ? "" : ": not measured"}`;
      return { caption: `${method}, ${times[time]}`, note, columns, rows, cells, scale: { domain: [0, 1] } };
    }));
    drawLines($("gate-lines"), lines[method]);
  };

  // ---- diagnostics by layer ----
  const curve = (name, values, layers) => layers.map((layer, i) => ({ layer, series: name, part: "", value: values[i], low: null, high: null, shown: show(values[i]) }))
    .filter((point) => point.value !== null);
  const drawDiagnostics = () => {
    const { statistics, methods, layers, values } = data.diagnostics;
    const [method, task] = [selected("diagnostics-method"), selected("diagnostics-task")];
    const known = data.styles.filter(([name]) => methods.includes(name));
    const panels = Object.entries(statistics).map(([statistic, caption]) => {
      const by = values[statistic];
      const points = method
        ? ["before", "after"].flatMap((time) => curve(time, by[method][task][time], layers))
        : known.flatMap(([name]) => curve(name, by[name][task].after, layers));
      const note = method ? `${method}, ${task}` : `after the task, ${task}`;
      return { caption, note, axis: "layer", points, lines: method ? [["before", 4, 1], ["after", 0, 0]] : known };
    });
    drawLines($("diagnostics-lines"), panels.filter((panel) => panel.points.length));
  };

  // What each part draws into, and its fields; parts that the page lacks are left out.
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
