/* The page: keys, a pause after typing, dropped files, and the key by which a tab finds its session again. */
(() => {
  const PAUSE = 150, SOON = 20, SILENT = 2000;
  const press = (id) => { const button = document.querySelector(`#${id}`); if (button && !button.disabled) button.click(); };
  let timer = 0, soon = 0;

  document.addEventListener("input", (event) => {
    if (!event.target.closest || !event.target.closest("#prompt")) return;
    clearTimeout(timer);
    clearTimeout(soon);
    soon = setTimeout(() => press("tell"), SOON);
    timer = setTimeout(() => {
      press("look");
      const live = document.querySelector("#live input");
      if (live && live.checked) press("draw");
    }, PAUSE);
  }, true);

  document.addEventListener("click", (event) => {
    const example = event.target.closest("#examples button"), prompt = document.querySelector("#prompt textarea");
    if (!example || !prompt) return;
    prompt.value = example.textContent;
    prompt.dispatchEvent(new Event("input", { bubbles: true }));
    prompt.focus();
  });

  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey)) return;
    const key = event.key.toLowerCase();
    if (key === "enter") {
      event.preventDefault();
      clearTimeout(timer);
      const run = document.querySelector("#run");
      press(run && !run.disabled ? "run" : "make");
    }
    const typing = event.target.matches("textarea, input:not([type=range]):not([type=checkbox]):not([type=radio])");
    if (key !== "z" && key !== "y" || typing) return;
    event.preventDefault();
    if (key === "y" || event.shiftKey) press("redo");
    else if (!(window.fisedit && window.fisedit.undoStroke())) press("undo");
  });

  /* gradio's stream may close in the very moment in which a run is asked for, of which the page then never hears. Whatever
     else is asked for opens it again, and it tells all. */
  document.addEventListener("click", (event) => {
    if (event.target.closest("#run, #make, #open, #measure")) setTimeout(listen, SILENT);
  });
  const listen = () => {
    const stop = document.querySelector("#stop"), waits = /queue: /.test(document.querySelector("#status").textContent);
    if (!waits && !(stop && stop.offsetParent)) press("listen");
  };

  /* The panel for files draws its input when it is opened first. */
  const chooser = async () => {
    const find = () => document.querySelector("#file input[type=file]");
    if (!find()) document.querySelector("#open-panel button").click();
    for (let i = 0; i < 50 && !find(); i += 1) await new Promise((go) => setTimeout(go, 20));
    return find();
  };
  for (const name of ["dragover", "drop"]) {
    document.addEventListener(name, async (event) => {
      if (!event.dataTransfer || ![...event.dataTransfer.types].includes("Files") || event.target.closest("#file")) return;
      event.preventDefault();
      if (name !== "drop" || !event.dataTransfer.files.length) return;
      const { files } = event.dataTransfer, input = await chooser();
      input.files = files;
      input.dispatchEvent(new Event("change", { bubbles: true }));
    });
  }

  const KEY = "fisedit-session";
  const held = async (key) => {
    if (!navigator.locks) return true;
    return new Promise((answer) => {
      navigator.locks.request(`${KEY}-${key}`, { ifAvailable: true }, (lock) => {
        answer(Boolean(lock));
        return lock ? new Promise(() => {}) : undefined;
      });
    });
  };
  window.fisedit = Object.assign(window.fisedit || {}, {
    /* A tab takes up its own session after a reload; a new tab the last one, unless another tab has it open. */
    key: async () => {
      const last = sessionStorage.getItem(KEY) || (navigator.locks ? localStorage.getItem(KEY) : "");
      return last && await held(last) ? last : "";
    },
    keep: (key) => {
      sessionStorage.setItem(KEY, key);
      localStorage.setItem(KEY, key);
      held(key);
    },
    remove: (follow) => {
      if (!follow || window.confirm(`Delete this picture and ${follow} made from it?`)) press("delete-now");
    },
    fetch: () => setTimeout(() => { const link = document.querySelector("#fetch a, a#fetch, #fetch"); if (link) link.click(); }, 60),
  });
})();
