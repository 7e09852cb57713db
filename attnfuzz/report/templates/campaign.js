// Tells the pair of features under the pointer. Without this, names and shades say what was met.
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

// A button in the corner of each command and script that copies it. Without this, a click selects a whole command.
for (const pre of document.querySelectorAll("pre.command, pre.copied")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const told = await copied(pre.textContent).then(() => "copied", () => "select it and press Ctrl-C");
    button.textContent = told;
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  const box = document.createElement("div");
  box.className = "copyable";
  pre.replaceWith(box);
  box.append(pre, button);
}
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  throw new Error("this browser lets no page copy");
}

// Leaves the findings that have all words, of one kernel, of one severity. Without this, all are there.
const index = document.querySelector("#index");
if (index) {
  const found = [...document.querySelectorAll("article.finding")];
  const texts = found.map((article) => article.textContent.toLowerCase());
  const rows = [...index.querySelectorAll("tr.entry")];
  const bar = document.createElement("p");
  bar.className = "filter";
  const words = document.createElement("input");
  words.type = "search";
  words.placeholder = "filter by text";
  words.setAttribute("aria-label", "filter by text");
  const kernelsOf = (element) => JSON.parse(element.dataset.kernels);
  const choice = (name, all, values) => {
    const select = document.createElement("select");
    select.setAttribute("aria-label", name);
    select.append(new Option(all, ""));
    for (const value of new Set(values)) select.append(new Option(value, value));
    return select;
  };
  const kernel = choice("kernel", "all kernels", rows.flatMap(kernelsOf));
  const severity = choice("severity", "all severities", rows.map((row) => row.dataset.severity));
  const left = document.createElement("output");
  const apply = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    found.forEach((article, i) => {
      const fits = (!kernel.value || kernelsOf(article).includes(kernel.value))
        && (!severity.value || severity.value === article.dataset.severity)
        && wanted.every((word) => texts[i].includes(word));
      article.hidden = rows[i].hidden = !fits;
      shown += fits;
    });
    left.textContent = shown === found.length ? "" : `${shown} of ${found.length}`;
  };
  for (const field of [words, kernel, severity]) field.addEventListener("input", apply);
  bar.append(words, kernel, severity, left);
  index.querySelector("h2").after(bar);
}
