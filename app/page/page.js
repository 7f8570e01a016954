/* The page: keys, a pause after typing, dropped files, and the key by which a tab finds its session again. */
(() => {
  const PAUSE = 100, SOON = 20, SILENT = 2000, AGAIN = 1000, DRAFTS = "fisedit-drafts";
  const prompt = () => document.querySelector("#prompt textarea");
  const typed = () => { const text = prompt(); if (text) text.dispatchEvent(new Event("input", { bubbles: true })); };
  const can = (button) => button && !button.disabled && button.ariaDisabled !== "true";
  const press = (id) => { const button = document.querySelector(`#${id}`); if (can(button)) button.click(); };
  let timer = 0, soon = 0, ran = "", moving = false; // words of the last run; whether they are told of again because it ended
  let running = false; // whether a run of this page goes on
  let erased = ""; // words of the picture that Erase was pressed for, if nothing else was typed

  /* Unsubmitted prompts, by the picture that they were typed for ("" before the first one). */
  const current = () => (document.querySelector("#candidates [aria-current], #history [aria-current]") || { dataset: { id: "" } }).dataset.id;
  const drafts = () => {
    try { return JSON.parse(sessionStorage.getItem(DRAFTS)) || {}; } catch { return {}; }
  };
  const shown = () => document.querySelector(".stage .picture").alt;
  let edited = "", words = "";
  const keepDraft = (words) => sessionStorage.setItem(DRAFTS, JSON.stringify({ ...drafts(), [edited]: words }));
  const dropDraft = () => {
    const { [edited]: _, ...others } = drafts();
    sessionStorage.setItem(DRAFTS, JSON.stringify(others));
  };
  const showDraft = () => {
    const text = prompt(), draft = drafts()[edited = current()];
    if (!text) return;
    if (draft !== undefined) text.value = draft;
    typed();
  };

  /* A button that could do nothing is dimmed, and its title says what it waits for. */
  const goes = () => Boolean(document.querySelector("#stop")?.checkVisibility());
  const offers = () => {
    if (running !== goes()) {
      running = goes();
      note();
    }
    const stage = document.querySelector(".stage"), text = prompt();
    if (!stage || !text) return;
    window.fisedit.renewUndo?.();
    const has = (selector) => Boolean(document.querySelector(selector)), words = text.value.trim();
    const marked = stage.hasAttribute("data-marked") || has("#things .token");
    const reads = has(":is(#reference, #control) .file-preview") || has(":is(#edges, #driven) input:checked");
    const changed = words !== shown().trim() || marked || reads, edited = has("#history [aria-current]:not([data-way=root])");
    const wider = [...document.querySelectorAll("#extension input")].some((field) => Number(field.value));
    const asked = {
      make: [words, "Say what the picture shows"],
      run: [words && changed, "Change a word or mark something"],
      vary: [words && (changed || edited), "Change a word or mark something"],
      erase: [marked || has("#words .token"), "Mark what shall go, or paint it away with the tool Erase"],
      extend: [wider, "Say by how many pixels"],
    };
    for (const [id, [may, why]] of Object.entries(asked)) {
      const button = document.querySelector(`#${id}`), now = String(!may);
      if (!button || button.ariaDisabled === now) continue;
      Object.assign(button, { ariaDisabled: now, title: may ? "" : why });
    }
  };
  for (const name of ["input", "change"]) document.addEventListener(name, offers, true);
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button[aria-disabled=true]");
    if (!button) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, true);

  document.addEventListener("input", (event) => {
    if (!event.target.closest || !event.target.closest("#prompt")) return;
    keepDraft(event.target.value);
    if (words !== event.target.value) {
      closeMenu();
      press("changed");
    }
    words = event.target.value;
    clearTimeout(timer);
    clearTimeout(soon);
    const draws = !moving;
    soon = setTimeout(() => press("tell"), SOON);
    timer = setTimeout(() => {
      if (document.querySelector(".stage[data-waiting]")) return; // a dropped picture is shown, not the one to edit
      press("look");
      const live = document.querySelector("#live input");
      if (draws && live && live.checked) press("draw");
    }, PAUSE);
  }, true);

  document.addEventListener("click", (event) => {
    const example = event.target.closest("#examples button"), own = event.target.closest("#words-line .own"), text = prompt();
    if (!(example || own) || !text) return;
    text.value = example ? example.textContent : document.querySelector("#stage .picture").alt;
    typed();
    text.focus();
  });

  /* A click on a noun offers to swap, remove or recolour it. */
  const closeMenu = () => { const menu = document.querySelector(".noun-menu"); if (menu) menu.remove(); };
  const openMenu = (noun) => {
    closeMenu();
    const text = prompt(), menu = Object.assign(document.createElement("div"), { className: "noun-menu" });
    menu.setAttribute("role", "menu");
    const add = (label, act, colour = "") => {
      const item = Object.assign(document.createElement("button"), { type: "button", textContent: colour ? "" : label, title: label });
      item.setAttribute("role", "menuitem");
      if (colour) Object.assign(item, { className: "colour", ariaLabel: label }).style.background = colour;
      item.addEventListener("click", () => { closeMenu(); act(); });
      menu.append(item);
    };
    const put = (words) => { text.value = words; typed(); text.focus(); };
    add("Swap", () => { text.focus(); text.setSelectionRange(...noun.dataset.at.split(" ").map(Number)); });
    if (noun.dataset.removed) add("Remove", () => put(noun.dataset.removed));
    for (const [colour, words] of Object.entries(JSON.parse(noun.dataset.colours))) add(`Recolour: ${colour}`, () => put(words), colour);
    const box = noun.getBoundingClientRect();
    document.body.append(menu);
    menu.style.top = `${box.bottom + scrollY + 4}px`;
    menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - menu.offsetWidth - 8)) + scrollX}px`;
    menu.firstChild.focus();
    menu.addEventListener("keydown", (event) => {
      const items = [...menu.children], step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
      if (event.key === "Escape") { closeMenu(); noun.focus(); }
      if (step) event.preventDefault();
    });
  };
  document.addEventListener("click", (event) => {
    const noun = event.target.closest("#words-line .noun");
    if (noun) openMenu(noun);
    else if (event.isTrusted && !event.target.closest(".noun-menu")) closeMenu(); // `press` clicks too
  });

  /* A pasted picture is opened; what was pasted as text and does not fit is said. */
  document.addEventListener("paste", (event) => {
    const text = event.target.closest && event.target.closest("#prompt textarea"), files = [...event.clipboardData.files];
    if (files.length && files[0].type.startsWith("image/")) {
      event.preventDefault();
      offer(event.clipboardData.files);
    } else if (text) {
      const more = event.clipboardData.getData("text").length + text.value.length - (text.selectionEnd - text.selectionStart);
      const line = document.querySelector("#words-line");
      if (more > text.maxLength) setTimeout(() => { line.textContent = `Only the first ${text.maxLength.toLocaleString("en")} letters were taken.`; }, 600);
    }
  });

  /* Ctrl with up or down weighs the word at the caret, or what is selected, as web UIs do: (word:1.1). */
  const weigh = (text, change) => {
    let [start, end] = [text.selectionStart, text.selectionEnd];
    const all = text.value, letter = /[\p{L}\p{N}'-]/u;
    const around = [...all.matchAll(/\(([^():]+):(\d+(?:\.\d+)?)\)/g)].find((it) => it.index <= start && end <= it.index + it[0].length);
    let word = around ? around[1] : "", weight = around ? Number(around[2]) : 1;
    if (around) [start, end] = [around.index, around.index + around[0].length];
    else {
      if (start === end) {
        while (start && letter.test(all[start - 1])) start -= 1;
        while (end < all.length && letter.test(all[end])) end += 1;
      }
      word = all.slice(start, end);
    }
    if (!word.trim()) return;
    weight = Math.round(10 * Math.min(2, Math.max(0.1, weight + change))) / 10;
    text.setRangeText(weight === 1 ? word : `(${word}:${weight})`, start, end, "select");
    if (weight !== 1) text.setSelectionRange(start + 1, start + 1 + word.length);
    typed();
  };

  const types = (event) => event.target.matches("textarea, input:not([type=range]):not([type=checkbox]):not([type=radio])");
  /* Prompts that were run, of this session: up and down walk through them from either end of the field, with Alt from anywhere. */
  const PROMPTS = "fisedit-prompts", MOST_PROMPTS = 50;
  const ranPrompts = () => {
    try { return JSON.parse(sessionStorage.getItem(PROMPTS)) || []; } catch { return []; }
  };
  let recalled = 0, before = ""; // how many runs back, and what was typed
  const keepPrompt = (words) => {
    recalled = 0;
    if (!words.trim()) return;
    sessionStorage.setItem(PROMPTS, JSON.stringify([words, ...ranPrompts().filter((each) => each !== words)].slice(0, MOST_PROMPTS)));
  };
  const recall = (text, step) => {
    const all = ranPrompts(), is = (n) => (n ? all[n - 1] : before);
    if (!recalled || text.value !== is(recalled)) [recalled, before] = [0, text.value];
    let next = recalled + step;
    while (next > 0 && next <= all.length && is(next) === text.value) next += step;
    if (next < 0 || next > all.length || next === recalled) return;
    recalled = next;
    text.value = is(recalled);
    typed();
    text.setSelectionRange(text.value.length, text.value.length);
  };

  document.addEventListener("keydown", (event) => {
    const walks = { ArrowUp: 1, ArrowDown: -1 }[event.key], text = prompt();
    if (walks && event.target === text && !(event.ctrlKey || event.metaKey || event.shiftKey)) {
      const { value, selectionStart: start, selectionEnd: end } = text, atEnd = start === end && (start === 0 || start === value.length);
      const untouched = !value || value === shown() || (recalled && value === ranPrompts()[recalled - 1]);
      if (event.altKey || (untouched && atEnd)) {
        event.preventDefault();
        recall(text, walks);
      }
      return;
    }
    if (!(event.ctrlKey || event.metaKey)) {
      const candidate = document.querySelectorAll("#candidates [data-id]")[Number(event.key) - 1];
      if (candidate && !types(event) && !event.altKey) candidate.click();
      return;
    }
    const key = event.key.toLowerCase();
    if ((key === "arrowup" || key === "arrowdown") && event.target === prompt()) {
      event.preventDefault();
      weigh(event.target, key === "arrowup" ? 0.1 : -0.1);
    }
    if (key === "enter") {
      event.preventDefault();
      clearTimeout(timer);
      press(waits() ? "open" : document.querySelector(".stage[data-empty=true]") ? "make" : "run");
    }
    if (key !== "z" && key !== "y" || types(event)) return;
    event.preventDefault();
    if (key === "y" || event.shiftKey) press("redo");
    else if (!(window.fisedit && window.fisedit.undoStroke())) press("undo");
  });

  /* A dropped picture waits to be opened: what it shows may be said; what the prompt says of another one is no part of it. */
  const waits = () => document.querySelector("#found .waiting");
  const ask = () => {
    const text = prompt();
    if (/The session is open/.test(document.querySelector("#found").textContent)) {
      sessionStorage.removeItem(DRAFTS);
      showDraft();
    }
    if (!waits() || !text) return;
    text.focus();
    if (!waits().hasAttribute("data-ask")) return;
    if (text.value === shown()) { // which is of the picture on the stage, and stays its own
      text.value = "";
      typed();
      dropDraft();
    }
    text.select();
  };

  /* gradio's stream may close in the very moment in which a run is asked for, of which the page then never hears. Whatever
     else is asked for opens it again, and it tells all. */
  document.addEventListener("click", (event) => {
    const button = event.target.closest("#run, #make, #open, #measure, #vary, #erase, #extend");
    if (!button) return;
    if (button.id !== "measure") clearTimeout(timer); // which would draw live what is run, or take its error away
    if (!["measure", "erase"].includes(button.id)) keepPrompt(ran = prompt().value);
    erased = button.id === "erase" && prompt().value === shown() ? prompt().value : "";
    setTimeout(listen, SILENT);
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
  const offer = async (files) => {
    const input = await chooser();
    input.files = files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  };
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      if (!event.dataTransfer || ![...event.dataTransfer.types].includes("Files") || event.target.closest("#file")) return;
      event.preventDefault();
      document.body.toggleAttribute("data-dragging", name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length) offer(event.dataTransfer.files);
    });
  }
  document.addEventListener("click", async (event) => {
    if (event.target.closest("#stage .empty")) (await chooser()).click();
  });

  const KEY = "fisedit-session", LIST = "fisedit-sessions", MOST = 8;
  const held = async (key) => {
    if (!navigator.locks) return true;
    return new Promise((answer) => {
      navigator.locks.request(`${KEY}-${key}`, { ifAvailable: true }, (lock) => {
        answer(Boolean(lock));
        return lock ? new Promise(() => {}) : undefined;
      });
    });
  };

  /* The browser's sessions that have pictures or make the first one, newest first: a tab without any takes nobody's place. */
  const known = () => {
    try { return JSON.parse(localStorage.getItem(LIST)) || []; } catch { return []; }
  };
  const note = () => {
    const key = sessionStorage.getItem(KEY), pictures = document.querySelectorAll("#history [data-id]");
    const others = known().filter((one) => one.key !== key);
    const words = pictures.length ? pictures[0].title.replace(/^.*?: /, "") : prompt().value;
    const own = (pictures.length || goes()) && key ? [{ key, pictures: Math.max(1, pictures.length), words: words.slice(0, 60) }] : [];
    localStorage.setItem(LIST, JSON.stringify([...own, ...others].slice(0, MOST)));
    const list = document.querySelector("#earlier .earlier");
    if (!list) return;
    list.hidden = !others.length;
    list.replaceChildren(...others.map((one) => {
      const button = Object.assign(document.createElement("button"), { type: "button" });
      button.textContent = `${one.words} (${one.pictures === 1 ? "1 picture" : `${one.pictures} pictures`})`;
      button.addEventListener("click", async () => {
        if (!await held(one.key)) button.textContent = "It is open in another tab.";
        else {
          sessionStorage.setItem(KEY, one.key);
          for (const own of [DRAFTS, PROMPTS]) sessionStorage.removeItem(own);
          location.reload();
        }
      });
      return button;
    }));
  };
  document.addEventListener("click", (event) => { // the panel draws what is in it when it is opened first
    if (event.target.closest("#open-panel > button")) setTimeout(note, 200);
  });
  let asked = "";
  window.fisedit = Object.assign(window.fisedit || {}, {
    typed,
    ask,
    showDraft,
    /* After a run, words go with its result, but for those of what was erased; those that were run are not drawn live again. */
    moveDraft: () => {
      dropDraft();
      edited = current();
      if (erased && prompt().value === erased) prompt().value = shown();
      moving = erased !== "" || prompt().value === ran;
      typed();
      moving = false;
    },
    /* What was typed before a reload, the other sessions, and a run that goes on. */
    restore: () => {
      note();
      press("follow-run");
      new MutationObserver(note).observe(document.querySelector("#history"), { childList: true, subtree: true });
      const seen = ["data-empty", "data-marked", "alt", "aria-current", "disabled"];
      new MutationObserver(offers).observe(document.body, { childList: true, subtree: true, attributeFilter: seen });
      offers();
      showDraft();
    },
    /* The status line, without an error that was answered. */
    answered: (status) => (status.includes('class="said error"') ? "" : { __type__: "update" }),
    /* A tab takes up its own session after a reload; a new tab the last one, unless another tab has it open. */
    key: async () => {
      const own = sessionStorage.getItem(KEY);
      for (const key of own ? [own] : navigator.locks ? known().map((one) => one.key) : []) {
        if (await held(key)) return (asked = key);
      }
      return "";
    },
    keep: (key) => {
      if (!key) return;
      if (asked && asked !== key) localStorage.setItem(LIST, JSON.stringify(known().filter((one) => one.key !== asked)));
      sessionStorage.setItem(KEY, key);
      held(key);
    },
    /* A preview that was refused for the moment is asked for again, unless something else was typed meanwhile. */
    askAgain: () => {
      if (!document.querySelector("#facts .said.again")) return;
      clearTimeout(timer);
      timer = setTimeout(() => press("look"), AGAIN);
    },
    /* A line for a preview that failed: a number is out of its slider's range, which gradio refuses without a word. */
    failedPreview: () => {
      const wrong = ({ validity }) => validity.rangeOverflow || validity.rangeUnderflow;
      const field = [...document.querySelectorAll("input[type=number]")].find(wrong);
      const line = Object.assign(document.createElement("p"), { className: "said error", role: "alert" });
      line.textContent = field
        ? `${field.ariaLabel.replace("number input for ", "")} must be from ${field.min} to ${field.max}, got ${field.value}.`
        : "That should not have happened: see the server's log.";
      return line.outerHTML;
    },
    remove: (follow) => {
      if (!follow || window.confirm(`Delete this picture and ${follow} made from it?`)) press("delete-now");
    },
    /* A saved session takes the place of what is here, where something is. */
    drop: (file, model) => {
      const here = document.querySelectorAll("#history .node").length;
      const replaces = here && file && /\.zip$/i.test(file.orig_name);
      const question = `Open this session in place of the ${here} picture${here > 1 ? "s" : ""} here?`;
      return [replaces && !window.confirm(question) ? null : file, model];
    },
    fetch: () => setTimeout(() => { const link = document.querySelector("#fetch a, a#fetch, #fetch"); if (link) link.click(); }, 60),
  });
})();
