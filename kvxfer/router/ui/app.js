// The operators' page of kvxfer's router: asks /ui/state each second and shows what it says.
//
// Nothing that the feed says is ever read as HTML: strings become text. The admin key is kept in sessionStorage alone.

import { Chart } from "./chart.js";
import * as format from "./format.js";
import { Table } from "./table.js";

const ASK_EVERY_MS = 1000;
const ANSWER_WITHIN_MS = 10000;
const KEY = "kvxfer-admin-key";
const RECENT_STEPS = 6;

const at = (id) => document.getElementById(id);

// What the fleet's numbers mean.

function stateOf(worker) {
  if (worker.is_drained_here) return "drained";
  if (worker.is_draining) return "draining";
  if (worker.state !== "in") return worker.state.replace("_", " ");
  if (worker.is_suspect) return "suspect";
  if (!worker.model) return "no model yet";
  if (worker.is_last_choice) return "last choice";
  return worker.is_ready ? "ready" : "not ready";
}

function moodOf(state) {
  if (state === "ready") return "good";
  return state === "out" || state === "not ready" || state === "suspect" ? "bad" : "fair";
}

function usedShare(load) {
  return load.total_blocks > 0 ? 1 - load.free_blocks / load.total_blocks : null;
}

function whyOf(worker) {
  const { health } = worker;
  const said = [
    worker.trouble,
    health.ejected_for && `ejected for ${health.ejected_for}`,
    health.ejections > 0 && `${health.ejections} ejections`,
    health.share < 1 && `${format.percent(health.share)} of its share`,
  ];
  return said.filter(Boolean).join("; ") || null;
}

const WORKERS = [
  { title: "Worker", value: (w) => w.agent_id, show: format.text },
  { title: "Role", value: (w) => w.role, show: format.text },
  { title: "State", value: stateOf, show: format.text, mood: (w) => moodOf(stateOf(w)), hint: whyOf },
  { title: "Model", value: (w) => w.model, show: format.text },
  { title: "Prefills here", value: (w) => w.inflight.prefill, show: format.count, isNumber: true },
  { title: "Decodes here", value: (w) => w.inflight.decode, show: format.count, isNumber: true },
  { title: "Running", value: (w) => w.load.running_requests, show: format.count, isNumber: true },
  { title: "Queued", value: (w) => w.load.queued_requests, show: format.count, isNumber: true },
  { title: "Queued tokens", value: (w) => w.load.queued_prefill_tokens, show: format.count, isNumber: true },
  {
    title: "Blocks used",
    value: (w) => usedShare(w.load),
    show: (share, w) =>
      share === null ? "–" : `${format.count(w.load.total_blocks - w.load.free_blocks)} of ${format.count(w.load.total_blocks)}`,
    meter: (w) => usedShare(w.load),
    isNumber: true,
  },
  { title: "Dialect", value: (w) => w.dialect, show: format.text },
  { title: "Source", value: (w) => w.source, show: format.text },
  { title: "Address", value: (w) => w.http_url, show: format.text },
];

const MOVES = [
  { title: "Transfers", value: (p) => p.transfers, show: format.count, isNumber: true },
  {
    title: "Failed", value: (p) => p.failures, show: format.count, isNumber: true,
    mood: (p) => (p.failures > 0 ? "bad" : null),
  },
  { title: "Bytes", value: (p) => p.bytes, show: format.bytes, isNumber: true },
  { title: "Transfer p50", value: (p) => p.transfer_p50_s, show: format.seconds, isNumber: true },
  { title: "Transfer p95", value: (p) => p.transfer_p95_s, show: format.seconds, isNumber: true },
];

const PAIRS = [
  { title: "Prefill", value: (p) => p.prefill, show: format.text },
  { title: "Decode", value: (p) => p.decode, show: format.text },
  {
    title: "State", value: (p) => (p.is_ejected ? "ejected" : "in use"), show: format.text,
    mood: (p) => (p.is_ejected ? "bad" : null),
  },
  { title: "Lane", value: (p) => p.lane, show: format.text },
  { title: "Requests", value: (p) => p.requests, show: format.count, isNumber: true },
  ...MOVES,
];

const LANES = [{ title: "Lane", value: (p) => p.lane, show: format.text }, ...MOVES];

