"""Many agents at once: machines as models, a simulator of policies, an engine that only takes its time, and a load lab."""
