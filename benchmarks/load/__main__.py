"""The load lab: `python -m benchmarks.load COMMAND`.

policies    who goes first, in virtual time
"""

from __future__ import annotations

import sys

from benchmarks.load import lab, policies, wire

COMMANDS = {"policies": policies.main, "agents": lab.main, "streams": wire.streams, "idle": wire.idle, "gap": wire.gap}


def main() -> None:
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        sys.exit((__doc__ or "").strip() if name in ("", "-h", "--help") else f"no command {name!r}: {', '.join(COMMANDS)}")
    COMMANDS[name](arguments)


if __name__ == "__main__":
    main()
