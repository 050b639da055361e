"""Agent-session server: sockets, protocol, sessions, text and the worker process."""
