/* The stage: a picture, the region over it, strokes, a run's preview, and before / after.
   Python sets `picture`, `region` and `live`; `value` is what was painted, a PNG as a data URL. */
const find = (selector) => element.querySelector(selector);
const stage = find(".stage"), frame = find(".frame"), canvas = find("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
const ring = find(".ring");
const COLOURS = { add: "rgb(255,64,96)", protect: "rgb(48,112,255)" };
const LONGEST = 512;
const finger = matchMedia("(pointer: coarse)").matches;  // a finger scrolls until a brush is chosen
const masked = { edit: true, compare: false };
let tool = finger ? "" : "add", width = 10, strokes = [], current = null, shown = null, drawing = false;

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

function source(selector, url) {
  const image = find(selector);
  if (url) image.src = url; else image.removeAttribute("src");
}

function draw(stroke) {
  pen.globalCompositeOperation = stroke.tool === "erase" ? "destination-out" : "source-over";
  pen.strokeStyle = pen.fillStyle = COLOURS[stroke.tool] || "#000";
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
  for (const name of ["undo", "clear"]) find(`[data-do=${name}]`).disabled = !strokes.length;
}

function tell() {
  redraw();
  const painted = pen.getImageData(0, 0, canvas.width, canvas.height).data.some((level, i) => i % 4 === 3 && level > 127);
  const sent = painted ? canvas.toDataURL("image/png") : "";
  if (sent === props.value) return;
  props.value = sent;
  trigger("input");
}

function undo() {
  if (!strokes.length) return false;
  strokes.pop();
  tell();
  return true;
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button || !shown || !tool) return;
  canvas.setPointerCapture(event.pointerId);
  drawing = true;
  strokes.push({ tool, width, points: [place(event)] });
  redraw();
  event.preventDefault();
});
canvas.addEventListener("pointermove", (event) => {
  const [x, y] = place(event);
  Object.assign(ring.style, { display: tool && shown && event.pointerType === "mouse" ? "block" : "none" });
  Object.assign(ring.style, { left: `${x * 100}%`, top: `${y * 100}%`, width: `${width}%` });
  if (!drawing) return;
  for (const part of event.getCoalescedEvents ? event.getCoalescedEvents() : [event]) strokes.at(-1).points.push(place(part));
  redraw();
});
canvas.addEventListener("pointerleave", () => { ring.style.display = "none"; });
for (const over of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(over, () => { if (drawing) { drawing = false; tell(); } });
}

const DO = {
  undo,
  clear: () => { strokes = []; tell(); },
};
element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.view) view(button.dataset.view);
  if (button.dataset.tool) { take(button.dataset.tool); view("edit"); }
  if (button.dataset.do) DO[button.dataset.do]();
});
element.addEventListener("input", (event) => {
  if (event.target.matches(".split")) frame.style.setProperty("--at", `${event.target.value}%`);
  if (event.target.dataset.do === "size") width = Number(event.target.value);
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
  stage.toggleAttribute("data-alone", !(shown && shown.before));
  frame.style.setProperty("--ratio", shown ? shown.width / shown.height : 1);
  if (shown) find(".before-tag").textContent = shown.label || "before";
  const key = shown && `${shown.id} ${shown.width} ${shown.height}`;
  if (key !== current) {
    const scale = shown ? LONGEST / Math.max(shown.width, shown.height) : 1;
    canvas.width = shown ? Math.max(1, Math.round(shown.width * scale)) : 1;
    canvas.height = shown ? Math.max(1, Math.round(shown.height * scale)) : 1;
    current = key;
    strokes = [];
    props.value = "";
    source(".region", "");
  }
  redraw();
  view(shown && shown.view ? shown.view : "edit");
}

watch("picture", picture);
watch("region", () => { source(".region", props.region); if (props.region) view("edit"); });
watch("live", () => { source(".live", props.live); if (props.live) view("edit"); });
window.fisedit = Object.assign(window.fisedit || {}, { undoStroke: undo, view });
choose("tool", "tool", tool);
canvas.style.touchAction = tool ? "none" : "auto";
picture();
requestAnimationFrame(() => {  // what changes by itself is read out
  for (const line of document.querySelectorAll("#words-line, #facts, #status, #truth")) line.setAttribute("aria-live", "polite");
});
