// A button at each block of code that copies its text.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy-code";
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      const code = block.querySelector("pre");
      if (navigator.clipboard) {
        await navigator.clipboard.writeText(code.innerText);
        button.textContent = "copied";
      } else {  // a page that came by plain http has no clipboard
        getSelection().selectAllChildren(code);
        button.textContent = "selected: press Ctrl+C";
      }
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.append(button);
  }
});
