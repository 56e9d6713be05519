// What is decoded and selected: pure functions of the page's data.
const look = (() => {
  // Loops, as `from` takes ten times as long, and a long text has millions of numbers.
  const bytes = (text) => {
    const raw = atob(text);
    const values = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) values[i] = raw.charCodeAt(i);
    return values;
  };
  // The numbers of an array of the page, in one byte (log), two (float, the upper half of a float32), or as they are.
  const decode = ({ type, data }, { floor, steps }) => {
    const raw = bytes(data);
    if (type === "log") {
      const values = Float32Array.from({ length: 256 }, (_, code) => (code ? Math.exp(((code - 255) / steps) * -Math.log(floor)) : 0));
      const numbers = new Float32Array(raw.length);
      for (let i = 0; i < raw.length; i++) numbers[i] = values[raw[i]];
      return numbers;
    }
    const words = type === "index" ? new Uint16Array(raw.length / 2) : new Uint32Array(raw.length / 2);
    for (let i = 0; i < words.length; i++) words[i] = raw[2 * i] | (raw[2 * i + 1] << 8);
    return type === "index" ? words : new Float32Array(words.map((word) => word << 16).buffer);
  };
  const mean = (rows) => rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
  // A layer of a site, whose arrays are decoded when they are first asked for. Head -1 is the mean of all heads.
  const layerOf = (site, entry, scale) => {
    const cache = new Map();
    const array = (key, value) => {
      if (!cache.has(key)) cache.set(key, decode(value, scale));
      return cache.get(key);
    };
    const keys = site.tokens.length;
    const heads = [...Array(entry.heads).keys()];
    const alpha = (head) => (head < 0 ? array("mean", entry.mean) : array("alpha", entry.alpha).subarray(head * keys, (head + 1) * keys));
    const whole = (head, query) => array("weights", entry.weights).subarray((head * site.num_queries + query) * keys, (head * site.num_queries + query + 1) * keys);
    const hasRows = (head) => Boolean(entry.weights || (entry.rows && entry.rows[head]));
    // The weights of a query over all keys; null where the page has none.
    const row = (head, query) => {
      if (entry.weights) return head < 0 ? mean(heads.map((one) => whole(one, query))) : whole(head, query);
      if (!hasRows(head)) return null;
      const { index, weight } = entry.rows[head];
      const top = array(`index ${head}`, index).length / site.num_queries;
      const values = new Float32Array(keys);
      for (let i = query * top; i < (query + 1) * top; i++) {
        const value = array(`weight ${head}`, weight)[i];
        if (value) values[array(`index ${head}`, index)[i]] = value;
      }
      return values;
    };
    const column = (head, key) => Float32Array.from({ length: site.num_queries }, (_, query) => row(head, query)[key]);
    // The matrix as it is drawn: whole, or in tiles.
    const matrix = (head) => {
      const { tall, wide } = entry.tiles || { tall: site.num_queries, wide: keys };
      const all = entry.tiles ? array("tiles", entry.tiles) : array("weights", entry.weights);
      const one = (n) => all.subarray(n * tall * wide, (n + 1) * tall * wide);
      return { tall, wide, tiles: Boolean(entry.tiles), values: head < 0 ? mean(heads.map(one)) : one(head) };
    };
    return { number: entry.layer, heads: entry.heads, alpha, row, column, matrix, hasRows, value: () => array("value", entry.value) };
  };
  const most = (values) => values.reduce((top, value) => (value > top ? value : top), 0);
  const strongest = (values, count) => [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, count);
  // Some queries and the keys to which they attend most: what fits a picture of lines.
  const linesOf = (layer, head, queries, count) => {
    const rows = queries.map((query) => layer.row(head, query));
    const sums = mean(rows);
    const keys = strongest(sums, count).filter((key) => sums[key] > 0).sort((a, b) => a - b);
    return { keys, links: rows.flatMap((row, i) => keys.map((key) => [queries[i], key, row[key]])).filter((link) => link[2] > 0.01), shown: Math.min(1, keys.reduce((sum, key) => sum + sums[key], 0)) };
  };
  // What to do where the page has no rows of a head, or of the mean over heads (-1), which needs all weights.
  const hintOf = (number, head) => (head < 0
    ? "The page has rows of single heads alone, and none of their mean, which needs all weights: choose a head, or make the page with a larger --megabytes or a smaller --length. It has those of:"
    : `The page has no rows of this head; --heads ${number}.${head} adds them. It has those of:`);
  return { decode, layerOf, most, strongest, linesOf, hintOf };
})();

