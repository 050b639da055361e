"""Offloaded mixture-of-experts engine: token ids in, token ids out. No SQL, no sockets, no sessions."""
