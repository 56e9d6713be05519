// Constant matrices as pictures.
(() => {
  const { data, $, palette, make, redraw } = regard;

  const ink = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const shade = (ramp, level) => {
    const at = (level / 255) * (ramp.length - 1);
    const low = Math.min(Math.floor(at), ramp.length - 2);
    return ramp[low].map((from, i) => Math.round(from + (ramp[low + 1][i] - from) * (at - low)));
  };
  const paint = (canvas, picture) => {
    const ramp = palette("ramp").map(ink);
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

  redraw(drawPictures, () => {});
  drawPictures();
})();
