"""Attention, cache and matrix kernels: Triton, CPU, and a plain-torch twin of each. Imports nothing here."""