const DECISIONS = [
  { title: "Ended", value: (d) => d.ended_unix_s, show: format.timeOfDay },
  { title: "Route", value: (d) => d.route, show: format.text },
  { title: "Model", value: (d) => d.model, show: format.text },
  { title: "Prefill", value: (d) => d.prefill, show: format.text },
  { title: "Decode", value: (d) => d.decode, show: format.text },
  { title: "Reason", value: (d) => d.reason, show: format.text },
  {
    title: "Outcome", value: (d) => d.outcome, show: (outcome) => outcome.replaceAll("_", " "),
    mood: (d) => (d.is_failure ? "bad" : d.outcome === "ok" ? "good" : "fair"),
  },
  { title: "Status", value: (d) => d.status || null, show: format.text, isNumber: true },
  { title: "Code", value: (d) => d.code, show: format.text },
  { title: "TTFT", value: (d) => d.ttft_s, show: format.seconds, isNumber: true },
  { title: "Duration", value: (d) => d.duration_s, show: format.seconds, isNumber: true },
  { title: "Attempts", value: (d) => d.attempts, show: format.count, isNumber: true, mood: (d) => (d.attempts > 1 ? "fair" : null) },
];

const COUNTERS = [
  { title: "Counter", value: (c) => c.name, show: format.text },
  { title: "Of", value: (c) => c.label, show: format.text },
  { title: "Since the start", value: (c) => c.count, show: format.count, isNumber: true },
];

// The parts of the page.

const charts = at("charts");
const ttft = new Chart(charts, {
  title: "Time to first token",
  lines: [
    { name: "p50", value: (step) => step.ttft_p50_s },
    { name: "p95", value: (step) => step.ttft_p95_s },
  ],
  show: format.seconds,
});
const requests = new Chart(charts, {
  title: "Requests per second",
  lines: [
    { name: "all", value: (step) => step.rate },
    { name: "failed", value: (step) => step.failureRate },
  ],
  show: format.rate,
});

const tables = {
  workers: new Table(at("workers"), {
    title: "Workers", columns: WORKERS, filters: true, sortBy: 0,
    empty: "No worker is known.",
    note: "“Here” counts this router's own requests; running, queued and blocks are what the worker says of itself.",
  }),
  pairs: new Table(at("pairs"), {
    title: "Pairs", columns: PAIRS, filters: true, sortBy: 4, descends: true,
    empty: "No pair has served a request yet.",
    note: "Transfer times are those of the last 64 transfers that the decode worker reported.",
  }),
  lanes: new Table(at("lanes"), {
    title: "Lanes", columns: LANES, sortBy: 1, descends: true, empty: "No decode worker has reported a transfer yet.",
  }),
  decisions: new Table(at("decisions"), {
    title: "Last decisions", columns: DECISIONS, filters: true, empty: "No request has ended yet.",
  }),
  counters: new Table(at("counters"), { title: "Counters", columns: COUNTERS, empty: "Nothing was counted yet." }),
};

const tiles = new Map();

