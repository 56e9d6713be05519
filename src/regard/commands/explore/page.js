// The fields, the heads and the table of `regard explore`. What it knows is one state and those before it; each change
// asks the server for all that is shown. Whatever comes from there is put in as text.
(() => {
  const { data, make, show } = regard;
  const given = data.explore;
  const box = regard.$("explore");
  if (!given || !box || !lookPanes) return;
  const DEPTH = 200;
  const PAUSE = 400;
  let now = { text: given.text, pair: "", heads: {}, stage: given.stages.length - 1 };
  const past = [];
  let busy = false;
  let stale = false;
  let answers = 0;

  // ---- fields ----
  const labelled = (parent, title, field, css = "") => {
    const label = make("label", title, { for: field.id, class: css });
    label.append(field);
    parent.append(label);
    return field;
  };
  const area = (id, title) => labelled(box, title, make("textarea", null, { id, rows: "2", maxlength: given.characters, spellcheck: "false" }), "wide");
  const button = (parent, id, text, act) => {
    const element = make("button", text, { type: "button", class: "save", id });
    element.addEventListener("click", act);
    parent.append(element);
    return element;
  };
  const choice = (parent, id, title, groups) => {
    const field = labelled(parent, title, make("select", null, { id }));
    Object.entries(groups).filter(([, options]) => options.length).forEach(([name, options]) => {
      const group = make("optgroup", null, { label: name });
      group.append(...options.map(([value, text]) => make("option", text, { value })));
      field.append(group);
    });
    return field;
  };
  const text = area("text", "Text");
  const pair = given.reads_pairs ? area("pair", "Second text, if any") : null;
  const row = make("div", null, { class: "controls" });
  const named = (names) => names.map((name) => [name, name]);
  box.append(row);
  const operation = choice(row, "operation", "Replace heads by", { Constants: named(given.constants), Window: [["window", "the nearest tokens"]], Operations: named(given.operations) });
  const width = labelled(row, "Tokens of the window", make("input", null, { id: "width", type: "number", min: "1", value: "4" }));
  const fitWidth = () => { width.parentElement.hidden = operation.value !== "window"; };
  operation.addEventListener("change", fitWidth);
  fitWidth();
  const stage = given.stages.length > 1 ? choice(row, "stage", "Model", { Stages: given.stages.map((name, i) => [i, name]) }) : null;
  const buttons = make("div", null, { class: "row" });
  box.append(buttons);
  const read = button(buttons, "read", "Read", () => change({ text: text.value, pair: pair ? pair.value : "" }));
  const undo = button(buttons, "undo", "Undo", () => back());
  const reset = button(buttons, "reset", "Restore all heads", () => change({ heads: {} }));
  const said = make("p", null, { class: "said", role: "status", id: "said" });
  const table = make("div", null, { class: "scroll", id: "prediction", tabindex: "0", role: "region", "aria-label": "Prediction" });
  const grid = make("div", null, { class: "heads", id: "heads", role: "group", "aria-label": "Heads" });
  box.append(said, table, grid);
  const say = (words, wrong = false) => { said.textContent = words; said.classList.toggle("wrong", wrong); };

  // ---- heads ----
  const chosen = () => (operation.value === "window" ? `softmax+window=${Math.max(1, Math.round(Number(width.value) || 1))}` : operation.value);
  const keysOf = (site, layer, number) => [...Array(number).keys()].map((head) => `${site}.${layer}.${head}`);
  const toggled = (keys) => {
    const heads = { ...now.heads };
    const all = keys.every((key) => heads[key] === chosen());
    keys.forEach((key) => { if (all) delete heads[key]; else heads[key] = chosen(); });
    return heads;
  };
  const sites = new Set(given.heads.map(([site]) => site));
  const cells = new Map();
  given.heads.forEach(([site, layer, number], at) => {
    const line = make("div", null);
    const keys = keysOf(site, layer, number);
    const name = sites.size > 1 ? `${site} ${layer}` : `layer ${layer}`;
    const whole = make("button", name, { type: "button", class: "layer", title: `all heads of ${name}` });
    whole.addEventListener("click", () => change({ heads: toggled(keys) }));
    line.append(whole, ...keys.map((key, head) => {
      const cell = make("button", String(head), { type: "button", "data-head": key });
      cell.addEventListener("click", () => {
        change({ heads: toggled([key]) });
        const first = given.heads.findIndex(([other]) => other === site);
        lookPanes.choose({ site: [...sites].indexOf(site), layer: at - first, head });
      });
      cells.set(key, [cell, `${name}, head ${head}`]);
      return cell;
    }));
    grid.append(line);
  });
  // Every field as the state has it.
  const sync = () => {
    text.value = now.text;
    if (pair) pair.value = now.pair;
    if (stage) stage.value = String(now.stage);
    undo.disabled = !past.length;
    reset.disabled = !Object.keys(now.heads).length;
    cells.forEach(([cell, name], key) => {
      const other = now.heads[key];
      const window = other && other.startsWith("softmax+window=");
      cell.textContent = other ? (window ? other.replace("softmax+window=", "≤") : other.slice(0, 4)) : key.slice(key.lastIndexOf(".") + 1);
      cell.setAttribute("aria-pressed", String(Boolean(other)));
      cell.setAttribute("aria-label", other ? `${name}: ${other}` : name);
      cell.title = cell.getAttribute("aria-label");
    });
  };

  // ---- answers ----
  const percent = (value) => (value === null ? "–" : `${show(Number((100 * value).toPrecision(3)))} %`);
  const plain = (value) => (value === null ? "–" : show(Number(value.toPrecision(4))));
  const tabulate = ({ title, columns, rows, more, notes }) => {
    const replaced = Object.keys(now.heads).length > 0;
    const kept = replaced ? columns : columns.slice(0, -1);
    const body = make("tbody", null);
    const line = (name, values, write, unit) => {
      const cellsOf = values.slice(0, kept.length).map((value) => make("td", write(value)));
      const [before, after] = values.slice(kept.length - 2);
      if (kept.length > 1) {
        const gap = before === null || after === null ? null : after - before;
        const shown = gap === null ? "–" : `${gap > 0 ? "+" : ""}${unit(gap)}`;
        cellsOf.push(make("td", shown, { class: gap > 0 ? "up" : gap < 0 ? "down" : "" }));
      }
      const element = make("tr", null);
      element.append(make("th", name, { scope: "row" }), ...cellsOf);
      body.append(element);
    };
    rows.forEach(([name, values]) => line(name, values, percent, (gap) => `${show(Number((100 * gap).toPrecision(3)))} points`));
    more.forEach(([name, values]) => line(name, values, plain, plain));
    const head = make("tr", null);
    [title, ...kept, ...(kept.length > 1 ? ["difference"] : [])].forEach((name) => head.append(make("th", name, { scope: "col" })));
    const element = make("table", null);
    const top = make("thead", null);
    top.append(head);
    element.append(top, body);
    table.replaceChildren(...(rows.length || more.length ? [element] : []), ...notes.map((note) => make("p", note, { class: "about" })));
  };
  const ask = async () => {
    if (busy) { stale = true; return; }
    busy = true;
    const sent = now;
    say("Reading …");
    try {
      const reply = await fetch("answer", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) });
      const told = await reply.json();
      if (reply.status === 429) { stale = true; await new Promise((done) => setTimeout(done, PAUSE)); }
      else if (told.error) say(told.error, true);
      else if (sent === now) {
        tabulate(told.prediction);
        lookPanes.open([told.look]);
        say([`Read in ${Math.round(1000 * told.seconds)} ms.`, ...told.look.notes].join(" "));
      }
    } catch {
      say("The server does not answer; is `regard explore` still running?", true);
    }
    busy = false;
    if (stale) { stale = false; ask(); return; }
    answers += 1;
    box.dataset.answers = String(answers);
  };
  const change = (part) => {
    past.push(now);
    if (past.length > DEPTH) past.shift();
    now = { ...now, text: text.value, pair: pair ? pair.value : "", ...part }; // what was typed is read too
    sync();
    ask();
  };
  const back = () => {
    if (!past.length) return;
    now = past.pop();
    sync();
    ask();
  };
  if (stage) stage.addEventListener("change", () => change({ stage: Number(stage.value) }));
  document.addEventListener("keydown", (event) => {
    const typing = ["TEXTAREA", "INPUT"].includes(event.target.tagName);
    if (!event.ctrlKey && !event.metaKey) return;
    if (event.key === "z" && !typing) { event.preventDefault(); back(); }
    if (event.key === "Enter" && event.target.tagName === "TEXTAREA") { event.preventDefault(); read.click(); }
  });
  sync();
  ask();
})();
