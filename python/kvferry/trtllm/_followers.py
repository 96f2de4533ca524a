"""Decode engines that say that they follow this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvferry._kvferry import Shares


class Claim(NamedTuple):
    """What a peer has said: that a decode engine is at an address. Any peer can say any address."""

    # The host that the peer's session comes from.
    host: str
    address: str


@dataclass
class _Follower:
    # When it is forgotten.
    until: float
    # An engine has answered at the address.
    has_answered: bool = False


class Followers:
    """Claims, `most` at most, of which `most_unmet` wait for an engine's first answer.

    Hosts share the room: where there are too many claims, the newest one goes of the host that has most. Claims of one
    address by two hosts are two, so that a host which makes claims up takes no other host's address with it.
    """

    def __init__(self, most: int, most_unmet: int) -> None:
        self._of: dict[Claim, _Follower] = {}
        self._room, self._unmet_room = Shares(most), Shares(most_unmet)
        self._unmet: set[Claim] = set()

    def __len__(self) -> int:
        """How many engines have answered."""
        return len(self.addresses())

    @property
    def unmet(self) -> int:
        """How many claims wait for an answer."""
        return len(self._unmet)

    def addresses(self) -> list[str]:
        """Where engines have answered."""
        return list(dict.fromkeys(claim.address for claim, it in self._of.items() if it.has_answered))

    def is_unmet(self, claim: Claim) -> bool:
        """Whether it waits for an answer."""
        return claim in self._unmet

    def heard(self, claim: Claim, until: float) -> bool:
        """A claim is made again. False if it is a new one."""
        follower = self._of.get(claim)
        if follower is not None and follower.has_answered:
            follower.until = until
        return follower is not None

    def add(self, claim: Claim) -> list[Claim]:
        """A new claim waits for an answer. Returns the claims that there is no room for, which may be this one."""
        # What waits is forgotten when an answer has come, or none.
        self._of[claim] = _Follower(float("inf"))
        self._unmet.add(claim)
        gone = []
        for room in (self._unmet_room, self._room):
            if claim in self._of:
                for key in room.add(_key(claim), claim.host):
                    gone.append(Claim(*key.split(" ", 1)))
                    self.remove(gone[-1])
        return gone

    def answered(self, claim: Claim, until: float) -> None:
        """An engine has answered at the address. Nothing happens if the claim is gone."""
        follower = self._of.get(claim)
        if follower is not None:
            follower.until, follower.has_answered = until, True
            self._unmet.discard(claim)
            self._unmet_room.remove(_key(claim))

    def remove(self, claim: Claim) -> None:
        """Nothing happens if there is no such claim."""
        if self._of.pop(claim, None) is not None:
            self._unmet.discard(claim)
            for room in (self._room, self._unmet_room):
                room.remove(_key(claim))

    def remove_address(self, address: str) -> None:
        """No engine is at the address, or it is too slow."""
        for claim in [claim for claim, it in self._of.items() if claim.address == address and it.has_answered]:
            self.remove(claim)

    def expire(self, now: float) -> None:
        """Forgets claims that were not made again in time."""
        for claim in [claim for claim, it in self._of.items() if it.until <= now]:
            self.remove(claim)


def _key(claim: Claim) -> str:
    """Its name in the shares of hosts. A host has no space in it."""
    return f"{claim.host} {claim.address}"
