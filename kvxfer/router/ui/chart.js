// A small line chart in SVG, made by hand: lines over time, one scale, and the last values as text.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 480;
const HEIGHT = 120;
const TOP = 8;
const BOTTOM = 18;

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function roundedUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  // `lines`: {name, value(step)}; a line is broken where the value is null. `show` writes a value.
  constructor(parent, { title, lines, show }) {
    this.title = title;
    this.lines = lines;
    this.show = show;
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("strong");
    name.textContent = title;
    caption.append(name);
    this.values = lines.map((line, index) => {
      const value = document.createElement("span");
      value.className = `line-${index}`;
      caption.append(" ", value);
      return value;
    });
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
    this.base = shape("path", { class: "axis", d: `M0 ${HEIGHT - BOTTOM}H${WIDTH}M0 ${TOP}H${WIDTH}` });
    this.paths = lines.map((_, index) => shape("path", { class: `line line-${index}`, d: "" }));
    this.svg.append(this.base, ...this.paths);
    this.scale = document.createElement("span");
    this.scale.className = "scale";
    this.from = document.createElement("span");
    this.from.className = "from";
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.append(this.svg, this.scale, this.from);
    this.figure.append(caption, plot);
    parent.append(this.figure);
  }

  // `begun` and `ended` bound the time that is drawn, in Unix seconds, and `step` is the length of a step.
  update(steps, { begun, ended, step }) {
    const values = this.lines.map((line) => steps.map((one) => line.value(one)));
    const top = roundedUp(Math.max(0, ...values.flat().filter((value) => value !== null)));
    const x = (at) => (((at + step / 2 - begun) / (ended - begun)) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP)).toFixed(1);
    this.paths.forEach((path, index) => {
      let drawn = "";
      let last = null; // the end of what is drawn without a gap
      steps.forEach((one, place) => {
        const value = values[index][place];
        if (value === null || one.begun_unix_s < begun) return;
        const joins = last !== null && one.begun_unix_s - last < 1.5 * step;
        const point = `${x(one.begun_unix_s)} ${y(value)}`;
        drawn += joins ? `L${point}` : `M${point}h0.01`; // a point of its own is seen too
        last = one.begun_unix_s;
      });
      path.setAttribute("d", drawn);
    });
    const lately = this.lines.map((_, index) => values[index].findLast((value) => value !== null) ?? null);
    this.values.forEach((node, index) => {
      node.textContent = `${this.lines[index].name} ${this.show(lately[index])}`;
    });
    this.scale.textContent = this.show(top);
    this.from.textContent = `${Math.round((ended - begun) / 60)} min ago`;
    const said = this.values.map((node) => node.textContent).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, last: ${said}; scale to ${this.show(top)}`);
  }
}
