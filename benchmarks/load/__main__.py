"""The load lab: `python -m benchmarks.load COMMAND`. See docs/load.md.

policies     who goes first, in virtual time
crowd        the load of agents, in virtual time
foretold     the load of agents behind the worker's own loop, in virtual time
predictions  how well first tokens are foretold, in virtual time
agents       agents on a server: first tokens, gaps, deadlines, predictions, memory
streams      hundreds of streams at once, server on one core
idle         thousands of open sockets
gap          running answers beside a long cold prompt
hostile      steady streams beside clients that misbehave
crash        agents through every kind of failure: right answers, nothing lost, how soon
"""

from __future__ import annotations

import sys

from benchmarks.load import crash, crowded, hostile, lab, policies, virtual, virtual_agents, wire

COMMANDS = {
    "policies": policies.main,
    "crowd": crowded.main,
    "foretold": virtual_agents.main,
    "predictions": virtual.main,
    "agents": lab.main,
    "streams": wire.streams,
    "idle": wire.idle,
    "gap": wire.gap,
    "hostile": hostile.main,
    "crash": crash.main,
}


def main() -> None:
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        sys.exit((__doc__ or "").strip() if name in ("", "-h", "--help") else f"no command {name!r}: {', '.join(COMMANDS)}")
    COMMANDS[name](arguments)


if __name__ == "__main__":
    main()
