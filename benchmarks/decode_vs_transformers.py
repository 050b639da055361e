"""Decode speed of the demo model, in this engine and in transformers, on the CPU with the same weights.

    python -m benchmarks.decode_vs_transformers [--model DIR] [--threads 1 2] [--repeats 7] [--record]

Without --model a random checkpoint of the demo model's geometry is made. Rounds alternate between the two; the figure is the
ratio of each pair.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from benchmarks.common import report
from benchmarks.runners import Ours, Rate, Transformers, compare, time_decode

PROMPT, TOKENS = 200, 64


def random_demo(directory: Path) -> Path:
    """A random bf16 checkpoint of the demo model's shape."""
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        vocab_size=1536,
        hidden_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    Qwen3_5MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model or random_demo(Path(scratch))
        theirs = Transformers(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))
        for threads in arguments.threads:
            ours = Ours(directory, threads, PROMPT + TOKENS * (arguments.repeats + 1))
            torch.set_num_threads(threads)
            prompt = torch.randint(0, 1536, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
            speeds: dict[str, list[Rate]] = {"engine": [], "transformers": []}
            for runner in (ours, theirs):
                token = runner.prefill(prompt)
                time_decode(runner, token, 8)
            for _ in range(arguments.repeats):
                for runner in (ours, theirs):
                    token = runner.prefill(prompt)
                    speeds[runner.name].append(time_decode(runner, token, TOKENS))
            figures = compare(speeds["engine"], speeds["transformers"])
            model = str(arguments.model.name) if arguments.model else "random, demo geometry"
            workload = {"prompt_tokens": PROMPT, "decode_tokens": TOKENS, "threads": threads, "unit": "tokens/s"}
            report("decode_vs_transformers", model, workload, figures, arguments.record)


if __name__ == "__main__":
    main()
