"use strict";
// Shows the values of a chart's lines under the pointer. Without this script the charts are complete, too.
for (const plot of document.querySelectorAll(".plot[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart);
  const [left, right] = chart.x;
  const cursor = document.createElement("div");
  const tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  cursor.hidden = tip.hidden = true;
  plot.append(cursor, tip);

  const time = (s) => s < 60 ? `${+s.toPrecision(3)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`
    : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  const text = (value) => Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));

  function nearest(points, at) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < at) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - at) <= Math.abs(points[high][0] - at) ? points[low] : points[high];
  }

  function show(event) {
    const box = plot.getBoundingClientRect();
    const at = left + (right - left) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const found = chart.series.filter((each) => each.points.length).map((each) => [each, nearest(each.points, at)]);
    const x = found.reduce((best, [, point]) => Math.abs(point[0] - at) < Math.abs(best - at) ? point[0] : best, found[0][1][0]);
    const title = document.createElement("b");
    title.textContent = chart.kind === "time" ? time(x) : `${chart.name} ${text(x)}`;
    const rows = found.map(([each, point]) => {
      const row = document.createElement("div"), key = document.createElement("i");
      key.className = `s${each.colour}`;
      row.append(key, `${each.name} ${text(point[1])}`);
      return row;
    });
    tip.replaceChildren(title, ...rows);
    cursor.hidden = tip.hidden = false;
    const share = right > left ? (x - left) / (right - left) : 0.5;
    cursor.style.left = `${100 * share}%`;
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 10px)`;
  }

  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
}
