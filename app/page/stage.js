/* The stage: a picture, the region over it, strokes, a run's preview, and before / after.
   Python sets `picture`, `region`, `live` and `photo`, which waits to be opened; `value` is what was painted, a PNG as a data URL. */
const find = (selector) => element.querySelector(selector);
const stage = find(".stage"), frame = find(".frame"), canvas = find("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
const ring = find(".ring");
const COLOURS = { add: "rgb(255,64,96)", box: "rgb(255,64,96)", erase: "rgb(255,64,96)", protect: "rgb(48,112,255)", pick: "rgb(0,176,80)", unpick: "rgb(255,170,0)" };
const DOT = 0.016, POINTS = ["pick", "unpick"];  // radius as a share of the canvas's longer side
const LONGEST = 512;
const finger = matchMedia("(pointer: coarse)").matches;  // a finger scrolls until a brush is chosen
const masked = { edit: true, compare: false };
let tool = finger ? "" : "add", width = 10, strokes = [], current = null, shown = null, shownSize = null;
let at = [0.5, 0.5], held = "";  // where the brush is, and what holds it down: "pointer", " ", "Enter" or nothing

function choose(group, name, value) {
  for (const button of element.querySelectorAll(`[role=radio][data-${group}]`)) {
    button.setAttribute("aria-checked", String(button.dataset[group] === value));
    button.tabIndex = button.dataset[group] === value || !value ? 0 : -1;
  }
}

function take(name) {
  tool = finger && name === tool ? "" : name;
  choose("tool", "tool", tool);
  canvas.style.touchAction = tool ? "none" : "auto";
  ring.style.display = "none";
}

function view(name) {
  if (name === "compare" && !(shown && shown.before)) name = "edit";
  stage.dataset.view = name;
  stage.toggleAttribute("data-bare", !masked[name]);
  find("[data-do=mask]").checked = masked[name];
  choose("view", "view", name);
}

function split(percent) {
  find(".split").value = percent;
  frame.style.setProperty("--at", `${percent}%`);
}

function source(selector, url) {
  const image = find(selector);
  if (url) image.src = url; else image.removeAttribute("src");
}

function draw(stroke) {
  pen.globalCompositeOperation = stroke.tool === "unmark" ? "destination-out" : "source-over";
  pen.strokeStyle = pen.fillStyle = COLOURS[stroke.tool] || "#000";
  if (stroke.tool === "box") {
    const [[left, top], [right, bottom]] = [stroke.points[0], stroke.points.at(-1)];
    pen.fillRect(left * canvas.width, top * canvas.height, (right - left) * canvas.width, (bottom - top) * canvas.height);
    return;
  }
  if (POINTS.includes(stroke.tool)) {
    const [x, y] = stroke.points[0];
    pen.beginPath();
    pen.arc(x * canvas.width, y * canvas.height, DOT * Math.max(canvas.width, canvas.height), 0, 2 * Math.PI);
    pen.fill();
    return;
  }
  pen.lineWidth = stroke.width * canvas.width / 100;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  stroke.points.forEach(([x, y], i) => pen[i ? "lineTo" : "moveTo"](x * canvas.width, y * canvas.height));
  if (stroke.points.length === 1) pen.lineTo(stroke.points[0][0] * canvas.width + 0.01, stroke.points[0][1] * canvas.height);
  pen.stroke();
}

function redraw() {
  pen.clearRect(0, 0, canvas.width, canvas.height);
  strokes.forEach(draw);
  find("[data-do=clear]").disabled = !strokes.length;
  renewUndo();
}

/* Undo takes the last mark back, or else the last edit. */
function renewUndo() {
  const button = find("[data-do=undo]"), edit = document.querySelector("#undo"), off = !strokes.length && (!edit || edit.disabled);
  if (button.disabled !== off) button.disabled = off;
}

function tell(erases = false) {
  redraw();
  const painted = pen.getImageData(0, 0, canvas.width, canvas.height).data.some((level, i) => i % 4 === 3 && level > 127);
  stage.toggleAttribute("data-marked", painted);
  const sent = painted ? canvas.toDataURL("image/png") : "";
  if (sent === props.value) return;
  props.value = sent;
  if (erases) setTimeout(() => document.querySelector("#erase").click());  // needs no preview: it takes what is marked
  else trigger("input");
}

function undo() {
  if (!strokes.length) return false;
  held = "";
  strokes.pop();
  tell();
  return true;
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

function ringed(there = ring.style.display === "block") {
  const [left, top] = at.map((share) => `${share * 100}%`);
  const across = POINTS.includes(tool) ? 200 * DOT : width;
  Object.assign(ring.style, { display: there && tool && tool !== "box" && shown ? "block" : "none", left, top, width: `${across}%` });
  find(".keys").toggleAttribute("data-above", at[1] > 0.6);  // out of the brush's way
}

function down(by) {
  held = by;
  strokes.push({ tool, width, points: [at] });
  redraw();
}

function up() {
  if (!held) return;
  held = "";
  tell(strokes.at(-1).tool === "erase");
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button || !shown || !tool || held) return;
  canvas.setPointerCapture(event.pointerId);
  at = place(event);
  down("pointer");
  event.preventDefault();
});
canvas.addEventListener("pointermove", (event) => {
  if (held && held !== "pointer") return;
  at = place(event);
  ringed(event.pointerType === "mouse");
  if (!held) return;
  for (const part of event.getCoalescedEvents ? event.getCoalescedEvents() : [event]) strokes.at(-1).points.push(place(part));
  redraw();
});
canvas.addEventListener("pointerleave", () => ringed(false));
for (const over of ["pointerup", "pointercancel", "blur"]) canvas.addEventListener(over, up);

