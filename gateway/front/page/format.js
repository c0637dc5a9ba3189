// Quantities as text. Each has as many digits as can be read at a glance.

export function formatDuration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
}

export function formatBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
  return `${(count / 1024 ** power).toFixed(power && count < 100 * 1024 ** power ? 1 : 0)} ${units[power]}`;
}

export function formatCount(count, digits = 0) {
  if (count >= 1e6) return `${(count / 1e6).toFixed(1)} M`;
  if (count >= 1e5) return `${(count / 1e3).toFixed(0)} k`;
  const options = { maximumFractionDigits: digits };
  return count.toLocaleString("en", options).replaceAll(",", "\u202f");
}

/** Per second: small rates keep a digit after the point. */
export function formatRate(rate) {
  return rate > 0 && rate < 10 ? rate.toFixed(1) : formatCount(rate);
}

/** Of a column that says "ms". */
export function formatMs(seconds) {
  return seconds < 0.1 ? (seconds * 1000).toFixed(1) : formatCount(seconds * 1000);
}

/** How long something has been so, in words that do not change often. */
export function formatAge(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}
