"""The decode tier: grants blocks, receives sealed KV, generates tokens in a continuous batch."""
