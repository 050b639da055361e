"""Trace lab: recorded agent sessions against checkpoint policies alone and against the real state cache. See docs/traces.md.

data.py reads recordings, compose.py turns recorded text into prompts of the served model; policies.py says what is kept,
alone.py replays that without bytes; store.py (block ids) and text.py (whole path, with a recorded engine) replay against the
real StateCache over tiers.py; figures.py counts, rates.py turns tokens into seconds, show.py and plot.py present.
"""
