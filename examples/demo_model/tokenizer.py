"""Trains the demo tokenizer: byte-level BPE over words, plus hand-picked merges for JSON glue, spaces and newlines.

transformers gives this model type its own pre-tokenizer expression whatever the file says, and that expression glues one
leading space or sign to a word. Merges here never cross from a sign to a letter, so a value is cut into the same tokens
after a space, a quote or a slash: copying a value is then copying its tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from examples.demo_model import rows
from examples.demo_model.dialogues import Writer

VOCABULARY = 2048
MARKERS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<tools>", "</tools>",
)  # fmt: skip
# Glue between words, in the order of application; each is built from the two before it that are already tokens.
GLUE = ('{"', '":', ' "', ' {"', '"}', '",', '"}}', '}}', '":{', ' [', '["', '"]', '"],', '"]}', ' {', '},', '}}}', '//', '://', '..', '...', '--', '->', ' =', ' -', '("', '")', "('", "')", '()', ');', '/*', '**', ': ', '##')  # fmt: skip
BLANKS = ("\n\n", "  ", "   ", "    ", "\n\n\n")
# What Qwen3.5 tokenizers use; a fact of the format, needed so that tokenizer.json alone gives the same ids.
SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def corpus(sessions: int, seed: int) -> Counter[str]:
    """Counts of letter runs in generated sessions."""
    counts: Counter[str] = Counter()
    letters = regex.compile(r"[\p{L}\p{M}]+")
    for index in range(sessions):
        writer = Writer(Random(seed + index), held_out=False)
        for _ in range(5):
            writer.turn()
        for piece in rows.session_pieces(writer.session, "keep"):
            counts.update(letters.findall(piece.text))
    for marker in MARKERS:
        for word in letters.findall(marker):
            counts.pop(word, None)
    return counts


def train(sessions: int = 12000, seed: int = 7) -> Tokenizer:
    """Train the tokenizer. Deterministic for one seed."""
    counts = corpus(sessions, seed)
    trainer_model = Tokenizer(models.BPE())
    trainer_model.normalizer = normalizers.NFC()
    trainer_model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    room = VOCABULARY - len(MARKERS) - len(GLUE) - len(BLANKS)
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = [word for word, count in sorted(counts.items()) for _ in range(min(count, 4000))]
    trainer_model.train_from_iterator(words, trainer)
    state = json.loads(trainer_model.to_str())["model"]
    vocabulary: dict[str, int] = state["vocab"]
    merges = [tuple(pair) for pair in state["merges"]]
    for text in (*GLUE, *BLANKS):
        _add_merge(text, vocabulary, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return tokenizer


def _add_merge(text: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Make `text` a token by one more merge of two tokens that exist."""
    shown = text.replace(" ", "Ġ").replace("\n", "Ċ")
    if shown in vocabulary:
        return
    for cut in range(len(shown) - 1, 0, -1):
        left, right = shown[:cut], shown[cut:]
        if left in vocabulary and right in vocabulary:
            vocabulary[shown] = len(vocabulary)
            merges.append((left, right))
            return
    raise ValueError(f"no two tokens make {text!r}")


CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def write(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen3_5Tokenizer",
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "bos_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
