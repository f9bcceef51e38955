"""Images in calls: their pixels travel once."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from dorad import types as t
from dorad._asyncio import Event, is_set_within
from dorad._channel import Budget, deadline
from dorad._shared_pixels import Region, SharedPixels
from dorad.errors import DoradError

Name = tuple[bytes, str, tuple[int, int, int]]
"""The server tells images apart by digest, dtype and grid."""


class SentImages:
    """The images that a server was sent lately. Thread-safe.

    It may be wrong: the server drops images, starts anew, and has some for each of its tenants.
    Then the server names the images that it lacks, and the call sends them again.

    Args:
      shared: brings the pixels to a server on this host, if there is room; None: calls do.
    """

    MOST = 4096

    def __init__(self, shared: SharedPixels | None = None) -> None:
        self.shared = shared
        self.lock = threading.Lock()
        self.arrivals: OrderedDict[Name, int] = OrderedDict()
        """The number of each image's last arrival. Those used least recently come first."""
        self.arriving: dict[Name, Event] = {}
        """Images that a call brings right now. Others wait for the event."""
        self._numbers = itertools.count()

    def arrived(self, name: Name) -> None:
        """The caller has the lock."""
        self.arrivals[name] = next(self._numbers)
        self.arrivals.move_to_end(name)
        if len(self.arrivals) > self.MOST:
            self.arrivals.popitem(last=False)


class CallImages:
    """The images of one call and of its repetitions: which of them go with pixels. For one task.

    Args:
      images: one for each of the message's images.
    """

    _PATIENCE = 2
    """An image that the server lacked this often goes with its pixels, whatever other calls do."""

    def __init__(self, sent: SentImages, images: Sequence[t.Image]) -> None:
        self._sent = sent
        self._images = [(image, (image.sha256, image.dtype, image.grid)) for image in images]
        self._lacked: Counter[Name] = Counter()
        self._named: dict[Name, int] = {}  # By digest alone, for the sake of this arrival.
        self._brought: dict[Name, bytes] = {}
        self._announced: list[Name] = []  # Of those, what other calls wait for.
        self._regions: list[Region] = []  # Of those, the pixels in shared memory.

    @property
    def announced(self) -> bool:
        """Whether other calls may wait for this one's pixels."""
        return bool(self._announced)

    async def message_in_turn(self, message: Any, budget: Budget) -> Any:
        """As `message`, after a wait for other calls that bring the same images."""
        while (arriving := self._choose(share=True)) is not None:
            if not await is_set_within(arriving, deadline(budget.left, None)):
                return self.message(message)
        return self._filled(message)

    def message(self, message: Any) -> Any:
        """The message with the pixels that the server lacks."""
        self._choose(share=False)
        return self._filled(message)

    def _choose(self, *, share: bool) -> Event | None:
        """Chooses the images that go with pixels. `share`: unless the result must be awaited first,
        other calls will wait for them."""
        self.release()
        self._named, self._brought = {}, {}
        named: dict[Name, int] = {}
        brought: dict[Name, bytes] = {}
        with self._sent.lock:
            for image, name in self._images:
                if not image.data:
                    continue
                trusts = self._lacked[name] < self._PATIENCE
                if trusts and name in self._sent.arrivals:
                    named[name] = self._sent.arrivals[name]
                elif share and trusts and name in self._sent.arriving:
                    return self._sent.arriving[name]
                else:
                    brought[name] = image.data
            for name in named:
                self._sent.arrivals.move_to_end(name)
            for name in brought if share else ():
                if name not in self._sent.arriving:
                    self._sent.arriving[name] = Event()
                    self._announced.append(name)
        self._named, self._brought = named, brought
        return None

    def _filled(self, message: Any) -> Any:
        if not self._brought:
            return message
        filled = type(message)()
        filled.CopyFrom(message)
        left = dict(self._brought)  # An image in several places goes once.
        for place, (_, name) in zip(filled.images, self._images, strict=True):
            if name not in left:
                continue
            data = left.pop(name)
            shared = self._sent.shared
            region = None if shared is None else shared.write(data)
            if region is None:
                place.data = data
            else:
                place.memory.CopyFrom(region.place)
                self._regions.append(region)
        return filled

    def arrived(self) -> None:
        """The server has them."""
        if self._brought:
            with self._sent.lock:
                for name in self._brought:
                    self._sent.arrived(name)
            self._brought = {}
            self.release()

    def release(self) -> None:
        """Nobody waits for this call any more, nor does the server read its pixels. Idempotent."""
        self._regions = []
        if self._announced:
            with self._sent.lock:
                for name in self._announced:
                    self._sent.arriving.pop(name).set()
            self._announced = []

    def lacking(self, error: DoradError) -> bool:
        """Whether the call has failed because the server lacks images that can be sent again."""
        if error.reason != "IMAGE_MISSING":
            return False
        digests = set(error.metadata.get("sha256", "").split(","))
        lacked = [name for name in self._named if name[0].hex() in digests]
        self._lacked.update(lacked)
        with self._sent.lock:
            for name in lacked:
                # Another call may have brought it since.
                if self._sent.arrivals.get(name) == self._named[name]:
                    del self._sent.arrivals[name]
        return digests == {name[0].hex() for name in lacked}
