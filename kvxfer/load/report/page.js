"use strict";
// Draws every figure in the colours of the reader's scheme. "@name" in a place for a colour is a custom property.
(() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const BUTTONS = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: BUTTONS };
  const COLOURED = new Set(["color", "fillcolor", "bgcolor", "bordercolor", "colorscale"]);

  const painted = (value, key, css) => {
    if (typeof value === "string") {
      if (!COLOURED.has(key) || !value.startsWith("@")) return value;
      return value === "@heat" ? [[0, css("cold")], [1, css("hot")]] : css(value.slice(1));
    }
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) {
      const isPlain = typeof value[0] !== "object" || Array.isArray(value[0]);
      return isPlain ? value : value.map((one) => painted(one, key, css));
    }
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, painted(one, name, css)]));
  };

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const family = getComputedStyle(document.body).fontFamily;
    const css = (name) => style.getPropertyValue(`--${name}`).trim();
    const line = { gridcolor: css("rule"), zerolinecolor: css("rule"), linecolor: css("rule") };
    for (const spec of specs) {
      const layout = painted(spec.layout, "layout", css);
      for (const name of Object.keys(layout)) {
        if (/^[xy]axis\d*$/.test(name)) layout[name] = { ...line, ...layout[name] };
      }
      const whole = {
        autosize: true,
        margin: { l: 60, r: 20, t: 36, b: 90 },
        legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", traceorder: "normal" },
        font: { family, size: 13, color: css("text") },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        modebar: { bgcolor: "rgba(0,0,0,0)", color: css("grey"), activecolor: css("text") },
        hoverlabel: { bgcolor: css("panel"), bordercolor: css("rule"), font: { color: css("text") } },
        ...layout,
      };
      if (!spec.traces.some((one) => one.type !== "heatmap" && one.showlegend !== false)) whole.margin.b = 50;
      const traces = spec.traces.map((trace) => painted(trace, "trace", css));
      Plotly.react(`plot-${spec.key}`, traces, whole, CONFIG);
    }
  };
  draw();
  scheme.addEventListener("change", draw);
  document.documentElement.dataset.drawn = String(specs.length);
})();
