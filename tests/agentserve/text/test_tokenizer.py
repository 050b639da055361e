"""Markers stay text, no byte is lost, and the cache changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BaseTokenizer

from agentserve.text import tokenizer as module
from agentserve.text.detokenizer import Detokenizer
from agentserve.text.errors import TokenizerError, TooManyTokens
from agentserve.text.tokenizer import Tokenizer
from tests.agentserve.text.models import ORDINARY, SPECIAL, tokenizer, tokenizer_json

texts = st.text(st.characters(codec="utf-8"), max_size=60)


@pytest.mark.parametrize("marker", [*SPECIAL, *ORDINARY])
def test_no_text_makes_a_marker(marker: str):
    """Also those that the tokenizer does not flag as special, such as <tool_call>."""
    tok = tokenizer()
    ids = tok.encode(f"a{marker}{marker}\n{marker}").tolist()
    assert not set(ids) & set(tok.marker_by_id)
    assert tok.decode(ids) == f"a{marker}{marker}\n{marker}"
    assert tok._broken is None  # and the text is still encoded in one piece


@settings(deadline=None)
@given(parts=st.lists(st.one_of(texts, st.sampled_from([*SPECIAL, *ORDINARY])), max_size=5))
def test_any_text_comes_back_and_never_as_a_marker(parts: list[str]):
    tok = tokenizer()
    text = "".join(parts)
    ids = tok.encode(text).tolist()
    assert tok.decode(ids) == text
    assert not set(ids) & set(tok.marker_by_id)


def test_ids_made_an_array_in_runs_are_all_ids(monkeypatch: pytest.MonkeyPatch):
    text = "several tokens, more than one run of them\n" * 3
    whole = Tokenizer(tokenizer_json()).encode(text)
    monkeypatch.setattr(module, "RUN_IDS", 3)
    assert Tokenizer(tokenizer_json()).encode(text).tolist() == whole.tolist()


@settings(deadline=None)
@given(ids=st.lists(st.integers(-1, tokenizer().vocab_size + 1), max_size=30))
def test_any_ids_stream_to_the_text_of_their_bytes(ids: list[int]):
    """Characters in several tokens, broken ones, and whole tokens behind an unfinished one."""
    tok = tokenizer()
    stream = Detokenizer(tok)
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == b"".join(map(tok.token_bytes, ids)).decode("utf-8", "replace")


@settings(deadline=None)
@given(text=texts)
def test_stream_equals_whole(text: str):
    tok = tokenizer()
    stream = Detokenizer(tok)
    shown = [stream.push(i) for i in tok.encode(text).tolist()]
    assert "".join(shown) + stream.flush() == text
    assert all("\ufffd" not in s for s in shown) or "\ufffd" in text


def test_unfinished_character_is_shown_at_the_end():
    tok = tokenizer()
    stream = Detokenizer(tok)
    half = tok.encode("日").tolist()[:-1]
    assert [stream.push(i) for i in half] == [""] * len(half)
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_cache_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CACHE_BYTES", 900)
    tok = Tokenizer(tokenizer_json())
    first = {t: tok.encode(t).tolist() for t in map(str, range(100))}
    assert 0 < tok.kept_bytes <= 900
    assert {t: tok.encode(t).tolist() for t in first} == first


def test_a_batch_equals_its_parts():
    tok = Tokenizer(tokenizer_json())
    parts = ["a", "hello world", "", "a", "\n\n", "日本"]
    together = [x.tolist() for x in tok.encode_many(parts)]
    assert together == [Tokenizer(tokenizer_json()).encode(p).tolist() for p in parts]


def test_lone_surrogates_are_survived():
    assert tokenizer().encode("a\ud800b").tolist()


def spm(markers: tuple[str, ...] = ("<|end|>",), extra: tuple[str, ...] = ()) -> str:
    """A tokenizer of the sentencepiece kind: space prefix, ▁ for spaces, byte fallback. extra: words of the model itself."""
    vocab = {"<unk>": 0}
    for token in [f"<0x{b:02X}>" for b in range(256)] + ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", *"<|end>", *extra]:
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    for word in extra:
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
        for i in range(2, len(word)):
            vocab.setdefault(word[:i], len(vocab))
    base = BaseTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    base.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    base.add_special_tokens([AddedToken(m, normalized=False) for m in markers])
    return base.to_str()


def test_pieces_of_a_text_get_no_space_of_their_own():
    tok = Tokenizer(spm())
    assert tok.decode(tok.encode("ab").tolist()) == "ab"
    assert tok.decode([*tok.encode("a b").tolist(), *tok.encode("b").tolist()]) == "a bb"
    assert tok.decode(tok.encode("a日").tolist()) == "a日"


def test_a_marker_that_is_also_a_word_is_cut_in_two():
    tok = Tokenizer(spm(extra=("<|end|>",)))
    marker = tok.markers["<|end|>"].id
    for text in ("<|end|>", "a<|end|><|end|>b", "<|end|>\n"):
        ids = tok.encode(text).tolist()
        assert marker not in ids
        assert tok.decode(ids) == text


def test_a_one_character_marker_is_refused_if_text_makes_it():
    with pytest.raises(TokenizerError, match="one character"):
        Tokenizer(spm(markers=("a",)))


def test_white_space_runs_are_ordinary_vocabulary():
    spec = json.loads(tokenizer_json())
    spec["added_tokens"].append(
        {
            "id": 5000,
            "content": " \t \t ",
            "special": False,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
    )
    tok = Tokenizer(json.dumps(spec))
    (run,) = (i for i, t in enumerate(map(tok.token_bytes, range(6000))) if t == b" \t \t ")
    assert run in tok.encode("a \t \t b").tolist()


def test_other_decoders_give_bytes_too():
    base = BaseTokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    tok = Tokenizer(base.to_str())
    assert tok.token_bytes(1).strip() == b"hello"
    assert tok.token_bytes(99) == b""


@pytest.mark.parametrize("definition", ["", "{}", '{"model": 3}'])
def test_a_broken_file_is_named(definition: str):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(definition)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match="is missing"):
        Tokenizer.load(tmp_path)


LONG = "word and word " * 200_000


@pytest.mark.parametrize("texts", [[LONG], [f"{i} {LONG[:100_000]}" for i in range(30)]], ids=["one text", "many texts"])
def test_far_too_many_tokens_are_noticed_early(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    """One frame of 64 MiB must not cost gigabytes, nor a context of many long items."""
    seen: list[int] = []
    encode = Tokenizer._encode_raw

    def counting(self: Tokenizer, pieces: list[str]) -> Any:
        seen.extend(map(len, pieces))
        return encode(self, pieces)

    chosen = Tokenizer(tokenizer_json())
    monkeypatch.setattr(Tokenizer, "_encode_raw", counting)
    with pytest.raises(TooManyTokens) as refusal:
        chosen.encode_many(texts, 10_000)
    assert refusal.value.tokens > 10_000
    assert sum(seen) < 600_000 < sum(map(len, texts))


@pytest.mark.parametrize("length", [0, 1, 1000, 300_000, 700_000])
def test_a_limit_changes_no_ids(length: int) -> None:
    texts = ["word <tool_call> 日本 " * (length // 20), "b", "x" * (length // 10)]
    free = tokenizer().encode_many(texts)
    count = sum(map(len, free))
    for got, want in zip(Tokenizer(tokenizer_json()).encode_many(texts, count), free, strict=True):
        assert got.tolist() == want.tolist()
    if count > 1000:
        with pytest.raises(TooManyTokens):
            Tokenizer(tokenizer_json()).encode_many(texts, count // 2)
