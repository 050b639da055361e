"""Who lies in which expert slot. Integers only: no tensors, no copies, no clock but the count of steps.

A flat id is layer · experts + expert. `slot_for_id` and `id_of_slot` are exact inverses after every call: a slot has an owner
only while its bytes are that expert's whole record. So an owner is cleared before bytes change and set once they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from engine.errors import InvalidRequest

NONE = -1


@dataclass(slots=True)
class SlotMap:
    """Owners, recency and use counts of `slots` slots over layers · experts flat ids.

    lent: slots taken out of the cache (a ring); they are neither hit nor chosen until returned.
    """

    slots: int
    layers: int
    experts: int
    policy: VictimPolicy
    slot_for_id: list[int] = field(init=False)
    id_of_slot: list[int] = field(init=False)
    last_use: list[int] = field(init=False)
    heat: list[int] = field(init=False)
    residents: list[int] = field(init=False)
    lent: set[int] = field(init=False, default_factory=set)
    step: int = field(init=False, default=0)
    hits: int = field(init=False, default=0)
    misses: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.slot_for_id = [NONE] * (self.layers * self.experts)
        self.id_of_slot = [NONE] * self.slots
        self.last_use = [0] * self.slots
        self.heat = [0] * self.slots
        self.residents = [0] * self.layers

    def tick(self) -> None:
        """A step begins: uses from now on are more recent than all before."""
        self.step += 1

    def touch(self, slot: int) -> None:
        """The slot's expert is used in this step. Heat counts uses and halves every 64 idle steps."""
        idle = self.step - self.last_use[slot]
        self.heat[slot] = (self.heat[slot] >> min(idle // 64, 31)) + 1
        self.last_use[slot] = self.step

    def victim(self, active: Collection[int], layer: int, taken: Collection[int] = (), since: int | None = None) -> int:
        """A slot for an expert of `layer`: a free one, else the policy's choice; NONE if there is none to be had.

        active: flat ids used in this step; their slots are never chosen. taken: slots that this step cleared for others
        and has not published yet. since: the step in which a pass through all layers began, None outside of one: see
        `pass_order`. The victim's owner stays until `clear`.
        """
        candidates = [s for s in range(self.slots) if not (s in self.lent or s in taken or self.id_of_slot[s] in active)]
        free = next((s for s in candidates if self.id_of_slot[s] == NONE), NONE)
        if free != NONE or not candidates:
            return free
        return self.policy(self, candidates, layer, since)

    def order(self, slot: int, layer: int, since: int | None) -> tuple[int, int]:
        """`pass_order` of an owned slot; outside of a pass all are alike."""
        home = self.id_of_slot[slot] // self.experts
        return (0, 0) if since is None else pass_order(layer, home, self.last_use[slot], self.residents[home], since)

    def clear(self, slot: int) -> None:
        """Take the slot's owner out of both maps. Must come before its bytes change."""
        owner = self.id_of_slot[slot]
        if owner != NONE:
            self.slot_for_id[owner] = NONE
            self.id_of_slot[slot] = NONE
            self.residents[owner // self.experts] -= 1
        self.heat[slot] = 0

    def assign(self, slot: int, flat_id: int) -> None:
        """The slot's bytes are now this expert's, whole. The slot must have no owner, the expert no slot."""
        assert self.id_of_slot[slot] == NONE
        assert self.slot_for_id[flat_id] == NONE
        self.id_of_slot[slot] = flat_id
        self.slot_for_id[flat_id] = slot
        self.residents[flat_id // self.experts] += 1
        self.touch(slot)

    def lend(self, count: int, active: Iterable[int] = ()) -> list[int]:
        """Take up to `count` of the coldest slots out of the cache, owners cleared; ids in `active` stay."""
        keep = set(active)
        usable = [s for s in range(self.slots) if s not in self.lent and self.id_of_slot[s] not in keep]
        usable.sort(key=lambda s: (self.id_of_slot[s] != NONE, self.last_use[s], s))
        for slot in usable[:count]:
            self.clear(slot)
            self.lent.add(slot)
        return usable[:count]

    def give_back(self, slot: int, flat_id: int = NONE) -> None:
        """Return a lent slot, with the expert that its bytes hold (NONE: nothing that may be hit)."""
        self.lent.remove(slot)
        if flat_id != NONE and self.slot_for_id[flat_id] == NONE:
            self.assign(slot, flat_id)


def pass_order(layer: int, home: int, last_use: int, residents: int, since: int) -> tuple[int, int]:
    """How soon a slot may go for an expert of `layer` while a pass goes through all layers: least first, then by policy.

    home: the owner's layer, which has so many residents. since: the step in which the pass began. First what the pass has left
    behind unused, then what it used in layers before, and what belongs to layers still to come only if there is nothing else,
    both from the layer that has most. A pass of some dozen tokens uses nearly every expert of each layer, and by age alone each
    layer would push out what the next one needs, as a cyclic scan does to every LRU.
    """
    if home > layer:
        return 2, -residents
    return (1, -residents) if last_use > since else (0, 0)


VictimPolicy = Callable[[SlotMap, list[int], int, int | None], int]


def lru(slots: SlotMap, candidates: list[int], layer: int, since: int | None) -> int:
    """The slot unused for longest, whatever its layer."""
    return min(candidates, key=lambda s: (*slots.order(s, layer, since), slots.last_use[s], s))


def lru_with_floor(floor: int) -> VictimPolicy:
    """LRU that never takes a layer's last `floor` residents for another layer; NONE if that leaves no choice.

    A global LRU over a cyclic scan of all layers evicts exactly what comes next: 0% hits when slots < one step's experts.
    """

    def choose(slots: SlotMap, candidates: list[int], layer: int, since: int | None) -> int:
        def spare(slot: int) -> bool:
            owner = slots.id_of_slot[slot] // slots.experts
            return owner == layer or slots.residents[owner] > floor

        spares = [s for s in candidates if spare(s)]
        return lru(slots, spares, layer, since) if spares else NONE

    return choose


def frequency_aged(slots: SlotMap, candidates: list[int], layer: int, since: int | None) -> int:
    """The least used slot, counts halved for every 64 idle steps; ties go to the older."""

    def key(slot: int) -> tuple[int, ...]:
        idle = slots.step - slots.last_use[slot]
        heat = slots.heat[slot] >> min(idle // 64, 31)
        return *slots.order(slot, layer, since), heat, slots.last_use[slot], slot

    return min(candidates, key=key)


def make_policy(name: str, slots: int, layers: int, floor: int = 0) -> VictimPolicy:
    """By name: lru, lru_floor, frequency. floor: at most an even share; 0 means half of that."""
    if name == "lru":
        return lru
    if name == "lru_floor":
        return lru_with_floor(min(floor, slots // layers) or slots // layers // 2)
    if name == "frequency":
        return frequency_aged
    raise InvalidRequest("slot_policy", name, "lru, lru_floor, frequency")
