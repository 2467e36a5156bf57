// How values are written. Every function takes what the feed has, null included, and gives text.

const DASH = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(2)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

export function bytes(value) {
  if (!value) return value === 0 ? "0 B" : DASH;
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled >= 100 || power === 0 ? Math.round(scaled) : scaled.toFixed(1)} ${UNITS[power]}`;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? DASH : whole.format(value);
}

export function rate(value) {
  return value === null || value === undefined ? DASH : value < 10 ? value.toFixed(1) : whole.format(value);
}

export function percent(share) {
  return share === null || share === undefined ? DASH : `${Math.round(share * 100)} %`;
}

const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});

export function timeOfDay(unixSeconds) {
  return clock.format(new Date(unixSeconds * 1000));
}

export function text(value) {
  return value === null || value === undefined || value === "" ? DASH : String(value);
}
