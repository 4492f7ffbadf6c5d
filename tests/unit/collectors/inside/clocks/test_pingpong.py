import socket
import threading
from contextlib import contextmanager
from itertools import count

import pytest

from dpro.collectors.inside.peers import BEST, PingPong

US, MS = 1_000, 1_000_000


@contextmanager
def answering(pingpong: PingPong):
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            pingpong.answer(0.05)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield pingpong.address
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("shift_ns", [200 * US, -5 * MS, 50 * MS, 3_600_000 * MS])
def test_a_clock_that_is_off_is_off_by_that_within_half_of_each_round_trip(shift_ns):
    with answering(PingPong("localhost")) as peer:
        samples = PingPong("localhost", lambda ns: ns + shift_ns).compare(peer)
    assert len(samples) == BEST
    assert samples == sorted(samples)
    for sample in samples:
        assert abs(sample.offset_ns - shift_ns) <= sample.round_trip_ns / 2
        assert 0 < sample.round_trip_ns < 100 * MS


def test_time_the_other_takes_to_answer_is_no_part_of_the_round_trip():
    reads = count()

    def slowly(ns: int) -> int:
        if next(reads) % 2 == 0:  # when a question has come; the next reading is for its answer
            threading.Event().wait(0.01)
        return ns

    with answering(PingPong("localhost", slowly)) as peer:
        samples = PingPong("localhost").compare(peer)
    assert len(samples) == BEST
    assert all(sample.round_trip_ns < 10 * MS for sample in samples)


def test_two_that_ask_each_other_both_get_answers():
    a, b = PingPong("localhost"), PingPong("localhost", lambda ns: ns + MS)
    found = {}

    def compare(name: str, one: PingPong, other: PingPong) -> None:
        found[name] = one.compare(other.address)
        one.answer(0.5)

    threads = [threading.Thread(target=compare, args=args) for args in (("a", a, b), ("b", b, a))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["a"][0].offset_ns == pytest.approx(-MS, abs=found["a"][0].round_trip_ns)
    assert found["b"][0].offset_ns == pytest.approx(MS, abs=found["b"][0].round_trip_ns)


def test_a_host_that_is_known_under_a_dead_name_too_is_found():
    with answering(PingPong("localhost")) as peer:
        # 240.0.0.0/4 is reserved: nothing is routed there.
        samples = PingPong("localhost").compare(peer._replace(hosts=("240.0.0.1", *peer.hosts)))
    assert len(samples) == BEST


def test_a_peer_that_is_gone_costs_the_samples_and_nothing_else():
    gone = PingPong("localhost").address
    assert PingPong("localhost").compare(gone) == []


def test_questions_without_the_token_and_noise_are_not_answered():
    with (
        answering(PingPong("localhost")) as peer,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        stranger.settimeout(0.2)
        for noise in (b"", b"x", bytes(40), bytes(1000)):
            stranger.sendto(noise, ("127.0.0.1", peer.port))
        with pytest.raises(TimeoutError):
            stranger.recv(100)
        assert PingPong("localhost").compare(peer._replace(token=peer.token ^ 1)) == []
        assert len(PingPong("localhost").compare(peer)) == BEST
