(() => {
  const data = JSON.parse(document.getElementById("regard-data").textContent);
  const { charts, colours } = data;
  const $ = (id) => document.getElementById(id);
  const { dark, make, copy, order, draw, figure, asTable, legend, table } = drawing(colours);
  const DASHED = [5, 3];

  // ---- lines over fractions ----
  const lines = (panel) => {
    const { points, ticks } = panel;
    const spec = copy(charts.fractions);
    const names = order(points, "series");
    const inks = colours.series.light.length;
    const dashes = names.map((_, i) => (i < inks ? [1, 0] : DASHED));
    const label = `${JSON.stringify(ticks.names)}[indexof(${JSON.stringify(ticks.places)}, datum.value)]`;
    if (points.every((point) => point.low === null)) spec.layer.shift(); // no intervals to draw
    for (const layer of spec.layer) {
      const { x, color, strokeDash } = layer.encoding;
      color.scale = { domain: names };
      if (strokeDash) strokeDash.scale = { domain: names, range: dashes };
      Object.assign(x.axis, { values: ticks.places, labelExpr: label });
    }
    return { ...spec, width: "container", height: 190, autosize: { type: "fit-x", contains: "padding" } };
  };
  const drawLines = (id) => {
    const parent = $(id);
    if (!parent) return;
    parent.replaceChildren();
    // Panels with the same lines share one legend above them.
    const shared = data[id].length > 1 && new Set(data[id].map((panel) => order(panel.points, "series").join("\n"))).size === 1;
    if (shared) legend(parent, data[id][0].points, "dashed");
    for (const panel of data[id]) {
      const { element, box } = figure(parent, panel.caption, panel.note);
      if (!shared) legend(element, panel.points, "dashed");
      draw(box, lines(panel), { points: panel.points }, `${panel.caption}, ${panel.note}, by fraction of dynamic heads`);
      asTable(element, panel.caption, () => table(panel.points, "fraction", "Dynamic heads"));
    }
  };

  // ---- layers × heads ----
  const drawMaps = () => {
    const parent = $("maps");
    if (!parent) return;
    parent.replaceChildren();
    for (const map of data.maps) {
      const { element, box } = figure(parent, map.caption, "");
      const spec = copy(charts.map);
      const room = Math.max(200, element.clientWidth - 64);
      const wide = Math.min(36, Math.max(10, Math.floor(room / map.heads.length)));
      Object.assign(spec, { width: { step: wide }, height: { step: Math.min(30, Math.max(12, wide)) } });
      const [fill] = spec.layer;
      const gap = { paddingInner: wide > 12 ? 0.06 : 0, paddingOuter: 0 };
      fill.mark.cursor = "default";
      fill.encoding.color.scale = { domain: [0, map.last || 1], reverse: true };
      fill.encoding.x.scale = { domain: map.heads, ...gap };
      fill.encoding.y.scale = { domain: map.layers, ...gap };
      draw(box, { ...spec, layer: [fill] }, { cells: map.cells }, `${map.caption} of each head: layers by heads`);
      const shown = new Map(map.cells.map((cell) => [`${cell.layer} ${cell.x}`, cell.shown]));
      asTable(element, map.caption, () => [
        ["Layer", ...map.heads.map((head) => `Head ${head}`)],
        map.layers.map((layer) => [String(layer), ...map.heads.map((head) => shown.get(`${layer} ${head}`) || "–")]),
      ]);
    }
  };

  // ---- constant matrices ----
  const ink = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const shade = (ramp, level) => {
    const at = (level / 255) * (ramp.length - 1);
    const low = Math.min(Math.floor(at), ramp.length - 2);
    return ramp[low].map((from, i) => Math.round(from + (ramp[low + 1][i] - from) * (at - low)));
  };
  const paint = (canvas, picture) => {
    const ramp = colours.ramp[dark.matches ? "dark" : "light"].map(ink);
    const [rows, columns] = picture.size;
    Object.assign(canvas, { width: columns, height: rows });
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    [...atob(picture.shades)].forEach((character, i) => image.data.set([...shade(ramp, character.charCodeAt(0)), 255], 4 * i));
    context.putImageData(image, 0, 0);
  };
  const drawPictures = () => {
    const parent = $("pictures");
    if (!parent) return;
    parent.replaceChildren();
    for (const picture of data.pictures) {
      const element = make("figure", null);
      const words = make("figcaption", picture.caption);
      words.append(" ", make("span", picture.note, { class: "note" }));
      const canvas = make("canvas", null, { role: "img", "aria-label": `${picture.caption}: ${picture.note}` });
      paint(canvas, picture);
      element.append(words, canvas);
      parent.append(element);
    }
  };

  const start = () => {
    ["scores", "orders", "cost"].forEach(drawLines);
    drawMaps();
    drawPictures();
  };
  dark.addEventListener("change", start);
  let width = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (window.innerWidth !== width) { width = window.innerWidth; drawMaps(); }
    }, 200);
  });
  start();
})();
