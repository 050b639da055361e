"""What a token costs to compute and a byte to bring back, on two machines: for turning tokens into seconds.

Assumptions with their sources, not measurements of this project; ratios between policies on one machine are what counts.
Model: Qwen3.6-35B-A3B, 20,480 B of bf16 KV per token (10 attention layers), 61.4 MiB of recurrent state (30 layers) at fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_TOKEN_BYTES = 20_480
"""10 attention layers × 2 × 2 heads × 256 × 2 B."""
STATE_BYTES = 64_382_566
"""61.4 MiB: 30 layers of a gated delta net with their convolution tails."""
LOGITS_BYTES = 4 * 248_320


@dataclass(frozen=True)
class Machine:
    """prefill: tokens per second. ram, disk: bytes per second from where a saved state lies to where it is used."""

    name: str
    prefill: float
    ram: float
    disk: float

    def seconds(self, tokens: int, ram_bytes: int = 0, disk_bytes: int = 0) -> float:
        """Restoring so many bytes, then computing so many tokens; nothing overlaps."""
        return tokens / self.prefill + ram_bytes / self.ram + disk_bytes / self.disk


LAPTOP = Machine("laptop", prefill=300.0, ram=12e9, disk=3e9)
"""A small GPU with the experts in host memory. Prefill: 287 and 326 tokens/s reported for this model at 4 bits on an RTX 2060
with 6 GB and a Ryzen 5600G (ggml-org/llama.cpp pull request 22673, a comment of 2026-05-08). Assumed: 12 GB/s over 16 lanes of
PCIe 3.0, 3 GB/s from an NVMe disk of that generation."""
H200 = Machine("H200", prefill=6_800.0, ram=55.3e9, disk=6e9)
"""Experts streamed from host memory. Prefill: 0.60 s for 8,192 tokens at half of the layers measured with FreeToken 0.1.2, so
twice that for all; 55.3 GB/s from pinned memory measured on that machine. Assumed: 6 GB/s from its disk."""
MACHINES = (LAPTOP, H200)
