"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  // A page of one process has one table of ops, which all of its bands share. One of several ranks has a band for each rank, and its table.
  const tables = (data.tables || [data.ops]).map((table) => table.map(([stream, tick, name, what, block, bytes, flops]) => ({ stream, tick, name, what, block, bytes, flops })));
  const opsOf = data.bands.map((band) => tables[band.table || 0]);
  const opOf = (band, index) => opsOf[band][index];
  // The bands of one rank, or of one process: those that have the same ops.
  const isSame = (band, other) => data.bands[band].rank === data.bands[other].rank;
  const total = Math.max(1, ...data.bands.map((band) => band.step));
  const view = { from: 0, to: total };
  const LANE = data.lane || 26, HEAD = 24, AXIS = 26, PLOT = 132, MAP = 120;
  const MEANS = {
    "h2d W": "weights to a slot", "h2d A": "activations come back", "compute F": "forward", "compute B": "backward",
    "d2h A": "activations are parked", "d2h G": "gradients leave", "host S": "squares of gradients", "host N": "norm", "host U": "update",
    "gather C": "weights from other devices", "receive R": "the sum of the ranks before", "send P": "the sum goes to the next rank", "peers V": "updates of other ranks",
    "receive X": "values from other devices", "send X": "values to other devices", "receive D": "gradients from other devices", "send D": "gradients to other devices",
  };
  const PARTS = {
    "weights": "weights", "activations": "activations", "retained graphs": "graphs", "gradients of activations": "agrads",
    "gradients of parameters": "pgrads", "workspace": "workspace", "loss": "loss", "parked values": "parked", "gradients": "gradients",
  };
  let hovered = null, selected = null, cursor = null, area = null;

  // -- words ---------------------------------------------------------------------------------------------------
  const three = (value) => (value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2));
  const time = (ns) => {
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]]) if (Math.abs(ns) >= size) return `${three(ns / size)} ${unit}`;
    return `${Math.round(ns)} ns`;
  };
  const scaled = (count, base, units) => {
    let step = 0;
    while (count >= base && step < units.length - 1) { count /= base; step += 1; }
    return `${step ? three(count) : count} ${units[step]}`;
  };
  const bytes = (count) => scaled(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  const flops = (count) => scaled(count, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
  const blockWords = (block) => (block < 0 ? "" : `${block} (${data.blocks[block][0]})`);
  const meaning = (op) => MEANS[`${data.streams[op.stream]} ${op.what}`] || "";

  // -- colours -------------------------------------------------------------------------------------------------
  const colours = {};
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "card", "ink", "soft", "line", "hair", "mark", "W", "A", "F", "B", "G", "S", "N", "U", "P", "R", "send", "V", "other", ...Object.values(PARTS)])
      colours[name] = style.getPropertyValue(`--${name}`).trim();
  };
  const key = (op) => {
    if (op.what === "A" && data.streams[op.stream] === "d2h") return "P";
    if (op.what === "P") return "send";
    return "WAFBGSNURV".includes(op.what) ? op.what : "other";
  };
  const partColour = (part) => colours[PARTS[part] || "other"];
  // Of white and black the one that is easier to read on a colour.
  const inkOn = (colour) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#15181b" : "#ffffff";
  };

  // -- canvases ------------------------------------------------------------------------------------------------
  const font = (size, weight = 400) => `${weight} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
  const begin = (canvas, height) => {
    const width = canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.textBaseline = "middle";
    return { pen, width, left: width < 520 ? 70 : 84, right: width - 10, height };
  };
  const toX = (box, ns) => box.left + ((ns - view.from) / (view.to - view.from)) * (box.right - box.left);
  const toTime = (box, x) => view.from + ((x - box.left) / (box.right - box.left)) * (view.to - view.from);
  const write = (pen, text, x, y, most) => {
    if (pen.measureText(text).width > most) {
      while (text && pen.measureText(`${text}...`).width > most) text = text.slice(0, -1);
      text = text ? `${text}...` : "";
    }
    pen.fillText(text, x, y);
  };
  const steps = (from, to, most) => {
    const rough = (to - from) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || rough;
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return found;
  };

  // -- the lanes -----------------------------------------------------------------------------------------------
  const inStreamOf = opsOf.map((ops) => data.streams.map((_, stream) => ops.map((_, index) => index).filter((index) => ops[index].stream === stream)));
  const usedOf = inStreamOf.map((lines) => data.streams.map((_, stream) => stream).filter((stream) => lines[stream].length));
  const paths = data.bands.map((band) => new Set(band.path));
  // Of ops that need something of another rank: the band and the op there, and whether it held them up.
  const acrossOf = data.bands.map((band) => new Map((band.across || []).map(([index, rank, op, holds]) => [index, { band: band.first + rank, op, holds }])));
  // The beginning and the length of each op. Where there are many ops, the page has the time since the one before in the stream, which is short.
  const timesOf = data.bands.map((band, number) => {
    const free = data.streams.map(() => 0);
    return band.times || band.gaps.map((gap, at) => {
      const { stream } = opOf(number, at >> 1), value = at % 2 ? gap : free[stream] + gap;
      free[stream] = at % 2 ? free[stream] + gap : value;
      return value;
    });
  });
  const start = (band, index) => timesOf[band][2 * index];
  const length = (band, index) => timesOf[band][2 * index + 1];
  const tops = [4];
  usedOf.forEach((used, band) => tops.push(tops[band] + HEAD + used.length * LANE + 8));
  const lanesHeight = tops[data.bands.length] - 4 + AXIS;
  const bandTop = (band) => tops[band];
  const laneTop = (band, stream) => bandTop(band) + HEAD + usedOf[band].indexOf(stream) * LANE;
  // The ops of a stream are in the order of time: the first that ends after a moment.
  const firstAfter = (band, stream, ns) => {
    const line = inStreamOf[band][stream];
    let low = 0, high = line.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start(band, line[middle]) + length(band, line[middle]) < ns) low = middle + 1; else high = middle;
    }
    return low;
  };

  const lanes = find("lanes"), memory = find("memory");
  let laneBox = null, memoryBox = null;
  const drawLanes = () => {
    const box = (laneBox = begin(lanes, lanesHeight)), { pen } = box;
    const marks = steps(view.from, view.to, (box.right - box.left) / 110);
    pen.strokeStyle = colours.hair;
    pen.beginPath();
    for (const mark of marks) { pen.moveTo(toX(box, mark), 0); pen.lineTo(toX(box, mark), lanesHeight - AXIS); }
    pen.stroke();
    data.bands.forEach((band, number) => {
      const top = bandTop(number);
      pen.font = font(13, 600);
      pen.fillStyle = colours.ink;
      pen.fillText(band.name, 10, top + 12);
      const after = 18 + pen.measureText(band.name).width;
      pen.font = font(12);
      pen.fillStyle = colours.soft;
      write(pen, `${band.origin}, ${time(band.step)}`, after, top + 12, box.right - after);
      for (const stream of usedOf[number]) drawLane(box, number, stream);
    });
    drawArrows(box);
    pen.font = font(12);
    pen.fillStyle = colours.soft;
    pen.textAlign = "center";
    for (const mark of marks) {
      const text = mark ? time(mark) : "0", half = pen.measureText(text).width / 2, x = toX(box, mark);
      if (x - half >= box.left - 20 && x + half <= box.width) pen.fillText(text, x, lanesHeight - AXIS / 2);
    }
    pen.textAlign = "left";
    drawCursor(box, lanesHeight - AXIS);
  };
  const drawLane = (box, band, stream) => {
    const { pen } = box, top = laneTop(band, stream);
    pen.font = font(12);
    pen.fillStyle = colours.soft;
    pen.fillText(data.streams[stream], 10, top + LANE / 2);
    pen.save();
    pen.beginPath();
    pen.rect(box.left, top, box.right - box.left, LANE);
    pen.clip();
    pen.fillStyle = colours.hair;
    pen.fillRect(box.left, top + LANE - 3, box.right - box.left, 1);
    const line = inStreamOf[band][stream];
    for (let at = firstAfter(band, stream, view.from); at < line.length; at++) {
      const index = line[at], op = opOf(band, index), x = toX(box, start(band, index));
      if (x > box.right) break;
      const width = Math.max(0.8, toX(box, start(band, index) + length(band, index)) - x);
      const fill = colours[key(op)];
      pen.fillStyle = fill;
      pen.fillRect(x, top + 3, width > 3 ? width - 0.6 : width, LANE - 9);
      if (paths[band].has(index)) { pen.fillStyle = colours.mark; pen.fillRect(x, top + LANE - 4.5, width, 2); }
      const seen = Math.max(x, box.left), room = Math.min(x + width, box.right) - seen;
      if (LANE > 18 && room > 7 * op.name.length + 6) { pen.fillStyle = inkOn(fill); pen.font = font(11); pen.fillText(op.name, seen + 4, top + 3 + (LANE - 9) / 2 + 0.5); }
      if ([hovered, selected].some((each) => each && each.op === index && isSame(each.band, band))) {
        pen.strokeStyle = colours.mark;
        pen.lineWidth = 1.6;
        pen.strokeRect(x - 0.4, top + 2.4, width + 0.4, LANE - 7.8);
        pen.lineWidth = 1;
      }
    }
    pen.restore();
  };
  // From the end of an op of another rank to the one that waited for it: faintly along the path, and of the op that is pointed at.
  const drawArrows = (box) => {
    const { pen } = box, marked = [hovered, selected].filter(Boolean), reach = box.right - box.left;
    pen.save();
    pen.beginPath();
    pen.rect(box.left, 0, reach, lanesHeight - AXIS);
    pen.clip();
    acrossOf.forEach((across, band) => {
      for (const [index, other] of across) {
        const isMarked = marked.some((each) => each.op === index && each.band === band);
        if (!isMarked && !(other.holds && paths[band].has(index))) continue;
        const end = start(other.band, other.op) + length(other.band, other.op), from = toX(box, end);
        const to = toX(box, Math.min(start(band, index) + length(band, index), Math.max(start(band, index), end)));
        if (Math.max(from, to) < box.left || Math.min(from, to) > box.right) continue;
        const y = laneTop(other.band, opOf(other.band, other.op).stream) + LANE / 2, below = laneTop(band, opOf(band, index).stream) + LANE / 2, way = Math.sign(below - y);
        pen.strokeStyle = pen.fillStyle = colours.mark;
        pen.globalAlpha = isMarked ? 1 : 0.35;
        pen.lineWidth = isMarked ? 1.6 : 1;
        pen.beginPath(); pen.moveTo(from, y); pen.lineTo(to, below); pen.stroke();
        pen.beginPath(); pen.moveTo(to, below); pen.lineTo(to - 3.5, below - 7 * way); pen.lineTo(to + 3.5, below - 7 * way); pen.fill();
      }
    });
    pen.restore();
  };
  const drawCursor = (box, height) => {
    if (cursor === null || cursor < view.from || cursor > view.to) return;
    box.pen.strokeStyle = colours.soft;
    box.pen.setLineDash([2, 3]);
    box.pen.beginPath();
    box.pen.moveTo(toX(box, cursor), 0);
    box.pen.lineTo(toX(box, cursor), height);
    box.pen.stroke();
    box.pen.setLineDash([]);
  };

  // -- memory --------------------------------------------------------------------------------------------------
  const curves = (data.curves || []).map((curve) => {
    const live = curve.parts.map(() => 0);
    return {
      parts: curve.parts,
      points: curve.points.map(([moment, ...changes]) => {
        for (let at = 0; at < changes.length; at += 2) live[changes[at]] = changes[at + 1];
        return { moment, live: live.slice(), total: live.reduce((sum, size) => sum + size, 0) };
      }),
    };
  });
  const most = Math.max(1, data.bound || 0, ...curves.flatMap((curve) => curve.points.map((point) => point.total)));
  const pointAt = (curve, ns) => {
    let low = 0, high = curve.points.length;
    while (high - low > 1) { const middle = (low + high) >> 1; if (curve.points[middle].moment <= ns) low = middle; else high = middle; }
    return curve.points[low];
  };
  // The outline of a sum of parts as steps, within the view.
  const outline = (box, curve, end, visit) => {
    let last = null;
    for (const point of [...curve.points, { ...curve.points[curve.points.length - 1], moment: end }]) {
      if (last !== null && point.moment >= view.from && last.moment <= view.to)
        visit(Math.max(box.left, toX(box, last.moment)), Math.min(box.right, toX(box, point.moment)), last);
      last = point;
    }
  };
  const drawMemory = () => {
    if (!memory) return;
    const box = (memoryBox = begin(memory, PLOT + 12)), { pen } = box;
    const toY = (size) => 26 + (PLOT - 26) * (1 - size / most);
    pen.font = font(12);
    pen.strokeStyle = colours.line;
    pen.beginPath(); pen.moveTo(0, 0.5); pen.lineTo(box.width, 0.5); pen.stroke();
    const [plan, ...others] = curves;
    for (let part = plan.parts.length - 1; part >= 0; part--) {
      pen.fillStyle = partColour(plan.parts[part]);
      outline(box, plan, data.bands[0].step, (x, to, point) => {
        const size = point.live.slice(0, part + 1).reduce((sum, own) => sum + own, 0);
        if (size > 0 && to > x) pen.fillRect(x, toY(size), to - x + 0.3, toY(0) - toY(size));
      });
    }
    others.forEach((curve, number) => {
      pen.strokeStyle = colours.mark;
      pen.lineWidth = 1.2;
      pen.beginPath();
      let first = true;
      outline(box, curve, data.bands[number + 1].step, (x, to, point) => {
        if (first) pen.moveTo(x, toY(point.total)); else pen.lineTo(x, toY(point.total));
        pen.lineTo(to, toY(point.total));
        first = false;
      });
      pen.stroke();
      pen.lineWidth = 1;
    });
    pen.strokeStyle = colours.soft;
    pen.setLineDash([5, 4]);
    pen.beginPath(); pen.moveTo(box.left, toY(data.bound)); pen.lineTo(box.right, toY(data.bound)); pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = colours.soft;
    write(pen, bytes(data.bound), 10, toY(data.bound), box.left - 14);
    write(pen, "device", 10, toY(0) - 7, box.left - 14);
    const middle = start(0, data.peak.op) + length(0, data.peak.op) / 2, peak = toX(box, middle);
    const text = `peak at ${opOf(0, data.peak.op).name}, ${data.peak.most}`, room = box.right - box.left, wide = Math.min(room, pen.measureText(text).width);
    pen.fillStyle = colours.ink;
    write(pen, text, Math.max(box.left, Math.min(box.right - wide, peak - wide / 2)), 12, room);
    if (middle >= view.from && middle <= view.to) { pen.beginPath(); pen.moveTo(peak - 4, 20); pen.lineTo(peak + 4, 20); pen.lineTo(peak, 25); pen.fill(); }
    drawCursor(box, PLOT);
  };

  // -- addresses -----------------------------------------------------------------------------------------------
  // The moment at which each tick begins in the plan, which never falls: the ticks of a span of time follow from it.
  const begins = Array((data.ticks || 0) + 1).fill(Infinity);
  if (data.ticks) opsOf[0].forEach((op, index) => { begins[op.tick] = Math.min(begins[op.tick], start(0, index)); });
  begins[data.ticks] = data.bands[0].step;
  for (let tick = data.ticks - 1; tick >= 0; tick--) begins[tick] = Math.min(begins[tick], begins[tick + 1]);
  if (data.ticks) begins[0] = 0;
  const tickAt = (ns) => {
    if (ns >= begins[data.ticks]) return data.ticks;
    let low = 0, high = data.ticks;
    while (high - low > 1) { const middle = (low + high) >> 1; if (begins[middle] <= ns) low = middle; else high = middle; }
    const span = begins[low + 1] - begins[low];
    return low + (span > 0 ? (ns - begins[low]) / span : 0);
  };
  const maps = (data.maps || []).map((map) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), note = document.createElement("span");
    const frame = document.createElement("div"), canvas = document.createElement("canvas");
    caption.textContent = `${map.name} `;
    note.textContent = `${map.memory} memory, ${bytes(map.bytes)}`;
    caption.append(note);
    frame.className = "drawing";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${map.name}, ${bytes(map.bytes)}: address against tick, ${map.areas.length} areas.`);
    frame.append(canvas);
    figure.append(caption, frame);
    find("maps").append(figure);
    const found = { map, canvas, box: null, areas: map.areas.map(([name, block, offset, size, first, last]) => ({ name, block, offset, size, first, last })) };
    canvas.addEventListener("pointermove", (event) => {
      const { left, top } = canvas.getBoundingClientRect(), x = event.clientX - left, y = event.clientY - top;
      area = found.areas.find((each) => { const [ax, ay, w, h] = place(found, each); return x >= Math.max(ax, found.box.left) && x < ax + w && y >= ay && y < ay + h; }) || null;
      drawMap(found);
      if (area) showTip(area.name, "", [
        ["bytes", `${bytes(area.size)} at ${area.offset}`], ["ticks", `${area.first} to ${area.last}`], ["block", blockWords(area.block)], ["code", code(area.block)],
      ], event.clientX, event.clientY);
      else hideTip();
    });
    canvas.addEventListener("pointerleave", () => { area = null; drawMap(found); hideTip(); });
    return found;
  });
  if (find("maps") && !maps.length) {
    const nothing = document.createElement("p");
    nothing.className = "note";
    nothing.textContent = "No arena holds anything: weights are used in place, and nothing waits on the host.";
    find("maps").append(nothing);
  }
  const ticksInView = () => { const from = tickAt(view.from), to = tickAt(view.to); return [from, Math.max(to, from + 0.5)]; };
  const place = ({ map, box }, each) => {
    const [from, to] = ticksInView(), scale = (box.right - box.left) / (to - from), height = MAP - AXIS - 6;
    const x = box.left + (each.first - from) * scale, y = 6 + height * (1 - (each.offset + each.size) / map.bytes);
    return [x, y, (each.last + 1 - each.first) * scale, Math.max(1, (height * each.size) / map.bytes)];
  };
  const drawMap = (found) => {
    const box = (found.box = begin(found.canvas, MAP)), { pen } = box, [from, to] = ticksInView();
    pen.font = font(12);
    pen.fillStyle = colours.soft;
    write(pen, bytes(found.map.bytes), 10, 12, box.left - 14);
    pen.fillText("0", 10, MAP - AXIS - 6);
    pen.save();
    pen.beginPath(); pen.rect(box.left, 0, box.right - box.left, MAP - AXIS + 2); pen.clip();
    pen.fillStyle = colours.hair;
    pen.fillRect(box.left, 6, box.right - box.left, MAP - AXIS - 6);
    const [even, odd] = found.map.memory === "device" ? [colours.W, colours.A] : found.map.name === "parked values" ? [colours.P, colours.G] : [colours.G, colours.P];
    for (const each of found.areas) {
      const [x, y, width, height] = place(found, each);
      if (x > box.right || x + width < box.left) continue;
      const fill = each.block % 2 ? odd : even;
      pen.fillStyle = fill;
      pen.fillRect(x, y, Math.max(0.8, width - 0.8), Math.max(0.8, height - 0.8));
      const seen = Math.max(x, box.left);
      if (x + width - seen > 22 && height > 12) { pen.fillStyle = inkOn(fill); pen.font = font(11); pen.fillText(String(each.block), seen + 4, y + height / 2); }
      if (each === area) { pen.strokeStyle = colours.mark; pen.lineWidth = 1.6; pen.strokeRect(x + 0.4, y + 0.4, width - 1.6, height - 1.6); pen.lineWidth = 1; }
    }
    pen.restore();
    pen.font = font(12);
    pen.fillStyle = colours.soft;
    pen.textAlign = "center";
    for (const tick of steps(from, to, Math.min((box.right - box.left) / 60, to - from))) {
      const x = box.left + ((tick - from) / (to - from)) * (box.right - box.left);
      if (Number.isInteger(tick) && x < box.right - 8) pen.fillText(String(tick), Math.max(x, box.left + 6), MAP - AXIS / 2 + 2);
    }
    pen.textAlign = "left";
    pen.fillText("tick", 10, MAP - AXIS / 2 + 2);
  };

  // -- the tip -------------------------------------------------------------------------------------------------
  const tip = find("tip");
  const code = (block) => (block < 0 || data.blocks[block][1] < 0 ? "" : data.sources[data.blocks[block][1]]);
  const showTip = (head, text, rows, x, y) => {
    tip.replaceChildren();
    const bold = document.createElement("b"), list = document.createElement("dl");
    bold.textContent = head;
    tip.append(bold, text ? `  ${text}` : "");
    for (const [name, value] of rows) {
      if (!value) continue;
      const term = document.createElement("dt"), definition = document.createElement("dd");
      term.textContent = name;
      definition.textContent = value;
      list.append(term, definition);
    }
    tip.append(list);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, window.innerWidth - width - 8))}px`;
    tip.style.top = `${y + 18 + height > window.innerHeight ? Math.max(8, y - height - 14) : y + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  const GIVES = { P: "the sum up to there", G: "the total of all ranks", U: "its part of the update", X: "the values", D: "their gradients", S: "its squares" };
  const laneName = (band, op) => `${data.streams[op.stream]}${data.bands[band].rank === undefined ? "" : ` of rank ${data.bands[band].rank}`}`;
  const showOp = (band, index, x, y) => {
    const op = opOf(band, index), rows = [["stream", `${laneName(band, op)}, tick ${op.tick}`], ["block", blockWords(op.block)]];
    if (op.bytes) rows.push(["bytes", bytes(op.bytes)]);
    if (op.flops) rows.push(["work", flops(op.flops)]);
    data.bands.forEach((each, number) => {
      if (isSame(number, band)) rows.push([each.name, `${time(length(number, index))}, from ${time(start(number, index))}`]);
    });
    const follows = data.bands[band].follows[index], other = acrossOf[band].get(index);
    if (other) rows.push([other.holds ? "waited for" : "needed", `${opOf(other.band, other.op).name} (${laneName(other.band, opOf(other.band, other.op))}), ${GIVES[opOf(other.band, other.op).what]}`]);
    if (follows >= 0 && !other?.holds) rows.push(["waited for", `${opOf(band, follows).name} (${data.streams[opOf(band, follows).stream]})`]);
    rows.push(["code", code(op.block)]);
    showTip(op.name, meaning(op), rows, x, y);
  };
  const showMemory = (x, y) => {
    const point = pointAt(curves[0], cursor), rows = [];
    for (let part = curves[0].parts.length - 1; part >= 0; part--) if (point.live[part]) rows.push([curves[0].parts[part], bytes(point.live[part])]);
    if (curves[1] && cursor <= data.bands[1].step) rows.push([`at ${data.bands[1].name} moments`, bytes(pointAt(curves[1], cursor).total)]);
    showTip(bytes(cursor <= data.bands[0].step ? point.total : 0), `at ${time(cursor)} of the plan`, cursor <= data.bands[0].step ? rows : rows.slice(-1), x, y);
  };

  // -- moving --------------------------------------------------------------------------------------------------
  let waiting = false;
  const draw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawLanes(); drawMemory(); maps.forEach(drawMap); });
  };
  const show = (from, to) => {
    const least = Math.max(1, total / 1e6), span = Math.min(total, Math.max(least, to - from));
    view.from = Math.max(0, Math.min(from, total - span));
    view.to = view.from + span;
    draw();
  };
  const middle = () => (selected ? start(selected.band, selected.op) + length(selected.band, selected.op) / 2 : (view.from + view.to) / 2);
  const zoom = (factor, around = middle()) => show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const move = (part) => { const by = (view.to - view.from) * part; show(view.from + by, view.to + by); };
  const ACTIONS = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.4), right: () => move(0.4), all: () => show(0, total) };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", ACTIONS[button.dataset.do]);

  const opAt = (x, y) => {
    for (let band = 0; band < data.bands.length; band++)
      for (const stream of usedOf[band]) {
        const top = laneTop(band, stream);
        if (y < top || y >= top + LANE || x < laneBox.left) continue;
        const reach = (view.to - view.from) / (laneBox.right - laneBox.left), ns = toTime(laneBox, x), line = inStreamOf[band][stream];
        for (let at = firstAfter(band, stream, ns - 2 * reach); at < line.length && start(band, line[at]) <= ns + 2 * reach; at++)
          if (start(band, line[at]) + length(band, line[at]) >= ns - reach) return { band, op: line[at] };
      }
    return null;
  };
  const pointers = new Map();
  let dragged = 0;
  for (const canvas of [lanes, memory].filter(Boolean)) {
    const local = (event) => { const { left, top } = canvas.getBoundingClientRect(); return [event.clientX - left, event.clientY - top]; };
    canvas.addEventListener("pointerdown", (event) => { pointers.set(event.pointerId, event.clientX); dragged = 0; });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas === lanes ? laneBox : memoryBox, [x, y] = local(event), perPixel = (view.to - view.from) / (box.right - box.left);
      if (pointers.has(event.pointerId) && event.buttons) {
        const before = [...pointers.values()];
        dragged += Math.abs(event.clientX - pointers.get(event.pointerId));
        const by = event.clientX - pointers.get(event.pointerId);
        pointers.set(event.pointerId, event.clientX);
        if (pointers.size === 2) {
          const now = [...pointers.values()], wide = Math.abs(before[0] - before[1]), wider = Math.abs(now[0] - now[1]);
          if (wide > 8 && wider > 8) zoom(wide / wider, toTime(box, (now[0] + now[1]) / 2 - canvas.getBoundingClientRect().left));
        } else if (dragged > 4) {
          if (!canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
          show(view.from - by * perPixel, view.to - by * perPixel);
        }
        return;
      }
      cursor = x >= box.left && x <= box.right ? toTime(box, x) : null;
      hovered = canvas === lanes ? opAt(x, y) : null;
      if (hovered) showOp(hovered.band, hovered.op, event.clientX, event.clientY);
      else if (canvas === memory && cursor !== null) showMemory(event.clientX, event.clientY);
      else hideTip();
      draw();
    });
    const up = (event) => { pointers.delete(event.pointerId); };
    canvas.addEventListener("pointerup", (event) => {
      up(event);
      if (canvas !== lanes || dragged > 4) return;
      selected = opAt(...local(event));
      if (selected) showOp(selected.band, selected.op, event.clientX, event.clientY); else hideTip();
      draw();
    });
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", (event) => { if (!event.buttons) up(event); hovered = cursor = null; hideTip(); draw(); });
    canvas.addEventListener("wheel", (event) => {
      const box = canvas === lanes ? laneBox : memoryBox;
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120), toTime(box, local(event)[0]));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / 900);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => zoom(0.4, toTime(canvas === lanes ? laneBox : memoryBox, local(event)[0])));
  }

  // -- keys ----------------------------------------------------------------------------------------------------
  const select = (band, op) => {
    selected = { band, op };
    const from = start(band, op), to = from + length(band, op), span = view.to - view.from;
    if (to > view.to || from < view.from) show(from - span * 0.3, from + span * 0.7);
    draw();
    const box = lanes.getBoundingClientRect(), x = Math.max(laneBox.left, Math.min(laneBox.right, toX(laneBox, from)));
    showOp(band, op, box.left + x, box.top + laneTop(band, opOf(band, op).stream) + LANE / 2);
  };
  const walk = (by) => {
    if (!selected) return select(0, inStreamOf[0][usedOf[0][0]][0]);
    const line = inStreamOf[selected.band][opOf(selected.band, selected.op).stream], at = line.indexOf(selected.op) + by;
    if (line[at] !== undefined) select(selected.band, line[at]);
  };
  const change = (by) => {
    if (!selected) return walk(0);
    const rows = usedOf.flatMap((used, band) => used.map((stream) => [band, stream]));
    const at = rows.findIndex(([band, stream]) => band === selected.band && stream === opOf(selected.band, selected.op).stream) + by;
    if (!rows[at]) return;
    const [band, stream] = rows[at], line = inStreamOf[band][stream];
    select(band, line[Math.min(line.length - 1, firstAfter(band, stream, start(selected.band, selected.op)))]);
  };
  const enter = () => {
    if (!selected) return;
    const from = start(selected.band, selected.op), span = Math.max(1, length(selected.band, selected.op));
    show(from - span, from + 2 * span);
  };
  const KEYS = {
    ArrowLeft: () => walk(-1), ArrowRight: () => walk(1), ArrowUp: () => change(-1), ArrowDown: () => change(1),
    "+": ACTIONS.in, "=": ACTIONS.in, "-": ACTIONS.out, "0": ACTIONS.all, Enter: enter, Escape: () => { selected = null; hideTip(); draw(); },
  };
  lanes.addEventListener("keydown", (event) => {
    if (!usedOf[0].length || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  lanes.addEventListener("blur", () => { selected = null; hideTip(); draw(); });

  // -- what stands around --------------------------------------------------------------------------------------
  const swatch = (legend, colour, text) => {
    const item = document.createElement("li"), square = document.createElement("i");
    square.style.background = `var(--${colour})`;
    item.append(square, text);
    find(legend).append(item);
  };
  const seen = new Set();
  for (const op of tables.flat()) {
    if (seen.has(key(op))) continue;
    seen.add(key(op));
    swatch("legend", key(op), `${op.what} ${meaning(op)}`.trim());
  }
  curves[0]?.parts.forEach((part, at) => {
    if (curves[0].points.some((point) => point.live[at] > 0)) swatch("parts", PARTS[part] || "other", part);
  });
  find("ops").addEventListener("toggle", () => {
    const frame = find("ops").querySelector("div");
    if (frame.childElementCount) return;
    const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    // The bands of each rank side by side; those of one process are all of one.
    const groups = [];
    data.bands.forEach((_, band) => { const group = groups.find(([first]) => isSame(first, band)); if (group) group.push(band); else groups.push([band]); });
    const hasRanks = data.bands[0].rank !== undefined, words = hasRanks ? 3 : 2;
    const heads = ["op", ...(hasRanks ? ["rank"] : []), "stream", "tick", "block", "bytes", ...groups[0].flatMap((band) => [`from, ${data.bands[band].kind || data.bands[band].name}`, `lasts, ${data.bands[band].kind || data.bands[band].name}`])];
    const isNumber = (at) => at === words || at > words + 1;
    heads.forEach((text, at) => { const cell = document.createElement("th"); cell.scope = "col"; cell.textContent = text; if (isNumber(at)) cell.className = "n"; head.append(cell); });
    for (const group of groups) opsOf[group[0]].forEach((op, index) => {
      const row = body.insertRow();
      const cells = [op.name, ...(hasRanks ? [data.bands[group[0]].rank] : []), data.streams[op.stream], op.tick, blockWords(op.block), op.bytes ? bytes(op.bytes) : "", ...group.flatMap((band) => [time(start(band, index)), time(length(band, index))])];
      cells.forEach((text, at) => { const cell = row.insertCell(); cell.textContent = text; if (isNumber(at)) cell.className = "n"; });
    });
    frame.append(table);
  });
  const redraw = () => { readColours(); draw(); };
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(draw).observe(lanes.parentElement);
  readColours();
  drawLanes();
  drawMemory();
  maps.forEach(drawMap);
})();
