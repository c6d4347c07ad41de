"""Environments in other processes and on other hosts; see docs/workers.md."""
