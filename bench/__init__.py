"""Benchmarks: a module and a command each (`python -m bench.overload`), figures as ratios within one run."""
