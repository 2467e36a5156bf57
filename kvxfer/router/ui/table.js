// A table that is sorted by the headers' buttons, filtered by words, and shows at most so many rows at once.
//
// Rows and cells are made once and get new text; strings of the feed become text nodes and nothing else.

const ROWS_SHOWN = 100;

let number = 0;

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function setText(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function compared(left, right) {
  if (typeof left === "number" && typeof right === "number") return left - right;
  return String(left).localeCompare(String(right), "en", { numeric: true });
}

export class Table {
  // `columns`: {title, value(row), show(value, row), isNumber, meter(row), mood(row), hint(row)}.
  // A row is found by the words of all its columns.
  constructor(section, { title, columns, note = "", empty = "None.", filters = false, sortBy = null, descends = false }) {
    this.columns = columns;
    this.rows = [];
    this.words = [];
    this.shown = ROWS_SHOWN;
    this.sortBy = sortBy;
    this.descends = descends;
    const id = `table-${(number += 1)}`;
    const heading = element("h2", { id, textContent: title });
    this.tally = element("span", { className: "tally" });
    heading.append(" ", this.tally);
    const head = element("div", { className: "head" }, heading);
    if (filters) {
      this.filter = element("input", { type: "search", placeholder: "Filter", spellcheck: false });
      this.filter.setAttribute("aria-label", `Filter ${title.toLowerCase()}`);
      this.filter.addEventListener("input", () => {
        this.words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
        this.shown = ROWS_SHOWN;
        this.draw();
      });
      head.append(this.filter);
    }
    this.headers = columns.map((column, index) => this.header(column, index));
    this.body = element("tbody");
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...this.headers)), this.body);
    table.setAttribute("aria-labelledby", id);
    const scroller = element("div", { className: "scroller", tabIndex: 0 }, table);
    scroller.setAttribute("role", "region");
    scroller.setAttribute("aria-labelledby", id);
    this.scroller = scroller;
    this.empty = element("p", { className: "empty", textContent: empty });
    this.more = element("button", { type: "button", hidden: true, className: "more" });
    this.more.addEventListener("click", () => {
      this.shown += ROWS_SHOWN;
      this.draw();
    });
    section.append(head);
    if (note) section.append(element("p", { className: "note", textContent: note }));
    section.append(scroller, this.empty, this.more);
    this.draw();
  }

  header(column, index) {
    const button = element("button", { type: "button", textContent: column.title });
    button.addEventListener("click", () => {
      // The first press sorts numbers from the greatest, and names from the first.
      this.descends = this.sortBy === index ? !this.descends : Boolean(column.isNumber);
      this.sortBy = index;
      this.draw();
    });
    const cell = element("th", { scope: "col" }, button);
    if (column.isNumber) cell.className = "number";
    return cell;
  }

  update(rows) {
    this.rows = rows;
    this.draw();
  }

  matches(row) {
    const said = this.columns.map((column) => String(column.show(column.value(row), row))).join(" ").toLowerCase();
    return this.words.every((word) => said.includes(word));
  }

  ordered() {
    const found = this.words.length ? this.rows.filter((row) => this.matches(row)) : this.rows.slice();
    if (this.sortBy === null) return found;
    const { value } = this.columns[this.sortBy];
    const sign = this.descends ? -1 : 1;
    const isMissing = (one) => one === null || one === undefined || one === "";
    return found
      .map((row) => [value(row), row])
      .sort(([left], [right]) => {
        const missing = isMissing(left) - isMissing(right); // what is not known comes last, in either order
        return missing || (isMissing(left) ? 0 : sign * compared(left, right));
      })
      .map(([, row]) => row);
  }

  draw() {
    const found = this.ordered();
    const visible = found.slice(0, this.shown);
    this.headers.forEach((cell, index) => {
      const direction = this.descends ? "descending" : "ascending";
      setAttribute(cell, "aria-sort", index === this.sortBy ? direction : null);
    });
    const total = this.rows.length;
    setText(this.tally, found.length === total ? String(total) : `${found.length} of ${total}`);
    while (this.body.rows.length > visible.length) this.body.deleteRow(-1);
    while (this.body.rows.length < visible.length) this.body.append(this.blankRow());
    visible.forEach((row, index) => this.fill(this.body.rows[index], row));
    const left = found.length - visible.length;
    this.more.hidden = left <= 0;
    setText(this.more, `Show ${Math.min(left, ROWS_SHOWN)} more of ${left}`);
    this.scroller.hidden = total === 0;
    this.empty.hidden = total !== 0;
  }

  blankRow() {
    const row = element("tr");
    this.columns.forEach((column, index) => {
      const cell = index === 0 ? element("th", { scope: "row" }) : element("td");
      if (column.isNumber) cell.className = "number";
      if (column.meter) {
        const meter = element("meter", { min: 0, max: 1, high: 0.9, low: 0.7, optimum: 0 });
        meter.setAttribute("aria-hidden", "true"); // the text beside it says the same
        cell.append(meter);
      }
      cell.append(element("span"));
      row.append(cell);
    });
    return row;
  }

  fill(node, row) {
    this.columns.forEach((column, index) => {
      const cell = node.cells[index];
      setText(cell.lastChild, column.show(column.value(row), row));
      if (column.meter) {
        const share = column.meter(row);
        cell.firstChild.hidden = share === null;
        cell.firstChild.value = share ?? 0;
      }
      if (column.mood) setAttribute(cell, "data-mood", column.mood(row));
      if (column.hint) setAttribute(cell, "title", column.hint(row));
    });
  }
}
