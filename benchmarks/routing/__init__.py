"""Which experts should lie in the slots: placement policies on identical recordings of what a router chose. CPU only.

`docs/gpu.md` explains the figures. Recordings come from the demo model (record.py) or are made up (sources.py).
"""
