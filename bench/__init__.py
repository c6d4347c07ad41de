"""Benchmarks: one module a subject, each with `rows()`. `python -m bench` runs them and prints a table."""
