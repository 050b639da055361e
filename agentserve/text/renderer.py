"""A context → token ids: plan it, put sampled ids back where the model wrote, encode the rest in one batch, assemble.

What an answer teaches (`learn`) is here too, because it is the inverse: sampled ids cut at markers, under the keys that the
next plan will ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from agentserve.interfaces import Rendered, RenderRequest
from agentserve.kept import Kept
from agentserve.protocol.items import CustomToolCall, FunctionCall, Item, OutputItem
from agentserve.text.aliases import Alias, AliasBook, call_key, stretch_key, turn_key
from agentserve.text.cuts import find_cuts
from agentserve.text.layout import AFTER_ITEMS, Unit
from agentserve.text.planner import Plan, Planner, claim_of
from agentserve.text.tokenizer import Tokenizer
from statecache.types import MarkerTable

CUT_BYTES = 16 << 20
"""Of sampled turns that are remembered cut at their markers."""
RUN_BYTES = 200
"""What a stretch of ids takes beside them: headers of an array and a tuple."""
Cuts = tuple[np.ndarray, list[tuple[int | None, np.ndarray]]]
_EMPTY = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class ExactRendered(Rendered):
    """Rendered, with what learning from the answer needs.

    answer_start: first token behind the header of the generation prompt. context: digest of the ids before it.
    owners: (first token, item) of each run of tokens, rising; −1 is instructions and tools, len(items) the generation prompt.
    spliced: tokens that were taken as sampled, not encoded.
    """

    answer_start: int = 0
    context: bytes = b""
    owners: tuple[tuple[int, int], ...] = ()
    spliced: int = 0

    def item_of(self, position: int) -> int:
        """Item that the token at `position` belongs to."""
        low, high = 0, len(self.owners)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.owners[middle][0] <= position else (low, middle)
        return self.owners[low - 1][1] if low else -1


class Renderer:
    """Renders contexts of one model. Thread-safe: what is shared locks itself."""

    def __init__(self, tokenizer: Tokenizer, planner: Planner, markers: MarkerTable, book: AliasBook) -> None:
        self._tokenizer = tokenizer
        self._planner = planner
        self._markers = markers
        self._book = book
        self._marker_ids = np.array(sorted(tokenizer.marker_by_id), np.uint32)
        self.cuts: Kept[bytes, Cuts] = Kept(CUT_BYTES)

    # ── render ───────────────────────────────────────────────────────────────────────────────────────────────────

    def render(self, request: RenderRequest, *, prompt: bool = True) -> ExactRendered:
        """Ids, cuts and owners of a context. prompt: with the generation prompt. Raises TemplateError, TooManyTokens."""
        plan = self._planner.plan(request, prompt=prompt)
        units = plan.layout.units
        found = self._book.find(plan.turn_keys)
        turns = {t.start: t for t, key in zip(plan.layout.turns, plan.turn_keys, strict=True) if key in found}
        covered = {i for t in turns.values() for i in range(t.start, t.end)}
        keys = self._keys(units, covered, request)
        found = {**found, **self._book.find(list(keys.values()))} if keys else found
        pieces = self._pieces(units, keys, found, covered, request)
        turn_key_of = dict(zip((t.start for t in plan.layout.turns), plan.turn_keys, strict=True))

        ids: list[np.ndarray] = [_EMPTY] * len(units)
        digest = xxhash.xxh3_128()
        spliced = 0
        context = b""
        for i in range(len(units)):
            if i == plan.layout.prompt:
                context = digest.digest()
            if i in turns:
                alias = _choose(found[turn_key_of[i]], digest.digest())
                spliced += len(alias.ids) // 4
                turn = turns[i]
                ids[turn.start : turn.end] = self._distribute(alias, units[turn.start : turn.end])
            elif i not in covered:
                ids[i], exact_tokens = pieces[i]
                spliced += exact_tokens
            digest.update(ids[i].data)
        if plan.layout.prompt == len(units):
            context = digest.digest()
        return self._rendered(plan, request, ids, context, spliced)

    def _keys(self, units: Sequence[Unit], covered: set[int], request: RenderRequest) -> dict[int, bytes]:
        """Alias key of each uncovered stretch that the model may have written, by unit."""
        keys: dict[int, bytes] = {}
        for i, unit in enumerate(units):
            if not unit.assistant or not unit.contents or i in covered:
                continue
            if unit.contents[0].field in ("text", "reasoning") or self._planner.whole_blocks:
                keys[i] = stretch_key(request.salt, unit.text)
            else:
                item = request.items[unit.contents[0].item]
                if isinstance(item, FunctionCall | CustomToolCall):
                    keys[i] = call_key(request.salt, item.call_id)
        return keys

    def _pieces(
        self,
        units: Sequence[Unit],
        keys: Mapping[int, bytes],
        found: Mapping[bytes, Sequence[Alias]],
        covered: set[int],
        request: RenderRequest,
    ) -> dict[int, tuple[np.ndarray, int]]:
        """Ids of each unit outside the covered ones, and how many of them are as sampled."""
        items = request.items
        texts: list[str] = []
        recipe: list[tuple[int, int, np.ndarray | None, int]] = []  # unit, text before, sampled core, text after (−1: none)

        def text(value: str) -> int:
            if not value:
                return -1
            texts.append(value)
            return len(texts) - 1

        out: dict[int, tuple[np.ndarray, int]] = {}
        for i, unit in enumerate(units):
            if i in covered:
                continue
            if unit.marker is not None:
                out[i] = (np.array([unit.marker.id], np.uint32), 0)
                continue
            aliases = found.get(keys[i], ()) if i in keys else ()
            fit = next((f for a in reversed(aliases) if (f := _fit(a, unit, items)) is not None), None)
            if fit is None:
                recipe.append((i, text(unit.text), None, -1))
            else:
                lead, core, trail = fit
                recipe.append((i, text(lead), core, text(trail)))
        encoded = self._tokenizer.encode_many(texts, request.max_tokens)
        for i, before, core, after in recipe:
            if core is None:
                out[i] = (encoded[before] if before >= 0 else _EMPTY, 0)
            else:
                parts = [encoded[before]] if before >= 0 else []
                parts.append(core)
                parts += [encoded[after]] if after >= 0 else []
                out[i] = (np.concatenate(parts), len(core))
        return out

    def _distribute(self, alias: Alias, units: Sequence[Unit]) -> list[np.ndarray]:
        """Sampled ids of a turn over its units: markers to markers, what lies between to the stretch between them.

        If the sampled markers are not those of the units (a broken call that came back as text), all go to the first unit.
        """
        out = [_EMPTY] * len(units)
        places = [i for i, u in enumerate(units) if u.marker is not None]
        exact, runs = self._cut(alias.ids)
        sampled = [m for m, _ in runs if m is not None]
        if sampled != [units[i].marker.id for i in places if units[i].marker is not None]:  # type: ignore[union-attr]
            out[0] = exact
            return out
        borders = [-1, *places, len(units)]
        gap = 0
        for marker, run in runs:
            if marker is not None:
                out[places[gap]] = run
                gap += 1
                continue
            between = range(borders[gap] + 1, borders[gap + 1])
            target = next((i for i in between if units[i].contents), next(iter(between), None))
            if target is None:
                out[0] = exact
                return [exact, *[_EMPTY] * (len(units) - 1)]
            out[target] = run
        return out

    def _cut(self, ids: bytes) -> Cuts:
        known = self.cuts.get(ids)
        if known is None:
            exact = np.frombuffer(ids, "<u4").astype(np.uint32)
            known = exact, list(self._runs(exact))
            self.cuts.put(ids, known, 2 * len(ids) + RUN_BYTES * len(known[1]))
        return known

    def _runs(self, ids: np.ndarray) -> Iterator[tuple[int | None, np.ndarray]]:
        """Ids cut at markers: (marker id, [id]) and (None, ids between)."""
        at = 0
        for place in np.flatnonzero(np.isin(ids, self._marker_ids)).tolist():
            if place > at:
                yield None, ids[at:place]
            yield int(ids[place]), ids[place : place + 1]
            at = place + 1
        if at < len(ids):
            yield None, ids[at:]

    def _rendered(
        self, plan: Plan, request: RenderRequest, ids: list[np.ndarray], context: bytes, spliced: int
    ) -> ExactRendered:
        units = plan.layout.units
        lengths = [len(x) for x in ids]
        whole = np.concatenate(ids) if ids else _EMPTY
        count = len(request.items)
        owners: list[tuple[int, int]] = []
        starts = [-1] * count
        position = 0
        answer = len(whole)
        for i, (unit, length) in enumerate(zip(units, lengths, strict=True)):
            if i == plan.layout.prompt:
                answer = position
            item = count if unit.item == AFTER_ITEMS else unit.item
            if length and (not owners or owners[-1][1] != item):
                owners.append((position, item))
            if length and 0 <= item < count and starts[item] < 0:
                starts[item] = position
            position += length
        after = next((p for p, item in owners if item == count), len(whole))
        for item in range(count - 1, -1, -1):
            starts[item] = after = after if starts[item] < 0 else min(starts[item], after)
        last = None
        if plan.layout.prompt is not None:
            for unit in units[plan.layout.prompt :]:
                if unit.marker is not None:
                    last = unit.marker.id
        return ExactRendered(
            ids=whole.astype(np.uint32, copy=False),
            cuts=find_cuts(units, lengths, self._markers),
            markers=self._markers,
            item_starts=tuple(starts),
            opens_reasoning=last is not None and last in self._markers.think_open,
            answer_start=answer,
            context=context,
            owners=tuple(owners),
            spliced=spliced,
        )

    # ── learn ────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(
        self, request: RenderRequest, rendered: Rendered, output: Sequence[OutputItem], generated: np.ndarray
    ) -> list[tuple[bytes, Alias]]:
        """Remember the ids behind an answer under every key that a later plan may ask for. Returns what was added."""
        generated = np.asarray(generated, np.uint32)
        source = generated.astype("<u4").tobytes()
        ended = len(generated) > 0 and int(generated[-1]) in self._markers.turn_end
        if ended:
            generated = generated[:-1]
        start = rendered.answer_start if isinstance(rendered, ExactRendered) else len(rendered.ids)
        exact = np.concatenate([rendered.ids[start:], generated])
        if not len(exact) or not output:
            return []
        aliases, signature = self._stretches(request.salt, exact, output)
        context = rendered.context if isinstance(rendered, ExactRendered) else b""
        if context:
            whole = Alias(ids=exact.astype("<u4").tobytes(), context=context)
            if ended:
                aliases.append((turn_key(request.salt, signature), whole))
            own = self._planner.own_turn(output, request.thinking)
            if own is not None:
                expected = [u.marker.id for u in own if u.marker is not None]
                # A truncated answer lacks closing markers that its next rendering has: there only its stretches are exact.
                if ended or expected == [m for m, _ in self._runs(exact) if m is not None]:
                    aliases.append((self._planner.key_of(own, output, request.salt), whole))
        unique = list(dict(aliases).items())
        self._book.add(unique, source)
        return unique

    def _stretches(
        self, salt: bytes, exact: np.ndarray, output: Sequence[OutputItem]
    ) -> tuple[list[tuple[bytes, Alias]], list[bytes]]:
        """Aliases of the stretches between markers, and the signature of the whole (as Planner.key_of makes it)."""
        calls = iter([x for x in output if isinstance(x, FunctionCall | CustomToolCall)])
        whole_blocks = self._planner.whole_blocks
        aliases: list[tuple[bytes, Alias]] = []
        signature: list[bytes] = []
        inside = False
        for marker, ids in self._runs(exact):
            if marker is not None:
                opens, closes = marker in self._markers.call_open, marker in self._markers.call_close
                if not (inside and whole_blocks) or opens or closes:
                    signature.append(b"mark%d" % marker)
                if opens and whole_blocks:
                    here = list(calls) if self._planner.many_in_block else [c for c in (next(calls, None),) if c is not None]
                    signature += [b"call" + claim_of(call) for call in here]
                inside = opens or (inside and not closes)
                continue
            text = self._tokenizer.decode(ids)
            if not text.strip():
                continue
            call = next(calls, None) if inside and not whole_blocks else None
            claim = b"" if call is None else claim_of(call)
            if not (inside and whole_blocks):
                signature.append(b"text" + text.strip().encode("utf-8", "surrogatepass") if call is None else b"call" + claim)
            key = stretch_key(salt, text) if call is None else call_key(salt, call.call_id)
            aliases.append((key, self._core(ids, claim)))
        return aliases, signature

    def _core(self, ids: np.ndarray, claim: bytes) -> Alias:
        """Alias of a stretch without its outer tokens of white space."""
        blank = [not self._tokenizer.token_bytes(int(i)).strip() for i in ids]
        first = blank.index(False)
        last = len(blank) - blank[::-1].index(False)
        core = ids[first:last]
        text = self._tokenizer.decode(core)
        lead = text[: len(text) - len(text.lstrip())]
        trail = text[len(text.rstrip()) :]
        return Alias(ids=core.astype("<u4").tobytes(), lead=lead, trail=trail, claim=claim)


def _choose(aliases: Sequence[Alias], context: bytes) -> Alias:
    """The one that was sampled behind the same ids, else the newest."""
    return next((a for a in reversed(aliases) if a.context == context), aliases[-1])


def _fit(alias: Alias, unit: Unit, items: Sequence[Item]) -> tuple[str, np.ndarray, str] | None:
    """(text before, sampled ids, text after) if the alias says what this stretch says, white space included."""
    if alias.claim and alias.claim != claim_of(items[unit.contents[0].item]):
        return None
    text = unit.text
    lead = text[: len(text) - len(text.lstrip())]
    trail = text[len(text.rstrip()) :]
    if not lead.endswith(alias.lead) or not trail.startswith(alias.trail):
        return None
    core = np.frombuffer(alias.ids, "<u4").astype(np.uint32)
    return lead[: len(lead) - len(alias.lead)], core, trail[len(alias.trail) :]