function tile(name, value, mood = null) {
  if (!tiles.has(name)) {
    const box = document.createElement("div");
    const term = document.createElement("dt");
    const said = document.createElement("dd");
    term.textContent = name;
    box.append(term, said);
    at("tiles").append(box);
    tiles.set(name, said);
  }
  const node = tiles.get(name);
  if (node.textContent !== value) node.textContent = value;
  if (mood === null) delete node.dataset.mood;
  else node.dataset.mood = mood;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function showTiles(state, steps) {
  const { router, workers } = state;
  const ready = (role) => workers.filter((w) => w.is_ready && (w.role === role || w.role === "both")).length;
  const able = (role) => workers.filter((w) => w.role === role || w.role === "both").length;
  const blocks = workers.filter((w) => w.load.total_blocks > 0);
  const total = sum(blocks.map((w) => w.load.total_blocks));
  const free = sum(blocks.map((w) => w.load.free_blocks));
  // The running step is not over: what is said per second is of those before it.
  const recent = steps.filter((step) => step.isOver).slice(-RECENT_STEPS);
  const lately = steps.findLast((step) => step.ttft_p50_s !== null);
  const isRecent = lately && state.series.ends_unix_s - lately.begun_unix_s <= (RECENT_STEPS + 1) * state.series.step_s;
  tile("In flight", `${format.count(router.inflight)} of ${format.count(router.inflight_max)}`);
  tile("Requests / s", format.rate(sum(recent.map((step) => step.requests)) / (RECENT_STEPS * state.series.step_s)));
  tile("TTFT p50", format.seconds(isRecent ? lately.ttft_p50_s : null));
  tile("TTFT p95", format.seconds(isRecent ? lately.ttft_p95_s : null));
  tile("Ready to prefill", `${ready("prefill")} of ${able("prefill")}`, able("prefill") && !ready("prefill") ? "bad" : null);
  tile("Ready to decode", `${ready("decode")} of ${able("decode")}`, ready("decode") ? null : "bad");
  tile("Blocks used", total ? format.percent(1 - free / total) : "–");
  tile("Failed, 10 min", format.count(sum(steps.map((step) => step.failures))));
}

function show(state) {
  const { series, router } = state;
  const begun = series.ends_unix_s - series.span_s;
  // Recent steps without a request are zeros of the rate, and no value of the times.
  const said = new Map(series.steps.map((step) => [Math.round((step.begun_unix_s - begun) / series.step_s), step]));
  const first = Math.min(...said.keys(), series.span_s / series.step_s);
  const steps = [];
  for (let place = Math.max(0, first); place < series.span_s / series.step_s; place += 1) {
    const step = said.get(place) ?? { requests: 0, failures: 0, ttft_p50_s: null, ttft_p95_s: null };
    const isOver = place < series.span_s / series.step_s - 1;
    steps.push({
      ...step,
      isOver,
      begun_unix_s: begun + place * series.step_s,
      rate: isOver ? step.requests / series.step_s : null,
      failureRate: isOver ? step.failures / series.step_s : null,
    });
  }
  const window = { begun, ended: series.ends_unix_s, step: series.step_s };
  ttft.update(steps, window);
  requests.update(steps, window);
  at("version").textContent = state.version;
  showTiles(state, steps);
  tables.workers.update(state.workers);
  tables.pairs.update(state.pairs);
  tables.lanes.update(state.lanes);
  tables.decisions.update(state.decisions);
  const counters = Object.entries(state.counters).flatMap(([name, values]) =>
    Object.entries(values).map(([label, count]) => ({ name: name.replaceAll("_", " "), label, count })),
  );
  tables.counters.update(counters);
  at("page").hidden = false;
  if (router.status !== "ok") say("fair", `The router is ${router.status}.`);
  else if (router.coordinator && !router.coordinator_connected) say("fair", "Serving. The coordinator is not heard.");
  else say("good", "Serving.");
}

function say(state, words) {
  const status = at("status");
  status.dataset.state = state;
  if (status.textContent !== words) status.textContent = words; // a screen reader says it again only where it changed
}

// Asking.

let etag = "";
let timer = 0;
let isPaused = false;
let isAsking = false;
let shown = null;

function askForKey(words) {
  say("bad", words);
  at("ask").hidden = false;
  at("forget").hidden = true;
  at("page").hidden = true;
  etag = "";
}

async function refusal(answer) {
  try {
    return String((await answer.json()).error.message);
  } catch {
    return `The router answered ${answer.status}.`;
  }
}

async function ask() {
  const key = sessionStorage.getItem(KEY);
  const headers = {};
  if (etag) headers["if-none-match"] = etag;
  if (key) headers.authorization = `Bearer ${key}`;
  const signal = AbortSignal.timeout(ANSWER_WITHIN_MS);
  let answer;
  try {
    answer = await fetch("ui/state", { headers, cache: "no-store", credentials: "omit", signal });
  } catch (error) {
    if (!isPaused) say("bad", error.name === "TimeoutError" ? "The router does not answer." : "The router cannot be reached.");
    return true;
  }
  // Where the key was changed meanwhile, this is no answer to it.
  if (isPaused || sessionStorage.getItem(KEY) !== key) return true;
  if (answer.status === 401) {
    sessionStorage.removeItem(KEY);
    askForKey(key ? "That key does not open this page." : "This router asks for an admin key.");
    return false;
  }
  at("ask").hidden = true;
  at("forget").hidden = !key;
  if (answer.status === 200) {
    etag = answer.headers.get("etag") ?? "";
    shown = await answer.json();
  } else if (answer.status !== 304) {
    say("bad", await refusal(answer));
    return answer.status !== 403;
  }
  if (shown) show(shown);
  return true;
}

async function turn() {
  clearTimeout(timer);
  if (isAsking || isPaused || document.hidden) return;
  isAsking = true;
  let goesOn = true;
  try {
    goesOn = await ask();
  } catch (error) {
    console.error(error);
    say("bad", "The router's answer cannot be shown.");
  } finally {
    isAsking = false;
  }
  if (goesOn && !isPaused) timer = setTimeout(turn, ASK_EVERY_MS);
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  at("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) {
    say("bad", "A key has visible ASCII characters only.");
    return;
  }
  sessionStorage.setItem(KEY, key);
  turn();
});

at("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  clearTimeout(timer);
  shown = null;
  askForKey("The key is forgotten.");
});

at("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  at("pause").setAttribute("aria-pressed", String(isPaused));
  at("pause").textContent = isPaused ? "Go on" : "Pause";
  if (isPaused) say("fair", "Paused.");
  else turn();
});

document.addEventListener("visibilitychange", turn);
turn();
