"""What gateway and engine both need of a model's vocabulary: its files, and grammars over its tokens."""
