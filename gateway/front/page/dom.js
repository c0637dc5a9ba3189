// Elements from data. Text becomes text nodes only, never markup.

/** A new element with these attributes and children; a child is an element or a string, null is left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}
