"""Requests and answers: no request gets another's answer, whatever cut the one before it short."""

from __future__ import annotations

import struct
from multiprocessing import Pipe

import pytest
from interruption import interrupted
from kernelseam.exchange import Answers, Requests


def test_an_answer_bears_the_number_of_its_request() -> None:
    mine, theirs = Pipe()
    requests = Requests(mine)
    theirs.send_bytes(struct.pack("<Q", 1) + b"first")
    theirs.send_bytes(struct.pack("<Q", 2) + b"second")
    assert [requests.ask(b"a"), requests.ask(b"b")] == [b"first", b"second"]
    answers = Answers(theirs)
    assert (answers.next(), answers.next()) == (b"a", b"b")
    answers.answer(b"too late")
    assert mine.recv_bytes() == struct.pack("<Q", 2) + b"too late"


@pytest.mark.parametrize(
    "stray", [struct.pack("<Q", 1) + b"late", struct.pack("<Q", 3), b"", b"short"]
)
def test_another_answer_is_refused_and_ends_the_exchange(stray: bytes) -> None:
    mine, theirs = Pipe()
    requests = Requests(mine)
    theirs.send_bytes(struct.pack("<Q", 1))
    assert requests.ask(b"") == b"" and not requests.closed
    theirs.send_bytes(stray)
    with pytest.raises(OSError, match="^request 2 got the answer to another$"):
        requests.ask(b"")
    assert requests.closed


def test_an_interrupted_exchange_is_closed() -> None:
    mine, theirs = Pipe()
    requests = Requests(mine)
    with interrupted(0.1):
        requests.ask(b"never answered")
    assert requests.closed
    with pytest.raises(OSError, match="closed"):
        requests.ask(b"another")
    answers = Answers(theirs)
    assert answers.poll(0) and answers.next() == b"never answered"
    with pytest.raises(EOFError):
        answers.next()


def test_the_end_of_the_helper_is_reported() -> None:
    mine, theirs = Pipe()
    requests = Requests(mine)
    assert not Answers(theirs).poll(0)
    theirs.close()
    with pytest.raises((EOFError, OSError)):
        requests.ask(b"")
    assert requests.closed
