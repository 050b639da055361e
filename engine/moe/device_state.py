"""The slot cache's maps where kernels read them. The same integers as slots.SlotMap, as tensors on the device.

Kernels change them (admission), and so does the host between steps (ring, resize) through `pull` and `write_back`. The maps
are exact inverses whenever a kernel can read them: kernels/plain/admission.py says in which order owners and bytes change.
The tensors have room for all slots that there may ever be, since graphs know their addresses and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.moe.slots import NONE, SlotMap, make_policy

FREE, LENT, GONE = -1, -2, -3


@dataclass(slots=True)
class SlotState:
    """slots: there are now, the first ones of those that the tensors have room for. slot_for_id: int32 [layers · experts].
    id_of_slot: int32 [room], FREE, LENT while a ring has the slot, or GONE where no memory is. last_use int64, heat int32
    [room]. residents: int32 [layers]. step: int64 [1]. totals: int64 [4], fetches, CPU experts, hits, misses. floor: int32
    [1], see floor_of.
    round_ids int32 [experts], round_left int32 [1]: misses of a prefill batch that wait for a later round.

    pinned_ids: flat ids from here on are not in pinned memory and are never fetched. policy: as slots.make_policy.
    """

    layers: int
    experts: int
    slots: int
    slot_for_id: torch.Tensor
    id_of_slot: torch.Tensor
    last_use: torch.Tensor
    heat: torch.Tensor
    residents: torch.Tensor
    step: torch.Tensor
    totals: torch.Tensor
    round_ids: torch.Tensor
    round_left: torch.Tensor
    floor: torch.Tensor
    pinned_ids: int
    policy: str

    @classmethod
    def empty(
        cls,
        layers: int,
        experts: int,
        slots: int,
        policy: str,
        device: torch.device,
        pinned_ids: int | None = None,
        room: int | None = None,
    ) -> SlotState:
        """No slot has an owner. room: slots that there may be later, None = no more than now."""

        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        make_policy(policy, slots, layers)  # refuses an unknown name
        room = slots if room is None else room
        owners = filled(FREE, room)
        owners[slots:] = GONE
        return cls(
            layers=layers,
            experts=experts,
            slots=slots,
            slot_for_id=filled(NONE, layers * experts),
            id_of_slot=owners,
            last_use=filled(0, room, dtype=torch.int64),
            heat=filled(0, room),
            residents=filled(0, layers),
            step=filled(0, 1, dtype=torch.int64),
            totals=filled(0, 4, dtype=torch.int64),
            round_ids=filled(NONE, experts),
            round_left=filled(0, 1),
            floor=filled(floor_of(slots, layers), 1),
            pinned_ids=layers * experts if pinned_ids is None else pinned_ids,
            policy=policy,
        )

    def resize(self, slots: int) -> None:
        """There are so many slots from now on, in stream order: new ones are free, those behind the end must have been.

        Memory comes before that, and goes after the device has done it.
        """
        assert 1 <= slots <= len(self.id_of_slot)
        if slots > self.slots:
            self.heat[self.slots : slots] = 0
            self.last_use[self.slots : slots] = 0
            self.id_of_slot[self.slots : slots] = FREE
        else:
            self.id_of_slot[slots : self.slots] = GONE
        self.floor.fill_(floor_of(slots, self.layers))
        self.slots = slots

    def pull(self) -> SlotMap:
        """A copy on the host as it is once everything enqueued has run. Waits for the device."""
        copy = SlotMap(self.slots, self.layers, self.experts, make_policy(self.policy, self.slots, self.layers))
        owners = self.id_of_slot[: self.slots].tolist()
        copy.id_of_slot = [max(owner, NONE) for owner in owners]
        copy.lent = {slot for slot, owner in enumerate(owners) if owner == LENT}
        copy.slot_for_id = self.slot_for_id.tolist()
        copy.last_use, copy.heat = self.last_use[: self.slots].tolist(), self.heat[: self.slots].tolist()
        copy.residents = self.residents.tolist()
        copy.step = int(self.step)
        return copy

    def write_back(self, slots: SlotMap, changed: Sequence[int]) -> None:
        """Give some slots, on the device, the owners that they have in a copy that was pulled, in stream order.

        changed: every slot whose owner, or being lent, differs from the device's. Nothing else may have changed owners since
        the pull. An expert that lost its slot is written before one that gained it could be read.
        """
        if not changed:
            return
        at = self._put(sorted(set(changed)), torch.int64)
        before = self.id_of_slot[at].long()
        owners = [LENT if s in slots.lent else slots.id_of_slot[s] for s in sorted(set(changed))]
        # One beyond the end takes what belongs to nobody.
        table = torch.cat([self.slot_for_id, self.slot_for_id.new_zeros(1)])
        table[torch.where(before >= 0, before, len(table) - 1)] = NONE
        now = self._put(owners, torch.int64)
        table[torch.where(now >= 0, now, len(table) - 1)] = at.int()
        self.slot_for_id.copy_(table[:-1])
        self.id_of_slot[at] = now.int()
        self.last_use[at] = self._put([slots.last_use[s] for s in sorted(set(changed))], torch.int64)
        self.heat[at] = self._put([slots.heat[s] for s in sorted(set(changed))], torch.int32)
        self.residents.copy_(self._put(slots.residents, torch.int32))

    def _put(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.id_of_slot.device, non_blocking=True)


def floor_of(slots: int, layers: int) -> int:
    """Residents of a layer that no other layer may take: half of an even share."""
    return slots // layers // 2