// The panes of the page; `open` draws looks in the place of those before, with what was chosen in them.
const lookPanes = (() => {
  const { data, make, ink, palette, mixed, legible, redraw, show } = regard;
  const box = regard.$("look");
  if (!data.looks || !box) return null;
  const WINDOW = 24;
  const svg = (tag, attributes, text = null, inside = []) => {
    const element = document.createElementNS(data.namespace, tag);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    if (text !== null) element.textContent = text;
    element.append(...inside);
    return element;
  };
  const css = (color) => `#${color.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
  const number = (value) => (value === 0 ? `< ${data.scale.floor}` : show(Number(value.toPrecision(3))));

  // ---- pictures to keep ----
  const keep = (name, address) => {
    const link = make("a", null, { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
  };
  const svgAddress = (text) => `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  const asPng = (name, text, width, height) => {
    const picture = new Image();
    picture.onload = () => {
      const canvas = make("canvas", null, { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
      keep(`${name}.png`, canvas.toDataURL("image/png"));
    };
    picture.src = svgAddress(text);
  };
  const button = (parent, text, act) => {
    const element = make("button", text, { type: "button", class: "save" });
    element.addEventListener("click", act);
    parent.append(element);
  };
  // Buttons that keep what `picture` returns: a width, a height and the parts of an SVG.
  const saveButtons = (parent, name, picture) => {
    const written = () => {
      const { width, height, parts } = picture();
      const paper = svg("rect", { width: "100%", height: "100%", fill: ink("--paper") });
      const whole = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, null, [paper, ...parts]);
      return { width, height, text: new XMLSerializer().serializeToString(whole) };
    };
    button(parent, "Save SVG", () => keep(`${name}.svg`, svgAddress(written().text)));
    button(parent, "Save PNG", () => { const { width, height, text } = written(); asPng(name, text, width, height); });
  };

  const panes = [];
  let linking = false;
  // Shows in the other panes what was chosen in one, as far as they have it.
  const share = (from, change) => {
    if (linking) return;
    linking = true;
    panes.forEach((pane) => { if (pane !== from) pane.take(change); });
    linking = false;
  };

  const makePane = (given, index, kept) => {
    const id = (name) => `${name}-${index}`;
    const root = make("div", null, { class: "look" });
    box.append(root);
    const labels = { alpha: "attention drawn (α)", row: "weights of the chosen query", column: "weights to the chosen key", hidden: "norm of hidden states", value: "norm of values" };
    const state = { site: 0, layer: 0, head: -1, color: "alpha", token: null };
    const fits = kept && kept.site < given.sites.length && kept.layer < given.sites[kept.site].layers.length;
    if (fits) Object.assign(state, kept, kept.token < given.sites[kept.site].tokens.length ? {} : { token: null, color: "alpha" });
    const site = () => given.sites[state.site];
    const layers = given.sites.map((one) => one.layers.map((entry) => look.layerOf(one, entry, data.scale)));
    // 1 for keys that enough queries see, or for all if none is; the α of the others says little.
    const eligible = given.sites.map((one) => {
      const marks = new Uint8Array(one.tokens.length).fill(1);
      if (one.few.length < one.tokens.length) one.few.forEach((key) => { marks[key] = 0; });
      return marks;
    });
    const layer = () => layers[state.site][state.layer];
    const asker = () => site().queries || site().tokens;

    // ---- controls ----
    root.append(make("h3", given.title));
    const form = make("form", null, { class: "controls", autocomplete: "off" });
    form.addEventListener("submit", (event) => event.preventDefault());
    const select = (name, title) => {
      const label = make("label", title, { for: id(name) });
      const field = make("select", null, { id: id(name) });
      label.append(field);
      form.append(label);
      field.addEventListener("change", () => set({ [name]: name === "color" ? field.value : Number(field.value) }));
      return { label, field };
    };
    const fields = { site: select("site", "Attention"), layer: select("layer", "Layer"), head: select("head", "Head"), color: select("color", "Color tokens by") };
    root.append(form);
    const fill = (name, options, chosen) => {
      fields[name].label.hidden = options.length < 2;
      fields[name].field.replaceChildren(...options.map(([value, text]) => make("option", text, { value, ...(String(value) === String(chosen) ? { selected: "" } : {}) })));
      fields[name].field.value = String(chosen);
    };

    // ---- boxes ----
    const tokenBox = make("div", null, { role: "group", "aria-label": "Tokens" });
    const says = make("p", null, { class: "says", "aria-live": "polite" });
    const marks = make("p", null, { class: "marks" });
    const tokenSave = make("div", null);
    const figs = make("div", null, { class: "figs" });
    root.append(tokenBox, says, marks, tokenSave, figs);
    const figure = (title) => {
      const element = make("figure", null);
      const words = make("figcaption", title);
      const note = make("span", null, { class: "note" });
      words.append(" ", note);
      const frame = make("div", null);
      const buttons = make("div", null);
      element.append(words, frame, buttons);
      figs.append(element);
      return { frame, note, buttons };
    };
    const [heads, matrix, lines] = ["Layers and heads", "Weights as a matrix", "Weights as lines"].map(figure);
    const canvasOf = (part, label) => {
      const canvas = make("canvas", null, { tabindex: "0", role: "img", "aria-label": label });
      part.frame.append(canvas);
      return canvas;
    };
    const headMap = canvasOf(heads, "Layers and heads: the arrow keys choose another head");
    const matrixMap = canvasOf(matrix, "The weights of a head: queries down, keys across; the arrow keys read them");
    let spans = [];
    let marked = { sinks: new Map(), massive: new Map() };

    const note = () => {
      const sinks = new Map();
      const massive = new Map();
      for (const [at, head, key, value] of site().sinks) {
        if (at === layer().number && (state.head < 0 || head === state.head)) sinks.set(key, [...(sinks.get(key) || []), [head, value]]);
      }
      for (const [at, key, value, channel] of site().massive) if (at === layer().number) massive.set(key, [value, channel]);
      marked = { sinks, massive };
    };
    const hiddenOf = () => site().hidden.find((one) => one.layer === layer().number);
    // What tokens are colored by now; null where the page does not have it.
    const shade = () => {
      if (state.color === "hidden") return hiddenOf() ? look.decode(hiddenOf().norm, data.scale) : null;
      if (state.color === "value") return layer().value();
      if (state.color === "row") return state.token === null || state.token >= site().num_queries ? null : layer().row(state.head, state.token);
      if (state.color === "column") return state.token === null || site().queries || !layer().hasRows(state.head) ? null : layer().column(state.head, state.token);
      return layer().alpha(state.head);
    };

    // ---- tokens ----
    // In cross-attention tokens are keys, and the chosen one is a query: that is chosen in the matrix.
    const choose = (token) => (site().queries ? tell(token) : set({ token: state.token === token ? null : token }));
    const drawTokens = () => {
      const { grid, tokens } = site();
      tokenBox.className = "";
      spans = tokens.map((name, i) => {
        const span = make("span", name, { class: "token", role: "button", tabindex: i ? "-1" : "0", "aria-label": `${i}: ${name}` });
        span.addEventListener("mouseenter", () => tell(i));
        span.addEventListener("focus", () => tell(i));
        span.addEventListener("click", () => choose(i));
        span.addEventListener("keydown", (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid ? grid.columns : 8, ArrowUp: grid ? -grid.columns : -8 }[event.key];
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(i); }
          if (!step) return;
          event.preventDefault();
          const next = spans[Math.min(spans.length - 1, Math.max(0, i + step))];
          span.tabIndex = -1;
          next.tabIndex = 0;
          next.focus();
        });
        return span;
      });
      const flow = make("div", null, { class: grid ? "tokens small" : "tokens" });
      const first = grid ? grid.first : tokens.length;
      const last = grid ? first + grid.rows * grid.columns : first;
      flow.append(...spans.slice(0, first), ...spans.slice(last));
      tokenBox.replaceChildren(flow);
      if (grid) {
        const patches = make("div", null, { class: "patches" });
        patches.style.gridTemplateColumns = `repeat(${grid.columns}, 1fr)`;
        patches.style.setProperty("--shape", `${grid.columns} / ${grid.rows}`);
        if (given.picture) patches.style.setProperty("--picture", `url(${given.picture})`);
        patches.append(...spans.slice(first, last));
        tokenBox.append(patches);
      }
    };
    const paint = () => {
      const values = shade();
      const top = values ? look.most(values) : 0;
      spans.forEach((span, i) => {
        const color = mixed(values && top ? Math.sqrt(values[i] / top) : 0);
        span.style.setProperty("--heat", css(color));
        span.style.setProperty("--share", `${Math.round(values && top ? (85 * values[i]) / top : 0)}%`);
        span.style.setProperty("--on", legible(color));
        span.classList.toggle("sink", marked.sinks.has(i));
        span.classList.toggle("massive", marked.massive.has(i));
        span.classList.toggle("special", site().special.includes(i));
        span.classList.toggle("chosen", !site().queries && i === state.token);
      });
      const patches = site().grid ? " On the image orange is in proportion." : "";
      const scale = values ? `Darkest is ${number(top)}; colors go by the square root.`.replace("Darkest", palette("ramp")[0] < "#8" ? "Brightest" : "Darkest") : "The page has no such numbers here: choose a token, or a head whose rows are kept.";
      marks.textContent = `${scale}${patches} Underlined: sink (α above ${given.epsilon}${state.head < 0 ? " in some head of the layer" : ""}). ▲: massive activation after the layer. Dashed: special token.`;
    };
    const tell = (i) => {
      const parts = [`${i}: ${site().tokens[i]}`, `α ${number(layer().alpha(state.head)[i])}`, `norm of values ${number(layer().value()[i])}`];
      if (hiddenOf()) parts.push(`norm of hidden states ${number(look.decode(hiddenOf().norm, data.scale)[i])}`);
      if (state.token !== null && (state.color === "row" || state.color === "column")) {
        const values = shade();
        if (values) parts.push(`weight ${number(values[i])}`);
      }
      if (marked.sinks.has(i)) parts.push(`sink of head ${marked.sinks.get(i).map(([head, value]) => `${head} (${show(value)})`).slice(0, 8).join(", ")}`);
      if (marked.massive.has(i)) parts.push(`massive activation ${show(marked.massive.get(i)[0])} in channel ${marked.massive.get(i)[1]}`);
      says.textContent = parts.join(" · ");
    };
    const tokenPicture = () => {
      const frame = tokenBox.getBoundingClientRect();
      let height = 0;
      const flow = tokenBox.querySelector(".tokens");
      const parts = spans.flatMap((span) => {
        const { left, top, width, height: tall } = span.getBoundingClientRect();
        const [x, y] = [left - frame.left, top - frame.top + (flow.contains(span) ? flow.scrollTop : 0)];
        height = Math.max(height, y + tall);
        const stroke = span.classList.contains("sink") ? { stroke: ink("--mark") } : {};
        const rect = svg("rect", { x, y, width, height: tall, rx: 3, fill: span.style.getPropertyValue("--heat"), ...stroke });
        if (span.closest(".patches")) {
          rect.setAttribute("fill", ink("--mark"));
          rect.setAttribute("fill-opacity", parseFloat(span.style.getPropertyValue("--share")) / 100);
          return [rect];
        }
        return [rect, svg("text", { x: x + 4, y: y + tall - 7, "font-family": "monospace", "font-size": 14, fill: span.style.getPropertyValue("--on") }, span.textContent)];
      });
      const patches = tokenBox.querySelector(".patches");
      if (patches && given.picture) {
        const { left, top, width, height: tall } = patches.getBoundingClientRect();
        parts.unshift(svg("image", { x: left - frame.left, y: top - frame.top, width, height: tall, preserveAspectRatio: "none", style: "filter: grayscale(.9)", href: given.picture }));
      }
      return { width: Math.ceil(frame.width), height: Math.ceil(height + 6), parts };
    };
    saveButtons(tokenSave, "tokens", tokenPicture);

    // ---- maps: a canvas of one pixel a number, drawn larger ----
    const raster = (canvas, wide, tall, value, room, chosen) => {
      const side = Math.max(1, Math.min(22, Math.floor(room / Math.max(wide, tall / 1.2))));
      canvas.width = wide * side;
      canvas.height = tall * side;
      const context = canvas.getContext("2d");
      const shades = Array.from({ length: 256 }, (_, i) => mixed(i / 255).reduce((all, channel, at) => all | (channel << (8 * at)), 255 << 24));
      const width = wide * side;
      const image = context.createImageData(width, tall * side);
      const pixels = new Int32Array(image.data.buffer); // red is the lowest byte of each
      for (let y = 0; y < tall; y++) {
        for (let x = 0; x < wide; x++) {
          const color = shades[Math.round(255 * Math.min(1, Math.max(0, value(y, x) || 0)))];
          pixels.fill(color, y * side * width + x * side, y * side * width + (x + 1) * side);
        }
        for (let v = 1; v < side; v++) pixels.copyWithin((y * side + v) * width, y * side * width, (y * side + 1) * width);
      }
      context.putImageData(image, 0, 0);
      if (chosen) {
        context.strokeStyle = ink("--mark");
        context.lineWidth = 2;
        context.strokeRect(chosen[1] * side + 1, chosen[0] * side + 1, chosen[2] * side - 2, chosen[3] * side - 2);
      }
    };
    const place = (canvas, event, wide, tall) => {
      const frame = canvas.getBoundingClientRect();
      const at = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
      return [at((event.clientY - frame.top) / frame.height, tall), at((event.clientX - frame.left) / frame.width, wide)];
    };
    const keyed = (canvas, move) => canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (step) { event.preventDefault(); move(...step); }
    });
    const ofHead = (at, head) => {
      const alpha = layers[state.site][at].alpha(head);
      if (state.token !== null && !site().queries && state.token < alpha.length) return alpha[state.token];
      const marks = eligible[state.site];
      let top = 0;
      for (let key = 0; key < alpha.length; key++) if (alpha[key] > top && marks[key]) top = alpha[key];
      return top;
    };
    const widest = () => Math.max(...layers[state.site].map((one) => one.heads));
    const room = () => Math.max(220, Math.min(560, figs.clientWidth > 640 ? figs.clientWidth / 2 - 20 : figs.clientWidth - 4));
    const drawHeads = () => {
      const all = layers[state.site];
      raster(headMap, widest(), all.length, (y, x) => (x < all[y].heads ? Math.sqrt(ofHead(y, x)) : 0), room(), state.head < 0 ? [state.layer, 0, layer().heads, 1] : [state.layer, state.head, 1, 1]);
      const what = state.token === null || site().queries ? "the largest α of each head (of keys that enough queries see)" : `α of token ${state.token}`;
      heads.note.textContent = `Down: layers ${all[0].number} to ${all[all.length - 1].number}; across: heads from 0. Color: ${what}, from 0 to 1 by the square root.`;
    };
    headMap.addEventListener("mousemove", (event) => {
      const [at, head] = place(headMap, event, widest(), layers[state.site].length);
      if (head < layers[state.site][at].heads) says.textContent = `Layer ${layers[state.site][at].number}, head ${head}: ${number(ofHead(at, head))}`;
    });
    headMap.addEventListener("click", (event) => {
      const [at, head] = place(headMap, event, widest(), layers[state.site].length);
      if (head < layers[state.site][at].heads) set({ layer: at, head });
    });
    keyed(headMap, (down, right) => set({ layer: Math.min(layers[state.site].length - 1, Math.max(0, state.layer + down)), head: Math.min(layer().heads - 1, Math.max(-1, state.head + right)) }));

    let cursor = [0, 0];
    const matrixShown = () => layer().matrix(state.head);
    const range = (at, count, total) => {
      const first = Math.ceil((at * total) / count);
      const last = Math.ceil(((at + 1) * total) / count) - 1;
      return first === last ? `${first}` : `${first} to ${last}`;
    };
    const readMatrix = () => {
      const { tall, wide, tiles, values } = matrixShown();
      cursor = [Math.min(tall - 1, Math.max(0, cursor[0])), Math.min(wide - 1, Math.max(0, cursor[1]))];
      const value = values[cursor[0] * wide + cursor[1]];
      if (tiles) says.textContent = `Queries ${range(cursor[0], tall, site().num_queries)} give keys ${range(cursor[1], wide, site().tokens.length)} together ${number(value)}, on average`;
      else says.textContent = `Query ${cursor[0]} ${asker()[cursor[0]]} → key ${cursor[1]} ${site().tokens[cursor[1]]}: ${number(value)}`;
    };
    const drawMatrix = () => {
      const { tall, wide, tiles, values } = matrixShown();
      raster(matrixMap, wide, tall, (y, x) => Math.sqrt(values[y * wide + x]), room(), null);
      matrix.note.textContent = `Layer ${layer().number}, ${state.head < 0 ? "mean over heads" : `head ${state.head}`}. Down: queries; across: keys. Color: 0 to 1 by the square root.${tiles ? ` Each tile is ${Math.ceil(site().num_queries / tall)} queries × ${Math.ceil(site().tokens.length / wide)} keys at most: what these queries give these keys together, on average.` : ""}`;
    };
    matrixMap.addEventListener("mousemove", (event) => { const { tall, wide } = matrixShown(); cursor = place(matrixMap, event, wide, tall); readMatrix(); });
    matrixMap.addEventListener("click", (event) => {
      const { tall, wide, tiles } = matrixShown();
      const at = place(matrixMap, event, wide, tall)[0];
      set({ token: tiles ? Math.floor((at * site().num_queries) / tall) : at, color: layer().hasRows(state.head) ? "row" : state.color });
    });
    keyed(matrixMap, (down, right) => { cursor = [cursor[0] + down, cursor[1] + right]; readMatrix(); });
    const canvasPicture = (canvas) => () => ({ width: canvas.width, height: canvas.height, parts: [svg("image", { width: canvas.width, height: canvas.height, href: canvas.toDataURL("image/png") })] });
    saveButtons(heads.buttons, "heads", canvasPicture(headMap));
    saveButtons(matrix.buttons, "matrix", canvasPicture(matrixMap));

    // ---- lines ----
    const linesPicture = () => {
      const first = Math.max(0, Math.min(site().num_queries - WINDOW, (state.token === null ? 0 : Math.min(state.token, site().num_queries - 1)) - WINDOW / 2));
      const queries = [...Array(Math.min(WINDOW, site().num_queries)).keys()].map((i) => i + Math.floor(first));
      const chosen = state.token !== null && queries.includes(state.token) ? state.token : null;
      const found = look.linesOf(layer(), state.head, queries, WINDOW);
      const [width, step] = [380, 17];
      const short = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text);
      const label = (x, anchor, i, name, at, mark) => {
        const text = svg("text", { x, y: i * step + 15, "text-anchor": anchor, "font-family": "monospace", "font-size": 11, fill: ink(mark ? "--mark" : "--ink") }, short(`${at} ${name}`));
        text.addEventListener("click", () => choose(at));
        return text;
      };
      const links = found.links.filter(([query]) => chosen === null || query === chosen).map(([query, key, value]) => {
        const ends = { x1: 128, y1: queries.indexOf(query) * step + 11, x2: 252, y2: found.keys.indexOf(key) * step + 11 };
        const look = { stroke: ink("--accent"), "stroke-width": (0.5 + 3 * value).toFixed(2), "stroke-opacity": Math.min(1, 0.06 + value).toFixed(3) };
        return svg("line", { ...ends, ...look }, null, [svg("title", {}, `${asker()[query]} → ${site().tokens[key]}: ${number(value)}`)]);
      });
      const left = queries.map((query, i) => label(124, "end", i, asker()[query], query, query === chosen));
      const right = found.keys.map((key, i) => label(256, "start", i, site().tokens[key], key, marked.sinks.has(key)));
      return { width, height: Math.max(queries.length, found.keys.length) * step + 8, parts: [...links, ...left, ...right], found, queries };
    };
    const drawLines = () => {
      lines.buttons.hidden = !layer().hasRows(state.head);
      if (!layer().hasRows(state.head)) {
        lines.frame.replaceChildren();
        lines.note.textContent = look.hintOf(layer().number, state.head);
        layers[state.site].forEach((one, at) => [...Array(one.heads).keys()].filter(one.hasRows).forEach((head) => button(lines.frame, `layer ${one.number}, head ${head}`, () => set({ layer: at, head }))));
        return;
      }
      const { width, height, parts, found, queries } = linesPicture();
      lines.frame.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Weights as lines between tokens" }, null, parts));
      lines.note.textContent = `Left: queries ${queries[0]} to ${queries[queries.length - 1]}, around the chosen token; right: the ${found.keys.length} keys that draw most of them, ${(100 * found.shown).toFixed(0)} % of their attention. Weights above 0.01; thick is strong.`;
    };
    saveButtons(lines.buttons, "lines", linesPicture);

    const drawAll = () => { note(); paint(); drawHeads(); drawMatrix(); drawLines(); };
    const refill = () => {
      fill("site", given.sites.map((one, i) => [i, one.site]), state.site);
      fill("layer", layers[state.site].map((one, i) => [i, String(one.number)]), state.layer);
      fill("head", [[-1, "mean over heads"], ...Array.from({ length: layer().heads }, (_, i) => [i, String(i)])], state.head);
      fill("color", Object.entries(labels), state.color);
    };
    const set = (change) => {
      const moved = change.site !== undefined && change.site !== state.site;
      Object.assign(state, change);
      if (moved) Object.assign(state, { layer: Math.min(state.layer, layers[state.site].length - 1), token: null });
      state.head = Math.min(state.head, layer().heads - 1);
      if (change.token !== undefined && change.token !== null && state.color === "alpha" && layer().hasRows(state.head)) state.color = "row";
      if (change.token === null && ["row", "column"].includes(state.color)) state.color = "alpha";
      if (moved) drawTokens();
      refill();
      drawAll();
      if (state.token !== null) tell(state.token);
      share(pane, change);
    };
    // Takes what was chosen in the other pane, if this one has it; tokens are each pane's own.
    const take = ({ site: at, layer: one, head, color }) => {
      const change = Object.fromEntries(Object.entries({ layer: one, head, color }).filter(([, value]) => value !== undefined));
      if (at !== undefined && at < given.sites.length) change.site = at;
      if (change.layer >= layers[change.site ?? state.site].length) delete change.layer;
      if (Object.keys(change).length) set(change);
    };
    const pane = { take, drawAll, state };
    drawTokens();
    refill();
    drawAll();
    return pane;
  };
  const open = (looks) => {
    const kept = panes.splice(0).map((pane) => pane.state);
    box.replaceChildren();
    box.classList.toggle("two", looks.length > 1);
    looks.forEach((given, index) => panes.push(makePane(given, index, kept[index])));
  };
  open(data.looks);
  redraw(() => panes.forEach((pane) => pane.drawAll()), () => panes.forEach((pane) => pane.drawAll()));
  return { open, choose: (change) => panes.forEach((pane) => pane.take(change)) };
})();
