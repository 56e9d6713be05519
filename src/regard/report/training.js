(() => {
  const data = JSON.parse(document.getElementById("regard-data").textContent);
  const { charts, colours, panels, maps } = data;
  const { show, panelLines, drawPanels, drawMap, redraw } = drawing(colours);

  // ---- lines ----
  const TITLES = { step: "Step", layer: "Layer", position: "Position", tasks: "Tasks learnt" };
  const lines = (panel) => panelLines(charts[panel.axis], panel);
  const drawLines = () => {
    for (const [id, group] of Object.entries(panels))
      drawPanels(document.getElementById(id), group, (panel) => panel.axis, (panel) => TITLES[panel.axis], lines);
  };

  // ---- layers × heads at one step ----
  const drawMaps = () => {
    const parent = document.getElementById("maps");
    if (!parent) return;
    const slider = document.getElementById("step");
    parent.replaceChildren();
    for (const map of maps) {
      const at = Math.min(Number(slider.value), map.steps.length - 1);
      const cells = map.layers.flatMap((layer, i) => map.heads.map((x, j) => ({ layer, x, value: map.values[at][i][j] })));
      const known = cells.filter((cell) => cell.value !== null).map((cell) => ({ ...cell, shown: show(cell.value) }));
      const step = map.steps[at].toLocaleString("en");
      document.getElementById("step-shown").textContent = step;
      slider.setAttribute("aria-valuetext", `step ${step}`);
      drawMap(parent, { ...map, caption: `${map.caption}, step ${step}`, cells: known, scale: { domain: [0, map.top] } }, charts.map);
    }
  };

  const start = () => {
    drawLines();
    drawMaps();
  };
  if (document.getElementById("maps")) document.getElementById("step").addEventListener("input", drawMaps);
  redraw(start, drawMaps);
  start();
})();
