// Hover values for line charts, hover and zoom for the timeline. The page reads well without it.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const element = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const hint = document.createElement("div");
  hint.className = "hint";
  hint.hidden = true;
  document.body.append(hint);

  const show = (event, text) => {
    hint.textContent = text;
    hint.hidden = false;
    const { innerWidth: width, innerHeight: height } = window;
    const { offsetWidth: w, offsetHeight: h } = hint;
    hint.style.left = `${event.clientX + 14 + w > width ? event.clientX - 14 - w : event.clientX + 14}px`;
    hint.style.top = `${Math.min(event.clientY + 14, height - h - 4)}px`;
  };
  const hide = () => { hint.hidden = true; };

  // Where a mouse event is, in the coordinates of the picture.
  const locate = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

  for (const svg of document.querySelectorAll("svg.lines")) {
    const points = JSON.parse(svg.dataset.hover); // [x, y, text]
    if (!points.length) continue;
    const dot = element("circle", { r: 5, class: "cursor-dot", visibility: "hidden" });
    svg.append(dot);
    svg.addEventListener("mousemove", (event) => {
      const at = locate(svg, event);
      const far = ([x, y]) => 4 * Math.abs(x - at.x) + Math.abs(y - at.y);
      const nearest = points.reduce((best, point) => (far(point) < far(best) ? point : best));
      dot.setAttribute("cx", nearest[0]);
      dot.setAttribute("cy", nearest[1]);
      dot.setAttribute("visibility", "visible");
      show(event, nearest[2]);
    });
    svg.addEventListener("mouseleave", () => { dot.setAttribute("visibility", "hidden"); hide(); });
  }

  const seconds = (value) =>
    value >= 1 ? `${value.toPrecision(4)} s` : value >= 1e-3 ? `${(value * 1e3).toPrecision(4)} ms` : `${(value * 1e6).toPrecision(3)} µs`;

  const ticks = (low, high) => {
    const rough = (high - low) / 10;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high * (1 + 1e-12); index += 1) {
      found.push([index * step, (index * step).toFixed(digits)]);
    }
    return found;
  };

  const zoomable = (box) => {
    const svg = box.querySelector("svg");
    const data = JSON.parse(box.querySelector(".timeline-data").textContent);
    const bars = svg.querySelector(".spans");
    const axis = svg.querySelector(".time-axis");
    const wide = data.right - data.left;
    const LEAST = Math.min(1e-4, data.end); // seconds that the picture shows at the closest
    let [low, high] = [0, data.end];
    let drag = null;

    const toX = (time) => data.left + ((time - low) / (high - low)) * wide;
    const toTime = (x) => low + ((Math.min(data.right, Math.max(data.left, x)) - data.left) / wide) * (high - low);

    const draw = () => {
      const near = ((high - low) / wide) * 0.4;
      const rects = [];
      for (const lane of data.lanes) {
        let last = null; // [start, end] of what is not drawn yet
        const put = () => {
          const left = toX(Math.max(low, last[0]));
          const width = Math.max(0.6, toX(Math.min(high, last[1])) - left);
          rects.push(element("rect", { x: left, y: lane.top, width, height: data.height, class: `span ${lane.family}` }));
        };
        for (const [start, duration] of lane.spans) {
          const end = start + duration;
          if (end < low || start > high) continue;
          if (last && start - last[1] < near) last[1] = Math.max(last[1], end);
          else { if (last) put(); last = [start, end]; }
        }
        if (last) put();
      }
      bars.replaceChildren(...rects);
      axis.replaceChildren(
        element("line", { x1: data.left, y1: data.foot, x2: data.right, y2: data.foot, class: "axis" }),
        ...ticks(low, high).flatMap(([time, text]) => [
          element("line", { x1: toX(time), y1: data.foot, x2: toX(time), y2: data.foot + 4, class: "axis" }),
          element("text", { x: toX(time), y: data.foot + 17, class: "tick-x" }, text),
        ]),
      );
      svg.dataset.window = `${low} ${high}`;
      shown.textContent = low === 0 && high === data.end ? "whole run" : `${seconds(high - low)} from ${low.toFixed(4)} s`;
    };

    const look = (from, to) => {
      const span = Math.min(data.end, Math.max(LEAST, to - from));
      low = Math.min(Math.max(0, from), data.end - span);
      high = low + span;
      if (span === data.end) [low, high] = [0, data.end];
      draw();
    };
    const zoom = (factor, around = (low + high) / 2) => look(around - (around - low) * factor, around + (high - around) * factor);
    const pan = (share) => look(low + share * (high - low), high + share * (high - low));
    const whole = () => look(0, data.end);

    const at = (event) => {
      const { x, y } = locate(svg, event);
      const lane = data.lanes.find((one) => y >= one.top - 1 && y <= one.top + data.height + 1);
      if (!lane || x < data.left || x > data.right) return null;
      const time = toTime(x);
      const reach = ((high - low) / wide) * 2;
      let best = null;
      let far = reach;
      for (const span of lane.spans) {
        const away = Math.max(span[0] - time, time - span[0] - span[1], 0);
        if (away <= far && !(best && away === far && best[1] <= span[1])) [best, far] = [span, away];
      }
      return best && `${lane.worker}: ${data.names[best[2]]}${best[3] === null ? "" : `, version ${best[3]}`}: ${seconds(best[1])} at ${best[0].toFixed(4)} s`;
    };

    const tools = document.createElement("div");
    tools.className = "tools";
    const button = (text, name, act) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = text;
      made.setAttribute("aria-label", name);
      made.addEventListener("click", act);
      return made;
    };
    const shown = document.createElement("span");
    shown.className = "window";
    tools.append(
      button("+", "zoom in", () => zoom(0.5)),
      button("−", "zoom out", () => zoom(2)),
      button("←", "earlier", () => pan(-0.4)),
      button("→", "later", () => pan(0.4)),
      button("whole run", "show the whole run", whole),
      shown,
      " · drag over a stretch to zoom into it; Ctrl and wheel, or + − ← → 0, work too",
    );
    box.before(tools);

    const mark = element("rect", { class: "selection", y: 0, height: data.foot, width: 0, x: 0 });
    svg.append(mark);
    const select = (from, to) => {
      mark.setAttribute("x", Math.min(from, to));
      mark.setAttribute("width", Math.abs(to - from));
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = Math.min(data.right, Math.max(data.left, locate(svg, event).x));
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (drag !== null) select(drag, Math.min(data.right, Math.max(data.left, locate(svg, event).x)));
      const text = at(event);
      if (text) show(event, text); else hide();
    });
    svg.addEventListener("pointerup", (event) => {
      if (drag === null) return;
      const [from, to] = [drag, locate(svg, event).x].sort((a, b) => a - b);
      drag = null;
      select(0, 0);
      if (to - from > 4) look(toTime(from), toTime(to));
    });
    svg.addEventListener("pointercancel", () => { drag = null; select(0, 0); });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("dblclick", whole);
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 0.8 : 1.25, toTime(locate(svg, event).x));
    }, { passive: false });
    svg.addEventListener("keydown", (event) => {
      const act = { "+": () => zoom(0.5), "-": () => zoom(2), 0: whole, ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2) }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    svg.classList.add("zoomable");
    draw();
  };

  document.querySelectorAll(".timeline-box").forEach(zoomable);
})();
