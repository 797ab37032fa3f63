"""Numbers on messages: what is repeated is ignored, what is missing is noticed, and foreign bytes are no message."""

from __future__ import annotations

import pytest

from core.errors import WireError
from core.wire.numbering import HEADER_BYTES, Arrival, MessageNumbers, Place, add_header, split_header


def test_numbers_in_order_are_next_and_repetitions_are_old() -> None:
    sender, receiver = MessageNumbers(3), MessageNumbers(3)
    places = [sender.next_place() for _ in range(3)]
    assert [receiver.receive(place) for place in places] == [Arrival.NEXT] * 3
    assert [receiver.receive(place) for place in places] == [Arrival.OLD] * 3


def test_numbers_a_missing_message_is_a_gap_until_a_new_registration() -> None:
    receiver = MessageNumbers(0)
    assert receiver.receive(Place(0, 2)) is Arrival.GAP
    assert receiver.receive(Place(0, 3)) is Arrival.GAP
    assert receiver.receive(Place(0, 1)) is Arrival.NEXT


def test_numbers_of_another_registration_are_old() -> None:
    receiver = MessageNumbers(5)
    assert {receiver.receive(Place(index, 1)) for index in (4, 6)} == {Arrival.OLD}
    assert receiver.receive(Place(5, 1)) is Arrival.NEXT


def test_header_round_trip_keeps_place_and_payload() -> None:
    place, payload = split_header(add_header(Place(2**32 - 1, 7), b"payload"))
    assert (place, bytes(payload)) == (Place(2**32 - 1, 7), b"payload")


@pytest.mark.parametrize("frame", [b"", b"\x02" * (HEADER_BYTES - 1), b"\x85\xa4type" + b"\x00" * 20])
def test_header_of_something_else_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        split_header(frame)
