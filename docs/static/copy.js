// A button in each block of code: it copies the code; of a console session, the commands that follow a $.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const code = block.querySelector("pre");
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const lines = code.textContent.replace(/\n$/, "").split("\n");
      const commands = lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
      try {
        await navigator.clipboard.writeText((commands.length ? commands : lines).join("\n"));
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code); // a page opened as a file may have no clipboard
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
