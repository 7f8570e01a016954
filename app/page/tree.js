element.addEventListener("click", (event) => {
  const node = event.target.closest("[data-id]");
  if (node) trigger("select", { id: node.dataset.id });
});
watch("value", () => {
  const here = element.querySelector("[aria-current]"), tree = element.querySelector(".tree");
  if (!here || !tree) return; /* the strip alone moves: the page stays where it is */
  const box = here.getBoundingClientRect(), all = tree.getBoundingClientRect();
  tree.scrollLeft += box.left + box.width / 2 - all.left - all.width / 2;
  tree.scrollTop += box.top + box.height / 2 - all.top - all.height / 2;
});
