"""A 1.27 B Qwen3-MoE in bf16 (random seeded weights), prefill and decode, in this engine and in transformers.

    python -m benchmarks.peer_model [--threads 1 2] [--contexts 512 2048] [--repeats 3] [--record] [--quick]

Hidden 1024, 12 layers, 64 experts of width 512, top-8. Both run the same weights in one process, in alternation; the figures
are ratios of pairs. Needs 8 GB of memory. --quick: one repeat, fewer decode tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.common import report
from benchmarks.runners import Ours, Rate, Transformers, compare, time_decode, time_prefill

VOCAB = 32768


def build(directory: Path) -> Path:
    """Write the checkpoint: 1.27 B parameters, seeded."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
    finally:
        torch.set_default_dtype(default)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--model", type=Path, help="directory to keep the checkpoint in, made if it is empty")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    repeats, count = (1, 8) if arguments.quick else (arguments.repeats, arguments.decode_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model or Path(scratch)
        if not (directory / "config.json").exists():
            build(directory)
        theirs = Transformers(
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager")
        )
        parameters = sum(p.numel() for p in theirs.model.parameters())
        for threads in arguments.threads:
            for context in arguments.contexts:
                measure(directory, theirs, threads, context, repeats, count, parameters, arguments.record)


def measure(
    directory: Path,
    theirs: Transformers,
    threads: int,
    context: int,
    repeats: int,
    count: int,
    parameters: int,
    record: bool,
) -> None:
    ours = Ours(directory, threads, context + 2 * count + 64)
    torch.set_num_threads(threads)
    prompt = torch.randint(0, VOCAB, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    prefill: dict[str, list[Rate]] = {"engine": [], "transformers": []}
    decode: dict[str, list[Rate]] = {"engine": [], "transformers": []}
    for runner in (ours, theirs):
        time_decode(runner, runner.prefill(prompt[:64]), 2)
    for _ in range(repeats):
        for runner in (ours, theirs):
            prefill[runner.name].append(time_prefill(runner, prompt))
            decode[runner.name].append(time_decode(runner, prompt[0], count))
    figures = {
        "prefill": compare(prefill["engine"], prefill["transformers"]),
        "decode": compare(decode["engine"], decode["transformers"]),
    }
    workload = {"context": context, "decode_tokens": count, "threads": threads, "unit": "tokens/s", "dtype": "bf16"}
    report("peer_model", f"random qwen3_moe, {parameters / 1e9:.2f} B parameters", workload, figures, record)


if __name__ == "__main__":
    main()
