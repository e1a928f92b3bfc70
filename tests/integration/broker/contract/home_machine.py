"""Random histories of devices that may wake the model, against the model of ``expected.py``."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from penstock.shared.broker import GrantReply, Homes
from penstock.shared.errors import ModelBrokenError
from penstock.shared.swap.views import SleepLevel

from .claim_machine import LEASE_MS
from .input_machine import InputMachine

DEVICES = st.sampled_from(("d0", "d1"))
# Of each level, by the number of its device: d0 is the cheaper home.
WAKE_S = {"d0": 1.0, "d1": 2.0}


class HomeMachine(InputMachine):
    """Devices enter as homes, leave or die, and ask to wake the model."""

    @property
    def homes(self) -> Homes:
        return Homes(self.connection, self.broker.keys)

    @rule(device=DEVICES, level=st.sampled_from(SleepLevel))
    def renew_home(self, device: str, level: SleepLevel) -> None:
        self.do(self.homes.renew(device, level, WAKE_S[device], lease_ttl_ms=LEASE_MS))
        self.expected.homes[device] = int(level)
        self.expected.broken_homes.discard(device)
        if level is SleepLevel.AWAKE:
            self.expected.grants.discard(device)

    @rule(device=DEVICES)
    def give_up(self, device: str) -> None:
        """A device cannot load the model."""
        error = ModelBrokenError("no file")
        self.do(self.homes.renew(device, SleepLevel.DISK, WAKE_S[device], error=error, lease_ttl_ms=LEASE_MS))
        self.expected.homes[device] = int(SleepLevel.DISK)
        self.expected.broken_homes.add(device)
        self.expected.end_given_up()

    @rule(device=DEVICES)
    def leave_home(self, device: str) -> None:
        self.do(self.homes.leave(device))
        self._forget_home(device)

    @rule(device=DEVICES)
    def home_dies(self, device: str) -> None:
        """Its lease ends, and reapers find out."""
        if device not in self.expected.homes:
            return
        self.expected.expire(running_too=True)
        self.do(self.connection.execute("ZADD", self.broker.keys.homes, 0, device))
        for _ in range(3):
            assert self.do(self.reap()) == []
        self._forget_home(device)

    def _forget_home(self, device: str) -> None:
        self.expected.homes.pop(device, None)
        self.expected.broken_homes.discard(device)
        self.expected.grants.discard(device)
        self.expected.end_unserved()

    @rule(device=DEVICES, num_engines=st.integers(1, 3))
    def request_grant(self, device: str, num_engines: int) -> None:
        """Patience is so long that the cheapest home always goes first."""
        expected = self.expected
        if device not in expected.homes:
            return
        grant = self.do(
            self.homes.request_grant(
                device, WAKE_S[device], num_engines=num_engines, patience_s=1e6, lease_ttl_ms=LEASE_MS
            )
        )
        num_awake = sum(level == SleepLevel.AWAKE for level in expected.homes.values())
        is_d0_free = expected.homes.get("d0", 0) > 0 and not {"d0"} & (expected.grants | expected.broken_homes)
        is_cheaper_free = device == "d1" and is_d0_free
        if device in expected.grants:
            assert grant.is_granted
        elif max(len(expected.rooms), num_awake) + len(expected.grants) >= num_engines:
            assert grant.reply is GrantReply.ELSEWHERE
        elif is_cheaper_free:
            assert grant.reply is GrantReply.LATER
        else:
            assert grant.is_granted
            expected.grants.add(device)

    @rule(device=DEVICES)
    def return_grant(self, device: str) -> None:
        self.do(self.homes.return_grant(device))
        self.expected.grants.discard(device)

    @rule()
    def read_demand(self) -> None:
        expected, demand = self.expected, self.do(self.homes.demand())
        states = [request for request in expected.requests.values() if request.alive]
        assert demand.is_paused == expected.is_paused
        assert demand.num_running == sum(request.state == "claimed" for request in states)
        assert demand.num_returned == sum(request.is_returned for request in states)
        assert {home.device: home.level for home in demand.homes} == expected.homes
        assert set(demand.grants) == expected.grants
        assert demand.num_engines == len(expected.rooms)
