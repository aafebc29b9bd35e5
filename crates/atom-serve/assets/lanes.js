// The picture of lanes x last steps: columns in the order of each group's steps, one row for each lane.

/** Columns kept of each group; more than any screen shows. */
const COLUMNS_MAX = 600;
const COLUMN_PX = 7;
const LABEL_PX = 64;
const GROUP_GAP_PX = 10;
/** Labels of 64 lanes can still be told apart. */
const ROW_PX_MIN = 16;

export class Lanes {
  constructor(canvas, onSelect) {
    this.canvas = canvas;
    this.onSelect = onSelect;
    this.groups = new Map(); // group -> { columns: [{ key, epoch, step }], lanes: Map(lane -> Map(key -> step)) }
    this.selected = null; // { group, lane, key }
    this.rows = [];
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.select(null));
    canvas.addEventListener("keydown", (event) => this.move(event));
    canvas.addEventListener("focus", () => this.select(this.selected ?? this.newest()));
    canvas.addEventListener("blur", () => this.select(null));
  }

  /** The lanes that there are, also before their first step. */
  know(lanes) {
    this.names = lanes.map(({ lane }) => lane);
  }

  add(steps) {
    const touched = new Set();
    for (const step of steps) {
      let group = this.groups.get(step.group);
      if (!group) this.groups.set(step.group, (group = { columns: [], keys: new Set(), lanes: new Map() }));
      const key = `${step.epoch}:${step.step}`;
      if (!group.keys.has(key)) {
        group.keys.add(key);
        group.columns.push({ key, epoch: step.epoch, step: step.step });
        touched.add(group);
      }
      let lane = group.lanes.get(step.lane);
      if (!lane) group.lanes.set(step.lane, (lane = new Map()));
      lane.set(key, step);
    }
    for (const group of touched) {
      group.columns.sort((a, b) => a.epoch - b.epoch || a.step - b.step);
      for (const { key } of group.columns.splice(0, Math.max(0, group.columns.length - COLUMNS_MAX))) {
        group.keys.delete(key);
        for (const lane of group.lanes.values()) lane.delete(key);
      }
    }
    this.draw();
  }

  /** The steps that are drawn, of all lanes. */
  *shown() {
    for (const group of this.groups.values()) {
      for (const { key } of group.columns.slice(-this.columnsShown())) {
        for (const lane of group.lanes.values()) if (lane.has(key)) yield lane.get(key);
      }
    }
  }

  columnsShown() {
    return Math.max(1, Math.floor((this.canvas.parentElement.clientWidth - LABEL_PX) / COLUMN_PX));
  }

  /** Where each lane's row is. */
  layout() {
    const groups = [...this.groups.entries()].sort(([a], [b]) => a - b);
    const known = groups.flatMap(([id, group]) => [...group.lanes.keys()].sort((a, b) => a - b).map((lane) => ({ id, lane })));
    const idle = (this.names ?? []).filter((lane) => !known.some((row) => row.lane === lane));
    const all = [...known, ...idle.map((lane) => ({ id: null, lane }))];
    const height = Math.min(132, Math.max(ROW_PX_MIN, Math.floor(420 / Math.max(1, all.length))));
    let y = 4;
    let before = all[0]?.id;
    this.rows = all.map(({ id, lane }) => {
      if (id !== before) y += GROUP_GAP_PX;
      before = id;
      const row = { group: id, lane, y, height };
      y += height;
      return row;
    });
    return y + 4;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (width === 0) return;
    const height = Math.max(60, this.layout());
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const ink = this.inks();
    let most = 1;
    for (const { bucket_rows } of this.shown()) most = Math.max(most, bucket_rows);
    pen.textBaseline = "middle";
    pen.font = `${this.rows[0]?.height < 18 ? 11 : 12}px ${getComputedStyle(this.canvas).fontFamily}`;
    for (const row of this.rows) this.drawRow(pen, ink, row, width, most);
  }

  drawRow(pen, ink, { group: id, lane, y, height }, width, most) {
    pen.fillStyle = ink.text;
    pen.fillText(`lane ${lane}`, 2, y + height / 2, LABEL_PX - 10);
    pen.fillStyle = ink.line;
    pen.fillRect(LABEL_PX, y + height - 1, width - LABEL_PX, 1);
    const group = this.groups.get(id);
    if (!group) return;
    const columns = group.columns.slice(-this.columnsShown());
    const steps = group.lanes.get(lane);
    const right = LABEL_PX + this.columnsShown() * COLUMN_PX;
    columns.forEach(({ key }, at) => {
      const step = steps.get(key);
      const x = right - (columns.length - at) * COLUMN_PX;
      const chosen = this.selected?.key === key && this.selected.group === id;
      if (chosen) {
        pen.fillStyle = ink.select;
        pen.fillRect(x - 1, y, COLUMN_PX, height - 1);
      }
      if (step) this.drawStep(pen, ink, step, { x, bottom: y + height - 1, room: height - 4, most });
      if (chosen && this.selected.lane === lane) {
        pen.strokeStyle = ink.text;
        pen.strokeRect(x - 0.5, y + 0.5, COLUMN_PX - 1, height - 2);
      }
    });
  }

  /** The bucket by its logarithm, since a prompt's is a hundred times an answer's; the parts by their share. */
  drawStep(pen, ink, step, { x, bottom, room, most }) {
    const share = most === 1 ? 1 : 0.22 + (0.78 * Math.log2(step.bucket_rows)) / Math.log2(most);
    const wait = Math.min(room / 5, WAIT_PX);
    const full = Math.max(3, (room - wait) * share);
    const thick = COLUMN_PX - 2;
    let top = bottom;
    const part = (rows, color) => {
      if (rows === 0) return;
      // One row among hundreds is still there to see.
      const size = Math.max(PART_PX_MIN, (full * rows) / step.bucket_rows);
      top -= size;
      pen.fillStyle = color;
      pen.fillRect(x, top, thick, size);
    };
    pen.fillStyle = ink.padding;
    pen.fillRect(x, bottom - full, thick, full);
    part(step.decode_rows, ink.decode);
    part(step.prefill_rows, ink.prefill);
    const waited = step.wait_us / (step.wait_us + step.replay_us);
    if (waited > WAIT_SHARE_SHOWN) {
      pen.fillStyle = ink.wait;
      pen.globalAlpha = 0.25 + 0.75 * waited;
      pen.fillRect(x, bottom - room, thick, wait * Math.max(0.34, waited));
      pen.globalAlpha = 1;
    }
  }

  /** Colours come from the style, so that both themes have theirs. */
  inks() {
    const of = (name) => getComputedStyle(document.getElementById(`ink-${name}`)).backgroundColor;
    const style = getComputedStyle(this.canvas);
    return {
      decode: of("decode"),
      prefill: of("prefill"),
      padding: of("padding"),
      wait: of("wait"),
      text: style.color,
      line: style.borderBottomColor,
      select: style.outlineColor,
    };
  }

  point({ offsetX, offsetY }) {
    const row = this.rows.find(({ y, height }) => offsetY >= y && offsetY < y + height);
    const group = row && this.groups.get(row.group);
    if (!group || offsetX < LABEL_PX) return this.select(null);
    const columns = group.columns.slice(-this.columnsShown());
    const place = Math.floor((offsetX - LABEL_PX) / COLUMN_PX) - (this.columnsShown() - columns.length);
    const column = columns[place];
    this.select(column ? { group: row.group, lane: row.lane, key: column.key } : null);
  }

  newest() {
    const row = this.rows[0];
    const column = row && this.groups.get(row.group)?.columns.at(-1);
    return column ? { group: row.group, lane: row.lane, key: column.key } : null;
  }

  /** Arrow keys: left and right through steps, up and down through lanes. */
  move(event) {
    const now = this.selected ?? this.newest();
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!now || !by) return;
    event.preventDefault();
    const at = this.rows.findIndex(({ lane }) => lane === now.lane);
    const row = this.rows[Math.min(this.rows.length - 1, Math.max(0, at + by[1]))];
    const { columns } = this.groups.get(row.group) ?? { columns: [] };
    const place = columns.findIndex(({ key }) => key === now.key);
    const from = place < 0 ? columns.length - 1 : place;
    const column = columns[Math.min(columns.length - 1, Math.max(0, from + by[0]))];
    if (column) this.select({ group: row.group, lane: row.lane, key: column.key });
  }

  select(selected) {
    if (selected?.key === this.selected?.key && selected?.lane === this.selected?.lane) return;
    this.selected = selected;
    this.draw();
    const step = selected && this.groups.get(selected.group)?.lanes.get(selected.lane)?.get(selected.key);
    this.onSelect(step, selected);
  }
}

/** The strip above a column that shows its wait. */
const WAIT_PX = 6;
/** Less is not worth a mark. */
const WAIT_SHARE_SHOWN = 0.05;
const PART_PX_MIN = 1.5;
