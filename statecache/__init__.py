"""Keyed store of KV and recurrent-state checkpoints. Bytes, tokens and SQL; no torch, no sockets, no sessions."""
