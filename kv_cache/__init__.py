"""Blocks beyond handoffs: pulled from another worker's prefix cache, kept on disk and read again."""
