"""Small honest stand-ins for what is slow, random or dangerous outside a test."""

from __future__ import annotations

import threading


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now_s += seconds


class Gate:
    """A door in a thread's way: the thread arrives and waits, the test opens.

    Put `gate.pass_through` where the race would be; `gate.arrived.wait(…)` then tells the test
    that the other thread stands there, so the order of events is chosen and never slept for.
    """

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()

    def pass_through(self) -> None:
        """Say that somebody is here, and wait until the gate is open."""
        self.arrived.set()
        if not self._open.wait(timeout=30):
            raise TimeoutError("nobody opened the gate within 30 s")

    def open(self) -> None:
        """Let everybody through, now and later."""
        self._open.set()
