"""Text to tokens and back: templates, tools, grammars, stop strings. Knows neither protocols nor workers."""
