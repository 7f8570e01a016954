element.addEventListener("click", (event) => {
  const node = event.target.closest("[data-id]");
  if (node) trigger("select", { id: node.dataset.id });
});
watch("value", () => {
  const here = element.querySelector("[aria-current]");
  if (here) here.scrollIntoView({ block: "nearest", inline: "center" });
});
