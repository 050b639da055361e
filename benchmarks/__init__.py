"""Measurements. Each module is one command that prints JSON lines; `--record` also appends them to results/."""
