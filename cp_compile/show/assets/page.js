"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const get = (id) => document.getElementById(id);
  const panes = document.querySelector(".panes");
  const canvas = document.querySelector(".edges > g");
  const boxes = all("[data-box]");
  const ops = all("[data-op]");

  // ---- boxes: those of one module open and close on both sides

  const isOpen = (box) => !box.classList.contains("closed");
  const set = (box, open) => {
    box.classList.toggle("closed", !open);
    box.querySelector(".title").setAttribute("aria-expanded", String(open));
  };
  const setAll = (open) => { boxes.forEach((box) => set(box, open(box))); draw(); };
  const toggle = (box) => {
    const open = !isOpen(box);
    boxes.filter((other) => other.dataset.box === box.dataset.box).forEach((other) => set(other, open));
    draw();
  };
  const reveal = (element) => {
    for (let box = element.closest("[data-box]"); box; box = box.parentElement.closest("[data-box]")) {
      boxes.filter((other) => other.dataset.box === box.dataset.box).forEach((other) => set(other, true));
    }
  };
  all(".title").forEach((title) => title.addEventListener("click", () => toggle(title.closest("[data-box]"))));
  get("open").addEventListener("click", () => setAll(() => true));
  get("close").addEventListener("click", () => setAll(() => false));

  // ---- edges: an end in a closed box is that box

  const sides = ["plain", "ranks"].map((name) => ({
    name,
    ops: new Map(all(`.side.${name} [data-op]`).map((op) => [op.dataset.op, op])),
    edges: JSON.parse(get("edges").textContent)[name],
  }));
  const shown = (element) => {
    let found = element;
    for (let box = element.parentElement; box !== panes; box = box.parentElement) {
      if (box.classList.contains("closed")) found = box;
    }
    return found;
  };
  const portOf = (end, op, move) =>
    all("[data-port]", end === op ? op.parentElement : end).find((port) => port.dataset.port === move && port.offsetParent);

  // a box is as high as its other half, so that what stands below is level too; inner boxes first
  const pairs = new Map();
  boxes.forEach((box) => pairs.set(box.dataset.box, [...(pairs.get(box.dataset.box) || []), box]));
  const halves = [...pairs.values()].filter((pair) => pair.length === 2).reverse();
  const level = () => {
    const cells = (pair) => pair.map((box) => box.querySelector(".cells"));
    halves.forEach((pair) => cells(pair).forEach((each) => { each.style.minHeight = ""; }));
    for (const pair of halves.filter(([first]) => isOpen(first) && first.offsetParent)) {
      const height = Math.max(...cells(pair).map((each) => each.offsetHeight));
      cells(pair).forEach((each) => { each.style.minHeight = `${height}px`; });
    }
  };

  const draw = () => {
    level();
    const origin = panes.getBoundingClientRect();
    const place = (element) => {
      const at = element.getBoundingClientRect();
      return { element, left: at.left - origin.left, right: at.right - origin.left, top: at.top - origin.top, bottom: at.bottom - origin.top };
    };
    const paths = [];
    for (const side of sides) {
      const things = all(`.side.${side.name} :is(.op, .port:not(.ghost), .names, .box:not(.bare))`)
        .filter((element) => element.offsetParent).map(place);
      const lanes = [];
      const drawn = new Map();
      for (const [source, target, move] of side.edges) {
        const from = side.ops.get(source), to = side.ops.get(target);
        const start = shown(from), end = shown(to);
        if (start === end || start.contains(end) || end.contains(start)) continue;
        const port = move && portOf(start, from, move);
        const key = [source, start === from ? source : start.dataset.box, end === to ? target : end.dataset.box, move];
        if (start !== from) key[0] = "";
        drawn.set(key.join("\n"), { start, end, from: port || start, move, sent: Boolean(port && port.classList.contains("sends")), source, target });
      }
      const into = new Map();
      for (const edge of drawn.values()) into.set(edge.end, [...(into.get(edge.end) || []), edge]);
      for (const [end, edges] of into) {
        const at = place(end);
        const middle = (edge) => { const from = place(edge.from); return (from.left + from.right) / 2; };
        edges.sort((a, b) => middle(a) - middle(b)).forEach((edge, i) => {
          const step = Math.min(14, (at.right - at.left - 16) / edges.length);
          edge.x = (at.left + at.right) / 2 + (i - (edges.length - 1) / 2) * step;
        });
      }
      for (const edge of drawn.values()) {
        const from = place(edge.from), to = place(edge.end);
        const holds = (element) => element.contains(edge.from) || element.contains(edge.end);
        const blocks = things.filter((thing) => !holds(thing.element) && !(edge.start.parentElement === thing.element.parentElement && thing.element.classList.contains("port")));
        const floor = Math.max(from.bottom, place(edge.from.closest(".cell") || edge.from).bottom);
        const a = { x: (from.left + from.right) / 2, y: from.bottom, floor }, b = { x: edge.x, y: to.top - 1 };
        paths.push({ ...edge, d: route(a, b, blocks, lanes, edge.start), side: side.name });
      }
    }
    canvas.replaceChildren(...paths.map((path) => {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
      line.setAttribute("class", `edge${path.move ? " moved" : ""}${path.sent ? " sent" : ""}`);
      line.setAttribute("d", path.d);
      line.ends = [path.start, path.end, path.from];
      Object.assign(line.dataset, { side: path.side, source: path.source, target: path.target, move: path.move });
      return line;
    }));
  };

  // ---- routes: straight down where nothing is in the way, else down a free lane; routes.py does the same for the SVG

  const GAP = 22;
  const bend = (x1, y1, x2, y2) => `C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`;
  const crossed = (x1, y1, x2, y2, blocks) => {
    const found = new Set();
    for (let i = 0; i <= 24; i++) {
      const t = i / 24, s = t * t * (3 - 2 * t), y = y1 + (y2 - y1) * (1.5 * t - 1.5 * t * t + t ** 3), x = x1 + (x2 - x1) * s;
      for (const block of blocks) {
        if (x > block.left - 3 && x < block.right + 3 && y > block.top - 1 && y < block.bottom + 1) found.add(block);
      }
    }
    return found.size;
  };
  const route = (a, b, blocks, lanes, source) => {
    const head = a.floor > a.y ? `M${a.x} ${a.y}V${a.floor}` : `M${a.x} ${a.y}`;
    if (!crossed(a.x, a.floor, b.x, b.y, blocks)) return head + bend(a.x, a.floor, b.x, b.y);
    const y1 = a.floor + GAP, y2 = b.y - GAP;
    const tall = blocks.filter((block) => block.bottom > y1 && block.top < y2);
    const busy = lanes.filter((lane) => lane.source !== source && lane.bottom > y1 && lane.top < y2);
    const length = (x) => Math.abs(x - a.x) + Math.abs(x - b.x) + (x < Math.min(a.x, b.x) ? 40 : 0);
    const places = [a.x, b.x, ...tall.flatMap((block) => [block.left - 9, block.right + 9]), ...busy.flatMap((lane) => [lane.x - 6, lane.x + 6])];
    const free = (x) =>
      tall.every((block) => x < block.left - 4 || x > block.right + 4) && busy.every((lane) => Math.abs(lane.x - x) > 4);
    let best = null;
    for (const x of places.filter(free).sort((p, q) => length(p) - length(q))) {
      const cost = length(x) + 400 * (crossed(a.x, a.floor, x, y1, blocks) + crossed(x, y2, b.x, b.y, blocks));
      if (!best || cost < best.cost) best = { x, cost };
      if (best.cost < length(x)) break;
    }
    const x = best ? best.x : a.x;
    lanes.push({ x, top: y1, bottom: y2, source });
    return `${head}${bend(a.x, a.floor, x, y1)}V${y2}${bend(x, y2, b.x, b.y)}`;
  };

  // ---- what is known of an op: beside it, under the mouse or the focus

  const about = get("about");
  const leave = () => { about.hidden = true; all(".near", canvas).forEach((line) => line.classList.remove("near")); };
  const show = (element) => {
    leave();
    all(".edge", canvas).filter((line) => line.ends.includes(element)).forEach((line) => line.classList.add("near"));
    const facts = element.nextElementSibling;
    if (!facts || !facts.matches("dl.about")) return;
    about.replaceChildren(facts.cloneNode(true));
    about.hidden = false;
    const at = element.getBoundingClientRect(), size = about.getBoundingClientRect();
    const below = at.bottom + 8 + size.height < innerHeight || at.top < size.height + 8;
    about.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
    about.style.top = `${below ? at.bottom + 8 : at.top - size.height - 8}px`;
  };
  for (const element of all(".op, .port:not(.ghost)")) {
    element.addEventListener("mouseenter", () => show(element));
    element.addEventListener("mouseleave", leave);
    element.addEventListener("focus", () => show(element));
    element.addEventListener("blur", leave);
  }
  addEventListener("scroll", leave, { passive: true });

  // ---- search

  const input = get("search"), count = get("count");
  const texts = new Map();
  for (const op of ops) {
    const known = texts.get(op.dataset.op) || { text: "", elements: [] };
    const facts = all("dd", op.nextElementSibling).map((fact) => fact.textContent);
    known.text += `\n${[op.textContent, ...facts].join("\n").toLowerCase()}`;
    known.elements.push(op);
    texts.set(op.dataset.op, known);
  }
  let hits = [], here = 0, before = null;
  const mark = () => {
    all(".here").forEach((op) => op.classList.remove("here"));
    const words = input.value.trim();
    count.textContent = words ? (hits.length ? `${here + 1} of ${hits.length}` : "no match") : "";
    if (!hits.length) return;
    hits[here].elements.forEach((op) => op.classList.add("here"));
    hits[here].elements.at(-1).scrollIntoView({ block: "center", inline: "nearest" });
  };
  const search = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    before ??= new Map(boxes.map((box) => [box, isOpen(box)]));
    const known = [...texts.values()].filter((each) => words.every((word) => each.text.includes(word)));
    hits = words.length ? known : [];
    here = Math.max(0, hits.findIndex((hit) => words.every((word) => hit.elements[0].textContent.toLowerCase().includes(word))));
    document.body.classList.toggle("searching", words.length > 0);
    ops.forEach((op) => op.classList.remove("hit"));
    hits.forEach((hit) => hit.elements.forEach((op) => op.classList.add("hit")));
    boxes.forEach((box) => set(box, before.get(box)));
    hits.forEach((hit) => hit.elements.forEach(reveal));
    if (!words.length) before = null;
    draw();
    mark();
  };
  input.addEventListener("input", search);
  addEventListener("keydown", (event) => {
    const typing = event.target === input;
    if (event.key === "/" && !typing) {
      event.preventDefault();
      input.focus();
      input.select();
    } else if (event.key === "Enter" && typing && hits.length) {
      event.preventDefault();
      here = (here + (event.shiftKey ? hits.length - 1 : 1)) % hits.length;
      mark();
    } else if (event.key === "Escape") {
      leave();
      input.value = "";
      search();
      if (typing) input.blur();
    }
  });

  addEventListener("resize", draw);
  setAll((box) => box.dataset.open === "1");
  document.documentElement.dataset.ready = "1";
})();
