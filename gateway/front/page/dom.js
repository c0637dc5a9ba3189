// Elements from data. Text becomes text nodes only, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** A new element with these attributes and children; a child is an element or a string, null is left out. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of a drawing. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Change what has changed: nothing else is laid out, selected text stays selected. */
export function setText(element, text) {
  if (element.textContent !== `${text}`) element.textContent = text;
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== `${value}`) element.setAttribute(name, value);
  }
}
