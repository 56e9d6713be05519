(() => {
  const data = JSON.parse(document.getElementById("regard-data").textContent);
  const { charts, colours } = data;
  const $ = (id) => document.getElementById(id);
  const { dark, make, panelLines, drawPanels, drawMap, redraw } = drawing(colours);

  // ---- lines over fractions ----
  const lines = (panel) => {
    const { ticks } = panel;
    const spec = panelLines(charts.fractions, panel);
    const label = `${JSON.stringify(ticks.names)}[indexof(${JSON.stringify(ticks.places)}, datum.value)]`;
    for (const layer of spec.layer) Object.assign(layer.encoding.x.axis, { values: ticks.places, labelExpr: label });
    return spec;
  };
  const drawLines = (id) => {
    if ($(id)) drawPanels($(id), data[id], () => "fraction", () => "Dynamic heads", lines);
  };

  // ---- layers × heads ----
  const drawMaps = () => {
    const parent = $("maps");
    if (!parent) return;
    parent.replaceChildren();
    for (const map of data.maps) drawMap(parent, { ...map, scale: { domain: [0, map.last || 1], reverse: true } }, charts.map);
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
  redraw(start, drawMaps);
  start();
})();
