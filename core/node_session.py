"""A node's side of its conversation with the router: registration, and numbers on everything that follows. No I/O.

core/node_link feeds it from a socket, the simulation from a simulated connection.
"""

from __future__ import annotations

import logging

import msgspec

from core.wire import messages
from core.wire.numbering import OUTSIDE, Arrival, MessageNumbers

_logger = logging.getLogger(__name__)


class NodeSession:
    """Registered or not, and which count messages belong to. Used from one thread.

    Starting over means: both sides drop the requests in flight (the step thread does when it meets the RegisterAgain that is
    returned as a command), the node registers with the next registration_index, and nothing of before counts any more.
    """

    def __init__(self, registration: messages.Register) -> None:
        self.is_registered = False
        self.refusal = ""
        self.heartbeat_interval_s = 0.5
        self._registration = registration
        self._numbers = MessageNumbers(registration.registration_index)

    def register(self) -> bytes:
        """The frame to send at first and every second until is_registered."""
        return messages.encode(self._registration, OUTSIDE)

    def pack(self, message: messages.NodeMessage) -> bytes | None:
        """A frame to send now, or None: before registration there is nobody to whom it would mean anything."""
        return messages.encode(message, self._numbers.next_place()) if self.is_registered else None

    def receive(self, frame: bytes) -> list[messages.RouterMessage]:
        """What the step thread must do about a frame. Raises WireError for what is no message."""
        place, message = messages.decode_router_message(frame)
        if isinstance(message, messages.RegisterReply):
            if message.registration_index == self._numbers.registration_index:
                self.refusal = message.refusal
                self.heartbeat_interval_s = message.heartbeat_interval_s
                self.is_registered = True
            return []
        if isinstance(message, messages.RegisterAgain):
            return self.start_over()
        arrival = self._numbers.receive(place)
        if arrival is Arrival.GAP:
            _logger.warning("messages of the router were lost: registering anew")
            return self.start_over()
        if arrival is Arrival.OLD:
            return []
        self.is_registered = True  # the router counts for this registration: its answer is late or lost
        return [] if isinstance(message, messages.Ping) else [message]

    def start_over(self) -> list[messages.RouterMessage]:
        """The connection broke, or the router asks for it. Nothing to do while a registration is under way."""
        if not self.is_registered:
            return []
        self.is_registered = False
        index = self._numbers.registration_index + 1
        self._registration = msgspec.structs.replace(self._registration, registration_index=index)
        self._numbers = MessageNumbers(index)
        return [messages.RegisterAgain()]
