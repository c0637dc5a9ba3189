// Where everything of the topology goes. Numbers in, numbers out: nothing is drawn here.
//
//   wide      gateway ─── prefill ─── decode ─┐      narrow   gateway ◄─┐
//                ▲     prompts     KV         │               prefill   │
//                └──────── tokens ────────────┘               decode ───┘

const CARD = { kind: "card", w: 292, h: 122, gap: 12, most: 4 };
const CELL = { kind: "cell", w: 118, h: 50, gap: 8, most: 32 };
const DOT = { kind: "dot", w: 62, h: 30, gap: 6, most: Infinity };
const GATEWAY = { w: 176, h: 122 };
const [HEAD, PAD, BUS, MIN_GAP, NARROW, ENOUGH_H] = [44, 10, 34, 100, 900, 300];

/** Boxes {x, y, w, h} of the gateway, of each tier and of each of its workers, for that many of them. Workers that all
 * decode, without a prefill tier, are one tier. */
export function place(width, counts) {
  const tierCounts = counts[0] || !counts[1] ? counts : [counts[1]];
  const layout = width < NARROW ? placeNarrow(width, tierCounts) : placeWide(width, tierCounts);
  return tierCounts === counts ? layout : { ...layout, tiers: [null, ...layout.tiers] };
}

function sizeFor(count) {
  return [CARD, CELL, DOT].find(({ most }) => count <= most);
}

function placeWide(width, counts) {
  const sizes = counts.map(sizeFor);
  const room = width - GATEWAY.w - BUS - counts.length * MIN_GAP;
  const widths = shareOut(room, sizes, counts);
  const tiers = counts.map((count, tier) => arrange(sizes[tier], count, widths[tier]));
  const inner = Math.max(GATEWAY.h, ...tiers.map((tier) => tier.h));
  const gap = (width - GATEWAY.w - BUS - tiers.reduce((sum, { w }) => sum + w, 0)) / tiers.length;
  const last = tiers.at(-1);
  let x = GATEWAY.w;
  for (const tier of tiers) {
    moveTo(tier, x + gap, HEAD + (inner - tier.h) / 2);
    x += gap + tier.w;
  }
  const gateway = { x: 0.5, y: HEAD + (inner - GATEWAY.h) / 2, w: GATEWAY.w, h: GATEWAY.h };
  const bottom = HEAD + inner + 22;
  const centre = ({ x, w }) => x + w / 2;
  const headings = {
    prompts: [GATEWAY.w + gap / 2, HEAD / 2 - 4],
    prefill: last !== tiers[0] && [centre(tiers[0]), HEAD / 2 - 4],
    kv: last !== tiers[0] && [last.x - gap / 2, HEAD / 2 - 4],
    decode: [centre(last), HEAD / 2 - 4],
    tokens: [width / 2, bottom],
  };
  return { isNarrow: false, width, height: bottom + 14, gateway, tiers, headings, bus: { x: width - 12, y: bottom } };
}

function placeNarrow(width, counts) {
  const inner = width - BUS;
  const tiers = counts.map((count) => arrange(count > 8 ? sizeFor(count) : CARD, count, inner));
  const gateway = { x: 0.5, y: 0.5, w: inner, h: GATEWAY.h };
  const last = tiers.at(-1);
  let end = gateway;
  for (const tier of tiers) {
    moveTo(tier, 0, end.y + end.h + HEAD);
    end = tier;
  }
  const above = ({ y }) => y - HEAD / 2 - 1;
  const [left, right] = [inner / 4, (3 * inner) / 4];
  const headings = {
    prompts: [left, above(tiers[0])],
    prefill: last !== tiers[0] && [right, above(tiers[0])],
    kv: last !== tiers[0] && [left, above(last)],
    decode: [right, above(last)],
    tokens: [right, end.y + end.h + HEAD / 2],
  };
  const height = end.y + end.h + HEAD;
  return { isNarrow: true, width, height, gateway, tiers, headings, bus: { x: width - 10, y: height } };
}

/** Each tier's width: the taller one gets another column, as long as there is room and need. */
function shareOut(room, sizes, counts) {
  const columns = sizes.map(() => 1);
  const widths = () => sizes.map((size, tier) => widthFor(size, columns[tier]));
  const wanted = () => widths().reduce((sum, width) => sum + width, 0);
  const heightOf = (tier) => Math.ceil(counts[tier] / columns[tier]) * (sizes[tier].h + sizes[tier].gap);
  for (;;) {
    const taller = sizes.length === 1 || heightOf(0) > heightOf(1) ? 0 : 1;
    if (sizes[taller] === CARD || heightOf(taller) <= ENOUGH_H) break;
    columns[taller] += 1;
    if (wanted() > room) {
      columns[taller] -= 1;
      break;
    }
  }
  const scale = Math.min(room / wanted(), 1);
  return widths().map((width) => Math.floor(width * scale));
}

function widthFor(size, columns) {
  const frame = size === CARD ? 0 : 2 * PAD;
  return columns * (size.w + size.gap) - size.gap + frame;
}

/** A tier of that many workers, `width` wide: as many columns as fit, none wider than needed. */
function arrange(size, count, width) {
  const pad = size === CARD ? 0 : PAD;
  const fitting = Math.max(Math.floor((width - 2 * pad + size.gap) / (size.w + size.gap)), 1);
  const columns = Math.min(fitting, Math.max(count, 1));
  const w = size === CARD ? (width - size.gap * (columns - 1)) / columns : size.w;
  const rows = Math.max(Math.ceil(count / columns), 1);
  const nodes = Array.from({ length: count }, (_, at) => ({
    x: pad + (at % columns) * (w + size.gap),
    y: pad + Math.floor(at / columns) * (size.h + size.gap),
    w,
    h: size.h,
  }));
  const h = rows * (size.h + size.gap) - size.gap + 2 * pad;
  return { kind: size.kind, x: 0, y: 0, w: size === CARD ? width : columns * (w + size.gap) - size.gap + 2 * pad, h, nodes };
}

function moveTo(tier, x, y) {
  tier.x = x;
  tier.y = y;
  for (const node of tier.nodes) {
    node.x += x;
    node.y += y;
  }
}