/* By keys: arrows move the brush, Space held or Enter in turns puts it down, [ and ] change its size. */
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const STEP = 1 / 64, SIZES = { "[": -2, "]": 2 };
const within = (value, low, high) => Math.min(high, Math.max(low, value));

function move([across, below], step) {
  const [x, y] = at, square = canvas.width / canvas.height;
  at = [within(x + across * step, 0, 1), within(y + below * step * square, 0, 1)];
  if (held) strokes.at(-1).points.push(at);
}

canvas.addEventListener("keydown", (event) => {
  const { key } = event, press = key === " " || key === "Enter";
  const chord = (event.ctrlKey || event.altKey || event.metaKey) && !event.getModifierState("AltGraph");
  if (!shown || chord || !(MOVES[key] || SIZES[key] || press)) return;
  event.preventDefault();
  if (!tool) take("add");
  if (MOVES[key]) move(MOVES[key], event.shiftKey ? 4 * STEP : STEP);
  if (SIZES[key]) resize(SIZES[key]);
  if (press && !event.repeat) {
    if (held) up();
    else down(key);
    if (POINTS.includes(tool)) up();
  }
  redraw();
  ringed(true);
});
canvas.addEventListener("keyup", (event) => {
  if (event.key === " " && held === " ") up();
  if (shown && MOVES[event.key]) find(".where").textContent = `· at ${at.map((share) => `${Math.round(share * 100)} %`).join(", ")}`;
});
canvas.addEventListener("focus", () => ringed(canvas.matches(":focus-visible")));
canvas.addEventListener("blur", () => ringed(false));

/* The wheel zooms where the pointer is; the middle button, or any with Alt, moves the picture. */
let zoom = 1, shift = [0, 0], panning = null, over = false;
function zoomTo(next, [x, y] = [0.5, 0.5]) {
  const factor = within(next, 1, 8) / zoom;
  shift = shift.map((old, i) => within([x, y][i] - ([x, y][i] - old) * factor, 1 - zoom * factor, 0));
  zoom *= factor;
  frame.style.setProperty("--zoom", zoom);
  frame.style.setProperty("--x", `${shift[0] * 100}%`);
  frame.style.setProperty("--y", `${shift[1] * 100}%`);
}
const inFrame = (event) => {
  const box = frame.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
};
frame.addEventListener("wheel", (event) => {
  if (!shown || event.ctrlKey) return;
  event.preventDefault();
  zoomTo(zoom * Math.exp(-event.deltaY / 400), inFrame(event));
}, { passive: false });
frame.addEventListener("pointerdown", (event) => {
  if (zoom === 1 || !(event.button === 1 || event.altKey)) return;
  panning = [inFrame(event), shift];
  frame.setPointerCapture(event.pointerId);
  event.preventDefault();
  event.stopPropagation();
}, true);
frame.addEventListener("pointermove", (event) => {
  if (!panning) return;
  const [from, before] = panning, to = inFrame(event);
  shift = before.map((old, i) => within(old + to[i] - from[i], 1 - zoom, 0));
  zoomTo(zoom);
  event.stopPropagation();
}, true);
for (const end of ["pointerup", "pointercancel"]) frame.addEventListener(end, () => { panning = null; }, true);

