(() => {
  const { data, $, show, make, tableOf, drawLines, drawMap, redraw } = regard;
  const { runs, sites, measures } = data;
  const severalSites = Object.keys(sites).length > 1;
  const chosen = { measure: null, step: 0, profile: null, layer: null, head: null };
  let mapViews = [];

  // ---- words ----
  // Relative errors below this are those of floating-point sums, as `ROUNDING` of regard.report.labels has it.
  const ROUNDING = 1e-9;
  const withError = (value, error, unit) => {
    const margin = Math.abs(error) <= ROUNDING * Math.abs(value) ? 0 : error;
    return show(value) + (error === null || error === undefined ? "" : ` ± ${show(margin)}`) + (unit === "%" ? " %" : "");
  };
  const nameOf = (m) => m.title + (m.epsilon === null ? "" : `, ε = ${m.epsilon}`);
  const fullName = (m) => nameOf(m) + (severalSites ? `, ${sites[m.site]}` : "");
  const inUnit = (m) => (m.unit ? ` (${m.unit})` : "");

  // ---- reading blocks ----
  const first = (m) => m.runs.find((run) => run !== null);
  const kind = (m) => {
    const run = first(m);
    if (run.lh || run.lhp) return "head";
    return run.lp ? "position" : null;
  };
  const known = (run, name) => (run && run[name]) || null;
  const mean = (values) => {
    const there = values.filter((value) => value !== null);
    return there.length ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
  };
  const union = (lists) => [...new Set(lists.flat())].sort((a, b) => a - b);
  const axis = (m, name, key) => union(m.runs.map((run) => (known(run, name) ? run[name][key] : [])));

  // The choices of the position slider: null is the whole sequence.
  const steps = (m) => {
    if (kind(m) !== "head") return [null];
    const whole = m.runs.some((run) => known(run, "lh"));
    return [...(whole ? [null] : []), ...axis(m, "lhp", "p")];
  };
  // [value, error] of one head, or of one layer and position; null where not measured.
  const at = (run, layer, x, step, columns) => {
    const name = columns === "position" ? "lp" : step === null ? "lh" : "lhp";
    const block = known(run, name);
    if (!block) return null;
    const places = [block.l.indexOf(layer), block[columns === "position" ? "p" : "h"].indexOf(x)];
    if (name === "lhp") places.push(block.p.indexOf(step));
    if (places.includes(-1)) return null;
    const pick = (nested) => places.reduce((inner, place) => inner[place], nested);
    return [pick(block.v), block.e ? pick(block.e) : null];
  };
  const grid = (m) => {
    const columns = kind(m);
    const names = columns === "position" ? ["lp"] : ["lh", "lhp"];
    const over = (key) => union(names.map((name) => axis(m, name, key)));
    return { columns, layers: over("l"), xs: over(columns === "position" ? "p" : "h") };
  };
  const cells = (m, run, step) => {
    const { columns, layers, xs } = grid(m);
    const rows = [];
    for (const layer of layers)
      for (const x of xs) {
        const found = at(run, layer, x, step, columns);
        if (found && found[0] !== null)
          rows.push({ layer, x, value: found[0], number: show(found[0]), shown: withError(found[0], found[1], m.unit) });
      }
    return rows;
  };

  // ---- layers × heads ----
  const stepWords = (step) => (step === null ? "whole sequence" : `position ${step}`);
  const picked = () => ({ layer: chosen.layer, x: chosen.head });

  // The colour scale: from zero where the values start near it, to 100 for large percentages.
  const domain = (values, unit) => {
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low === high) return [Math.min(0, low), Math.max(0, high) || 1];
    return [low >= 0 && low < high / 2 ? 0 : low, unit === "%" && high > 60 ? 100 : high];
  };

  const drawMaps = () => {
    const m = chosen.measure;
    const { columns, layers, xs } = grid(m);
    const step = steps(m)[chosen.step];
    const each = m.runs.map((run) => (run ? cells(m, run, step) : []));
    const parent = $("maps");
    parent.replaceChildren();
    mapViews = [];
    const [title, short] = columns === "head" ? ["Head", "Head"] : ["Position", "Pos."];
    const what = `${fullName(m)}${columns === "head" ? `, ${stepWords(step)}` : ""}${inUnit(m)}`;
    const scale = { domain: domain(each.flat().map((row) => row.value), m.unit) };
    runs.forEach((name, r) => {
      const texts = { caption: runs.length > 1 ? `${name}: ${what}` : what, note: each[r].length ? "" : "not measured", title, short };
      const drawn = drawMap(parent, { ...texts, xs, layers, cells: each[r], scale, picked: picked() });
      if (!drawn) return;
      drawn.then((view) => {
        mapViews.push(view);
        view.addEventListener("click", (_, item) => { if (item && item.datum && "x" in item.datum) pick(item.datum.layer, item.datum.x); });
      });
    });
  };

  // ---- one head, over positions ----
  const profiles = () => measures.filter((m) => m.site === chosen.measure.site && kind(m) === kind(chosen.measure) && (first(m).lhp || first(m).lp));
  const drawProfile = () => {
    const columns = kind(chosen.measure);
    const m = chosen.profile;
    const where = `Layer ${chosen.layer}` + (columns === "head" ? `, head ${chosen.head}` : "");
    $("picked-title").textContent = where + (severalSites ? `, ${sites[chosen.measure.site]}` : "");
    const curves = (m ? m.runs : []).map((run, r) => {
      const block = known(run, columns === "head" ? "lhp" : "lp");
      const found = (block ? block.p : []).map((position) => [position, at(run, chosen.layer, columns === "head" ? chosen.head : position, position, columns)]);
      return { series: runs[r], number: r, points: found.filter(([, value]) => value).map(([position, value]) => point({ position }, ...value, m.unit)) };
    });
    drawLines($("profile"), m ? [panel(`${nameOf(m)} by position${inUnit(m)}`, "position", curves)] : []);
    drawNumbers(columns);
  };
  // The head of a run of a measure that the chosen one is, or reads: under grouped queries keys and values have fewer.
  const headOf = (run, own) => {
    const count = (one) => { const block = known(one, "lh") || known(one, "lhp"); return block ? Math.max(...block.h) + 1 : 0; };
    const [there, here] = [count(run), count(own)];
    return there >= here ? (there === here || !here ? chosen.head : -1) : Math.floor((chosen.head * there) / here);
  };
  const drawNumbers = (columns) => {
    const now = steps(chosen.measure)[chosen.step];
    const rows = [];
    for (const m of columns === "head" ? measures : []) {
      if (m.site !== chosen.measure.site || kind(m) !== "head") continue;
      const choices = steps(m);
      const step = choices.includes(now) && m === chosen.measure ? now : choices[0];
      const found = m.runs.map((run, r) => at(run, chosen.layer, headOf(run, chosen.measure.runs[r]), step, "head"));
      const label = nameOf(m) + (step === null ? "" : `, position ${step}`) + (m.unit === "%" ? "" : inUnit(m));
      rows.push([label, ...found.map((v) => (v ? withError(v[0], v[1], m.unit) : "–"))]);
    }
    $("head-numbers").replaceChildren(...(rows.length ? [tableOf(["Statistic", ...(runs.length > 1 ? runs : ["Value"])], rows)] : []));
  };

  // ---- lines ----
  const BAND = "band: ± standard error";
  const point = (place, value, error, unit) => {
    const sure = value !== null && error !== null && error !== undefined;
    return { ...place, value, low: sure ? value - error : null, high: sure ? value + error : null, shown: withError(value, error, unit) };
  };
  // A panel of curves {series, number, part, points}: an ink for each series by its number, which is the same in all
  // panels, and a stroke for each part; at one place alone there are dots without strokes, and inks tell all apart.
  const panel = (caption, axis, curves, note) => {
    const drawn = curves.filter((one) => one.points.length);
    const parts = [...new Set(drawn.map((one) => one.part))];
    const named = drawn.map((one) => ({ ...one, name: [one.series, one.part].filter(Boolean).join(", ") || runs[0] }));
    const points = named.flatMap((one) => one.points.map((p) => ({ ...p, series: one.name })));
    const inks = data.colors.series.light.length;
    const lines = named.map(({ name, number, part }) => [name, number % inks, (parts.indexOf(part) + Math.floor(number / inks)) % 3]); // strokes
    const styled = parts.length > 1 && new Set(points.map((p) => p[axis])).size === 1 ? {} : { lines };
    return { caption, note: note ?? (points.some((p) => p.low !== null) ? BAND : ""), axis, points, ...styled };
  };
  const seriesName = (r, site) => [runs.length > 1 ? runs[r] : "", severalSites ? sites[site] : ""].filter(Boolean).join(", ");
  const seriesNumber = (r, site) => Object.keys(sites).indexOf(site) * runs.length + r;

  // The curves of one measure in one run by layer, and what their band shows.
  const byLayer = (m, run) => {
    const write = (block, values, part, errors) => ({ part, points: block.l.map((layer, i) => point({ layer }, values[i], errors ? errors[i] : null, m.unit)) });
    if (run.l) return { curves: [write(run.l, run.l.v, "", run.l.e)], note: run.l.e ? BAND : "" };
    if (run.lh) {
      const curve = write(run.lh, run.lh.v.map(mean), "", null);
      if (runs.length > 1 || severalSites) return { curves: [curve], note: "mean over heads" };
      curve.points.forEach((p, i) => {
        const there = run.lh.v[i].filter((value) => value !== null);
        if (there.length) Object.assign(p, { low: Math.min(...there), high: Math.max(...there) });
      });
      return { curves: [curve], note: "mean over heads; band: lowest to highest head" };
    }
    const block = run.lhp || run.lp;
    if (!block) return null;
    const values = run.lhp ? block.v.map((heads) => mean(heads.map((head) => head[0]))) : block.v.map((row) => row[0]);
    const rest = run.rest ? [write(run.rest, run.rest.v, "mean of the others", null)] : [];
    return { curves: [write(block, values, `position ${block.p[0]}`, null), ...rest], note: run.lhp ? "mean over heads" : "" };
  };
  const byPosition = (m, run) => run.p && {
    curves: [{ points: run.p.p.map((position, i) => point({ position }, run.p.v[i], run.p.e ? run.p.e[i] : null, m.unit)) }],
    note: run.p.e ? BAND : "",
  };
  // A panel for each statistic that `read` finds in a run.
  const drawCurves = (id, axis, read) => {
    if (!$(id)) return;
    const groups = new Map();
    for (const m of measures) {
      const caption = nameOf(m) + inUnit(m);
      const found = m.runs.map((run, r) => {
        const one = run && read(m, run);
        return one && { note: one.note, curves: one.curves.map((curve) => ({ ...curve, series: seriesName(r, m.site), number: seriesNumber(r, m.site) })) };
      });
      groups.set(caption, [...(groups.get(caption) || []), ...found.filter(Boolean)]);
    }
    const drawn = [...groups].filter(([, found]) => found.length);
    drawLines($(id), drawn.map(([caption, found]) => panel(caption, axis, found.flatMap((one) => one.curves), found[0].note)));
  };
  const drawAllCurves = () => {
    drawCurves("curves", "layer", byLayer);
    drawCurves("models", "position", byPosition);
  };

  // ---- choosing ----
  const fill = (select, options, now) => {
    const groups = new Map();
    options.forEach((m) => {
      if (!groups.has(m.site)) groups.set(m.site, make("optgroup", null, { label: sites[m.site] || "model" }));
      groups.get(m.site).append(make("option", nameOf(m), { value: measures.indexOf(m) }));
    });
    select.replaceChildren(...(groups.size > 1 ? groups.values() : [...groups.values()].flatMap((group) => [...group.children])));
    if (now) select.value = String(measures.indexOf(now));
  };
  const pick = (layer, x) => {
    Object.assign(chosen, { layer, head: x });
    $("layer").value = layer;
    $("head").value = x;
    mapViews.forEach((view) => view.data("picked", [picked()]).runAsync());
    drawProfile();
  };
  const showStep = () => {
    const step = steps(chosen.measure)[chosen.step];
    $("step-shown").textContent = step === null ? "whole sequence" : step;
    $("step").setAttribute("aria-valuetext", stepWords(step));
  };
  const choose = (m) => {
    const { columns, layers, xs } = grid(m);
    const choices = steps(m);
    const before = chosen.measure && kind(chosen.measure) === columns;
    chosen.measure = m;
    chosen.step = 0;
    $("step").max = choices.length - 1;
    $("step").value = 0;
    $("step-box").hidden = choices.length < 2;
    showStep();
    $("about").textContent = m.description;
    const possible = profiles();
    chosen.profile = possible.includes(m) ? m : possible.find((other) => chosen.profile && other.statistic === chosen.profile.statistic) || possible[0] || null;
    fill($("profile-measure"), possible, chosen.profile);
    $("profile-box").hidden = possible.length < 2;
    $("head-box").hidden = columns !== "head";
    for (const [id, range] of [["layer", layers], ["head", xs]]) Object.assign($(id), { min: range[0], max: range[range.length - 1] });
    if (!before || !layers.includes(chosen.layer) || !xs.includes(chosen.head)) Object.assign(chosen, strongest(m));
    drawMaps();
    pick(chosen.layer, chosen.head);
  };
  const strongest = (m) => {
    const rows = m.runs.flatMap((run) => (run ? cells(m, run, steps(m)[0]) : []));
    const best = rows.reduce((a, b) => (b.value > a.value ? b : a), rows[0] || { layer: grid(m).layers[0], x: grid(m).xs[0] });
    return { layer: best.layer, head: best.x };
  };
  const typed = () => {
    const { layers, xs } = grid(chosen.measure);
    const [layer, x] = [Number($("layer").value), Number($("head").value)];
    if (layers.includes(layer) && xs.includes(x)) pick(layer, x);
  };

  const start = () => {
    drawAllCurves();
    const mapped = measures.filter((m) => kind(m) !== null);
    if (!mapped.length || !$("maps")) return;
    fill($("measure"), mapped, mapped[0]);
    $("measure").addEventListener("change", (event) => choose(measures[Number(event.target.value)]));
    $("step").addEventListener("input", (event) => {
      chosen.step = Number(event.target.value);
      showStep();
      drawMaps();
      drawNumbers(kind(chosen.measure));
    });
    $("profile-measure").addEventListener("change", (event) => { chosen.profile = measures[Number(event.target.value)]; drawProfile(); });
    $("layer").addEventListener("change", typed);
    $("head").addEventListener("change", typed);
    choose(mapped.find((m) => m.statistic === "sink_rate") || mapped[0]);
  };
  const again = () => {
    drawAllCurves();
    if (chosen.measure) { drawMaps(); drawProfile(); }
  };
  redraw(again, () => { if (chosen.measure) drawMaps(); });
  start();
})();
