// Runs the scripts of a report page under node, on as much of a document as they use, and prints what they draw.
//
// Reads {tree, scripts} from standard input: the body as nested [tag, attributes, children], and the sources. Charts
// are not drawn: `vegaEmbed` notes the specification that it is given. After the start, each field is set to its
// first two values and its last one in turn. Prints {start, fields: {id: {value: figures}}}; figures as `figures` below makes them.
"use strict";
const assert = require("node:assert");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, parent: null, childNodes: [], attributes: {}, listeners: {}, properties: {} });
  }
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof Element) { node.remove(); node.parent = this; }
      this.childNodes.push(node instanceof Element ? node : String(node));
    }
  }
  remove() {
    if (this.parent) this.parent.childNodes = this.parent.childNodes.filter((node) => node !== this);
    this.parent = null;
  }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  after(node) {
    node.remove();
    this.parent.childNodes.splice(this.parent.childNodes.indexOf(this) + 1, 0, node);
    node.parent = this.parent;
  }
  get textContent() { return this.childNodes.map((node) => (node instanceof Element ? node.textContent : node)).join(""); }
  set textContent(text) { this.childNodes = [String(text)]; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return this.attributes[name] ?? null; }
  get id() { return this.attributes.id; }
  get clientWidth() { return 600; }
  walk() { return [this, ...this.children.flatMap((child) => child.walk())]; }
  querySelector(tag) { return this.walk().slice(1).find((element) => element.tag === tag) || null; }
  querySelectorAll(tag) { return this.walk().slice(1).filter((element) => element.tag === tag); }
  get tHead() { return this.querySelector("thead"); }
  get tBodies() { return this.querySelectorAll("tbody"); }
  addEventListener(kind, call) { (this.listeners[kind] ||= []).push(call); }
  dispatch(kind) { (this.listeners[kind] || []).forEach((call) => call({ target: this })); }
  get options() { return this.querySelectorAll("option"); }
  get value() {
    if ("value" in this.properties) return this.properties.value;
    if (this.tag !== "select") return this.attributes.value ?? "";
    const chosen = this.options.find((option) => "selected" in option.attributes) || this.options[0];
    return chosen ? chosen.attributes.value ?? chosen.textContent : "";
  }
  set value(value) { this.properties.value = String(value); }
  getContext() {
    return {
      createImageData: (width, height) => ({ data: new Uint8ClampedArray(4 * width * height) }),
      putImageData: (image) => { this.image = [...image.data]; },
    };
  }
}
for (const name of ["min", "max"])
  Object.defineProperty(Element.prototype, name, {
    get() { return this.attributes[name] ?? ""; },
    set(value) { this.attributes[name] = String(value); },
  });
for (const name of ["hidden", "open"])
  Object.defineProperty(Element.prototype, name, {
    get() { return name in this.attributes; },
    set(value) { if (value) this.attributes[name] = ""; else delete this.attributes[name]; },
  });

const build = ([tag, attributes, children]) => {
  const element = new Element(tag);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value ?? ""));
  element.append(...children.map((child) => (typeof child === "string" ? child : build(child))));
  return element;
};

const charts = new Map();
const rows = (table) => table.walk().filter((e) => e.tag === "tr").map((row) => row.children.map((cell) => cell.textContent));
// What each figure shows: its caption, legends, chart, pixels, and its numbers as a table.
const known = new Map();
const figures = (root) => root.querySelectorAll("figure").map((figure) => {
  if (!known.has(figure)) known.set(figure, read(figure));
  return known.get(figure);
});
const read = (figure) => {
  const details = figure.querySelector("details");
  if (details) { details.open = true; details.dispatch("toggle"); }
  const [box, canvas, table] = [figure.walk().find((e) => charts.has(e)), figure.querySelector("canvas"), details && details.querySelector("table")];
  let place = figure;
  while (place && !place.id) place = place.parent;
  return {
    place: place ? place.id : null,
    caption: figure.querySelector("figcaption").textContent,
    keys: figure.walk().filter((e) => e.attributes.class === "key").map((e) => [e.textContent, e.attributes.style]),
    spec: box ? charts.get(box) : null,
    table: table ? rows(table) : null,
    pixels: canvas ? canvas.image : null,
  };
};
const settle = () => new Promise((resolve) => setTimeout(resolve, 0));

const main = async ({ tree, scripts }) => {
  const root = build(tree);
  const ids = new Map(root.walk().filter((element) => element.id).map((element) => [element.id, element]));
  const style = { getPropertyValue: (name) => `ink ${name}` };
  const window = { matchMedia: () => ({ matches: false, addEventListener() {} }), addEventListener() {}, innerWidth: 1200 };
  const document = {
    documentElement: root,
    createElement: (tag) => new Element(tag),
    getElementById: (id) => ids.get(id) || null,
    querySelectorAll: (tag) => root.querySelectorAll(tag),
  };
  window.vegaEmbed = async (box, spec) => {
    charts.set(box, spec);
    return { view: { data() { return this; }, async runAsync() {}, addEventListener() {} }, finalize() {} };
  };
  const run = new Function("window", "document", "getComputedStyle", "requestAnimationFrame", scripts.join("\n"));
  run(window, document, () => style, (call) => call());
  await settle();
  const legends = root.walk().filter((e) => e.attributes.class === "legend" && e.parent.tag !== "figure").map((e) => e.textContent);
  const result = { start: figures(root), fields: {}, legends };
  for (const field of root.walk().filter((e) => ["select", "input"].includes(e.tag))) {
    const kept = field.value;
    const every = field.tag === "select" ? field.options.map((option) => option.attributes.value ?? option.textContent)
      : field.attributes.type === "range" ? [...Array(Number(field.max || 0) + 1).keys()].map(String) : [];
    const values = every.filter((_, i) => i < 2 || i === every.length - 1);
    const kind = field.attributes.type === "range" ? "input" : "change";
    result.fields[field.id] = {};
    for (const value of [...values, kept]) {
      field.value = value;
      field.dispatch(kind);
      await settle();
      result.fields[field.id][value] = figures(root);
    }
  }
  assert.ok(result.start);
  process.stdout.write(JSON.stringify(result));
};

let text = "";
process.stdin.on("data", (part) => { text += part; }).on("end", () => main(JSON.parse(text)));
