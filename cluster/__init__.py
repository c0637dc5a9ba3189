"""The control plane: registry, block index, handoff rows and events in Redis; metrics. No torch."""
