"""Messages → text pieces → token ids, the way a server builds a prompt.

A prompt is literal template text (encoded with special tokens), contents (encoded as plain text: a marker that a user
types stays text) and generated regions (what the model wrote, up to and with <|im_end|>). Each piece is encoded alone,
so the ids of a content do not depend on what stands around it. tests/examples compares render() with the Jinja template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from examples.demo_model.dialogues import Session, Turn
from examples.demo_model.tools import call_json

LITERAL, CONTENT, GENERATED = 0, 1, 2


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is encoded by itself. learn: whether the loss counts it (generated pieces only)."""

    text: str
    role: int
    learn: bool = False


def system_pieces(system: str, declarations: Sequence[dict]) -> list[Piece]:
    """The system block, as in chat_template.jinja; nothing when there is neither text nor a tool."""
    if not system and not declarations:
        return []
    pieces = [Piece("<|im_start|>system\n", LITERAL)]
    if system:
        pieces.append(Piece(system, CONTENT))
    if declarations:
        lines = "".join("\n" + tool_line(tool) for tool in declarations)
        pieces.append(Piece(("\n\n" if system else "") + "# Tools\n<tools>" + lines + "\n</tools>", LITERAL))
    pieces.append(Piece("<|im_end|>\n", LITERAL))
    return pieces


def tool_line(tool: dict) -> str:
    dump = lambda value: json.dumps(value, ensure_ascii=False)  # noqa: E731
    return f'{{"name": {dump(tool["name"])}, "description": {dump(tool["description"])}, "parameters": {dump(tool["parameters"])}}}'


def user_pieces(text: str) -> list[Piece]:
    return [Piece("<|im_start|>user\n", LITERAL), Piece(text, CONTENT), Piece("<|im_end|>\n", LITERAL)]


def result_pieces(results: Sequence[str]) -> list[Piece]:
    """Tool results: one user turn with a <tool_response> for each."""
    pieces = [Piece("<|im_start|>user", LITERAL)]
    for result in results:
        pieces += [
            Piece("\n<tool_response>\n", LITERAL),
            Piece(result, CONTENT),
            Piece("\n</tool_response>", LITERAL),
        ]
    pieces.append(Piece("<|im_end|>\n", LITERAL))
    return pieces


def generated(thinking: str | None, text: str, calls: Sequence[str]) -> str:
    """What the model writes in one step, without <|im_end|>. thinking None: a history message without its thinking."""
    out = "" if thinking is None else f"<think>\n{thinking}\n</think>\n\n"
    out += text
    for index, call in enumerate(calls):
        out += ("\n" if index or text else "") + f"<tool_call>\n{call}\n</tool_call>"
    return out


def assistant_pieces(thinking: str | None, text: str, calls: Sequence[str], learn: bool) -> list[Piece]:
    pieces = [Piece("<|im_start|>assistant\n", LITERAL)]
    if thinking == "":  # thinking switched off: the prompt carries the empty block, nothing to learn in it
        pieces.append(Piece("<think>\n\n</think>\n\n", LITERAL))
        pieces.append(Piece(generated(None, text, calls) + "<|im_end|>", GENERATED, learn))
    else:
        pieces.append(Piece(generated(thinking, text, calls) + "<|im_end|>", GENERATED, learn))
    pieces.append(Piece("\n", LITERAL))
    return pieces


def turn_pieces(turn: Turn, thinking: str, learn: bool) -> list[Piece]:
    """One turn. thinking: "keep", "empty" or "drop"."""

    def shown(text: str) -> str | None:
        return text if thinking == "keep" else "" if thinking == "empty" else None

    pieces = []
    if turn.note:
        pieces = [
            Piece("<|im_start|>system\n", LITERAL),
            Piece(turn.note, CONTENT),
            Piece("<|im_end|>\n", LITERAL),
        ]
    pieces += user_pieces(turn.user)
    for step in turn.steps:
        pieces += assistant_pieces(shown(step.thinking), "", [call_json(call) for call in step.calls], learn)
        pieces += result_pieces([call.result for call in step.calls])
    return pieces + assistant_pieces(shown(turn.thinking), turn.answer, [], learn)


def session_pieces(session: Session, mode: str) -> list[Piece]:
    """A whole session. mode: "keep" all thinking, "template" (only the last turn's), or "empty"."""
    pieces = system_pieces(session.system, [tool.declaration for tool in session.tools])
    for index, turn in enumerate(session.turns):
        history = mode == "template" and index < len(session.turns) - 1
        pieces += turn_pieces(turn, "drop" if history else "empty" if mode == "empty" else "keep", learn=not history)
    return pieces


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring literals: a stretch between two contents is encoded as a whole."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and piece.role == LITERAL and merged[-1].role == LITERAL:
            merged[-1] = Piece(merged[-1].text + piece.text, LITERAL)
        elif piece.text:
            merged.append(piece)
    return merged


class Encoder:
    """Encodes pieces with one tokenizer in its two modes. Not safe to share between threads."""

    def __init__(self, tokenizer_json: str) -> None:
        """tokenizer_json: path of tokenizer.json."""
        from tokenizers import Tokenizer

        self.special = Tokenizer.from_file(tokenizer_json)
        self.plain = Tokenizer.from_file(tokenizer_json)
        self.plain.encode_special_tokens = True
        self._literals: dict[str, list[int]] = {}

    def token(self, marker: str) -> int:
        """The id of a marker. Raises KeyError if the tokenizer has no such token."""
        found = self.special.token_to_id(marker)
        if found is None:
            raise KeyError(marker)
        return found

    def encode(self, rows: Sequence[Sequence[Piece]]) -> list[tuple[list[int], list[int]]]:
        """For each row of pieces: (token ids, 1 where the loss counts the token)."""
        merged = [merge(row) for row in rows]
        contents = [p.text for row in merged for p in row if p.role == CONTENT]
        regions = [p.text for row in merged for p in row if p.role == GENERATED]
        content_ids = iter(self.plain.encode_batch_fast(contents, add_special_tokens=False))
        region_ids = iter(self.special.encode_batch_fast(regions, add_special_tokens=False))
        encoded = []
        for row in merged:
            ids: list[int] = []
            mask: list[int] = []
            for piece in row:
                if piece.role == CONTENT:
                    new = next(content_ids).ids
                elif piece.role == GENERATED:
                    new = next(region_ids).ids
                else:
                    new = self._literal(piece.text)
                ids += new
                mask += [1 if piece.learn else 0] * len(new)
            encoded.append((ids, mask))
        return encoded

    def _literal(self, text: str) -> list[int]:
        ids = self._literals.get(text)
        if ids is None:
            ids = self.special.encode(text, add_special_tokens=False).ids
            if len(text) < 200 and len(self._literals) < 5000:
                self._literals[text] = ids
        return ids