/* Held, B shows what was before; [ and ] change the brush wherever the pointer is over the picture. */
frame.addEventListener("pointerenter", () => { over = true; });
frame.addEventListener("pointerleave", () => { over = false; });
const typing = (event) => event.target.matches("textarea, input:not([type=range]):not([type=checkbox]):not([type=radio])");
document.addEventListener("keydown", (event) => {
  if (typing(event) || event.ctrlKey || event.metaKey || !shown) return;
  if (event.key.toLowerCase() === "b" && shown.before) stage.toggleAttribute("data-before", true);
  if (SIZES[event.key] && over && event.target !== canvas) resize(SIZES[event.key]);
});
document.addEventListener("keyup", (event) => { if (event.key.toLowerCase() === "b") stage.toggleAttribute("data-before", false); });

function resize(change) {
  const size = find("[data-do=size]");
  size.value = width = within(width + change, Number(size.min), Number(size.max));
  find(".size-text").textContent = width;
  ringed();
}

const DO = {
  undo: () => undo() || document.querySelector("#undo").click(),
  full: () => (document.fullscreenElement ? document.exitFullscreen() : stage.requestFullscreen()),
  clear: () => { held = ""; strokes = []; tell(); },
};
element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.view) view(button.dataset.view);
  if (button.dataset.tool) { take(button.dataset.tool); view("edit"); }
  if (button.dataset.do) DO[button.dataset.do]();
  if (button.dataset.press) document.querySelector(`#${button.dataset.press}`).click();
});
element.addEventListener("input", (event) => {
  if (event.target.matches(".split")) split(event.target.value);
  if (event.target.dataset.do === "size") resize(Number(event.target.value) - width);
  if (event.target.dataset.do === "mask") { masked[stage.dataset.view] = event.target.checked; view(stage.dataset.view); }
  event.stopPropagation();
});
element.addEventListener("keydown", (event) => {
  const button = event.target.closest("[role=radio]"), move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!button || !move) return;
  const all = [...button.parentElement.children];
  const next = all[(all.indexOf(button) + move + all.length) % all.length];
  next.click();
  next.focus();
});

function picture() {
  shown = props.picture && props.picture.id !== undefined ? props.picture : null;
  stage.dataset.empty = String(!shown);
  source(".picture", shown && shown.url);
  source(".before", shown && shown.before);
  source(".mask", shown && shown.mask);
  source(".live", "");
  find(".picture").alt = shown ? shown.alt : "";
  find("[data-view=compare]").disabled = !(shown && shown.before);
  frame.style.setProperty("--ratio", shown ? shown.width / shown.height : 1);
  if (shown) find(".before-tag").textContent = shown.label || "before";
  if (shown && shown.before) split(shown.split);
  const size = shown && `${shown.width} ${shown.height}`, key = shown && `${shown.id} ${size}`;
  if (size !== shownSize) zoomTo(1);  // else what was looked at closely stays there, from one candidate to the next
  shownSize = size;
  if (key !== current) {
    const scale = shown ? LONGEST / Math.max(shown.width, shown.height) : 1;
    canvas.width = shown ? Math.max(1, Math.round(shown.width * scale)) : 1;
    canvas.height = shown ? Math.max(1, Math.round(shown.height * scale)) : 1;
    current = key;
    held = "";
    strokes = [];
    stage.removeAttribute("data-marked");
    props.value = "";
    source(".region", "");
  }
  redraw();
  view(shown && shown.view ? shown.view : "edit");
}

watch("picture", picture);
watch("region", () => { source(".region", props.region); if (props.region) view("edit"); });
watch("live", () => {
  source(".live", props.live);
  stage.toggleAttribute("data-drawing", Boolean(props.live));
  if (props.live) view("edit");
});
watch("photo", () => {
  source(".photo", props.photo);
  stage.toggleAttribute("data-waiting", Boolean(props.photo));
  if (!props.photo && shown) frame.style.setProperty("--ratio", shown.width / shown.height);
  if (props.photo) zoomTo(1);
});
find(".photo").addEventListener("load", ({ target }) => frame.style.setProperty("--ratio", target.naturalWidth / target.naturalHeight));
find(".live").addEventListener("load", ({ target }) => { if (!shown) frame.style.setProperty("--ratio", target.naturalWidth / target.naturalHeight); });
window.fisedit = Object.assign(window.fisedit || {}, { undoStroke: undo, renewUndo, view });
choose("tool", "tool", tool);
canvas.style.touchAction = tool ? "none" : "auto";
picture();
requestAnimationFrame(() => {  // what changes by itself is read out
  for (const line of document.querySelectorAll("#words-line, #facts, #status, #truth")) line.setAttribute("aria-live", "polite");
});
