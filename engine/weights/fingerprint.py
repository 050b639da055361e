"""One digest for all weights that a model uses: SHA-256 over the tensors' xxh3_128, in the order of their names.

xxh3 runs at memory speed while the bytes are read anyway; SHA-256 of the same bytes would take most of a minute for 60 GB.
"""

from __future__ import annotations

import hashlib


class Fingerprint:
    """Collects tensors while they are loaded; the order of `add` does not matter."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], content: bytes) -> None:
        """content: digest of the tensor's bytes (see digests.py). Adding a name again changes nothing."""
        if name not in self._digests:
            dims = ",".join(map(str, shape))
            self._digests[name] = f"{len(name)}:{name} {dtype} [{dims}] ".encode() + content

    def hexdigest(self) -> str:
        total = hashlib.sha256()
        for name in sorted(self._digests):
            total.update(self._digests[name])
        return total.hexdigest()
