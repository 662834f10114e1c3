"use strict";
// The table of rows: filtered, sorted and shown page by page. Text reaches the page through textContent alone.
(() => {
  const PAGE = 20, PRINTED = 50;
  const NAMES = { kept: "✓ kept", lost: "✗ lost", gained: "+ gained", still_wrong: "− still wrong", unjudged: "· not judged",
    same: "= the same", changed: "≠ changed" };
  const CHANGES = ["lost", "changed", "gained", "still_wrong", "unjudged", "same", "kept"];
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const rows = data.rows.map(([set, kind, id, input, gold, before, after, was, now, lossWas, lossNow], place) => ({
    set, kind, id, input, gold, before, after, was, now, lossWas, lossNow, place,
    words: [id, input, gold, before ?? "", after ?? ""].join("\n").toLowerCase(),
  }));
  const boxes = [...document.querySelectorAll("#kinds input")];
  const fields = { set: byId("set"), search: byId("search"), sort: byId("sort") };
  const ORDERS = {
    changes: (a, b) => CHANGES.indexOf(a.kind) - CHANGES.indexOf(b.kind),
    given: () => 0,
    confidence: (a, b) => Math.abs(b.now - b.was) - Math.abs(a.now - a.was),
    loss: (a, b) => rise(b) - rise(a),
  };
  const rise = (row) => (row.lossWas === null || row.lossNow === null ? -Infinity : row.lossNow - row.lossWas);
  let found = [], page = 0;

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const texts = (className, text) => { const e = make("div", className, text); e.dir = "auto"; return e; };
  const share = (value) => (100 * value).toFixed(0) + " %";

  function answer(name, text, confidence, given, loss) {
    const cell = make("td");
    cell.dataset.name = name;
    cell.append(texts(text === null ? "soft" : "text", text === null ? "not asked" : text));
    const meta = text === null ? [] : ["confidence " + share(confidence)];
    if (loss !== null) meta.push(`loss of the ${given} answer ${loss.toFixed(2)}`);
    cell.append(make("div", "meta", meta.join(" · ")));
    return cell;
  }

  function line(row) {
    const tr = make("tr");
    const outcome = make("td");
    outcome.append(make("span", "badge " + row.kind, NAMES[row.kind]));
    const given = data.judged[row.set] ? "right" : "given";
    const asked = make("td");
    asked.append(make("div", "head", [data.sets[row.set], row.id].join(" · ")));
    asked.append(texts("text", row.input), texts("gold text", given + ": " + row.gold));
    const before = answer("before", row.before, row.was, given, row.lossWas);
    const after = answer("after", row.after, row.now, given, row.lossNow);
    if (row.before !== null && row.before === row.after) after.firstChild.classList.add("unaltered");
    tr.append(outcome, asked, before, after);
    const long = [row.input, row.gold, row.before ?? "", row.after ?? ""].some((t) => t.length > 340 || t.split("\n").length > 8);
    if (long) {
      tr.classList.add("long", "clamped");
      const more = make("button", "more", "show all");
      more.type = "button";
      more.setAttribute("aria-expanded", "false");
      more.addEventListener("click", () => {
        const open = !tr.classList.toggle("clamped");
        more.textContent = open ? "show less" : "show all";
        more.setAttribute("aria-expanded", String(open));
      });
      asked.append(more);
    }
    return tr;
  }

  function show(first, count) {
    byId("flips").tBodies[0].replaceChildren(...found.slice(first, first + count).map(line));
    const last = Math.min(first + count, found.length);
    byId("shown").textContent = found.length ? `${(first + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${found.length.toLocaleString("en")} rows` : "no row fits the filters";
    byId("previous").disabled = first === 0;
    byId("next").disabled = last === found.length;
  }

  function filter() {
    const kinds = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    const asked = fields.search.value.trim().toLowerCase();
    const others = rows.filter((row) => (fields.set.value === "" || row.set === Number(fields.set.value))
      && (asked === "" || row.words.includes(asked)));
    for (const box of boxes) {
      const count = others.filter((row) => row.kind === box.value).length;
      box.parentElement.querySelector("b").textContent = count.toLocaleString("en");
    }
    const order = ORDERS[fields.sort.value];
    found = others.filter((row) => kinds.has(row.kind)).sort((a, b) => order(a, b) || a.place - b.place);
    page = 0;
    show(0, PAGE);
  }

  for (const control of [...boxes, fields.set, fields.sort]) control.addEventListener("change", filter);
  fields.search.addEventListener("input", filter);
  byId("previous").addEventListener("click", () => show(--page * PAGE, PAGE));
  byId("next").addEventListener("click", () => show(++page * PAGE, PAGE));

  // On paper there is no next page: the first rows of the present choice, and every folded part.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const part of folded) part.open = true;
    show(0, PRINTED);
  });
  addEventListener("afterprint", () => {
    for (const part of folded) part.open = false;
    show(page * PAGE, PAGE);
  });
  byId("table").hidden = false;
  filter();
})();
