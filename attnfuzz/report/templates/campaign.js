// Tells the pair of features under the pointer. The page says all of it without this, in tables and lists.
for (const figure of document.querySelectorAll(".all-pairs")) {
  const svg = figure.querySelector("svg"), out = figure.querySelector(".readout");
  const { names, places, cell, cells } = JSON.parse(figure.querySelector("script").textContent);
  const levelAt = (place) => places.findIndex((start) => start <= place && place < start + cell);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const column = levelAt(((event.clientX - box.left) / box.width) * view.width);
    const row = levelAt(((event.clientY - box.top) / box.height) * view.height);
    const cases = row > column && column >= 0 ? cells[row][column] : -1;
    out.textContent = cases < 0 ? "" : `${names[column]} × ${names[row]}: ${cases} ${cases === 1 ? "case" : "cases"}`;
  });
  svg.addEventListener("pointerleave", () => { out.textContent = ""; });
}
