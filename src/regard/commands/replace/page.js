// Constant matrices as pictures.
(() => {
  const { data, $, mixed, make, redraw } = regard;

  const paint = (canvas, picture) => {
    const [rows, columns] = picture.size;
    Object.assign(canvas, { width: columns, height: rows });
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    [...atob(picture.shades)].forEach((character, i) => image.data.set([...mixed(character.charCodeAt(0) / 255), 255], 4 * i));
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
