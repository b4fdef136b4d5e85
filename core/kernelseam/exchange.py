"""Requests to a helper process, and its answers: each answer says which request it belongs to."""

from __future__ import annotations

import struct
from multiprocessing.connection import Connection
from typing import Any

_NUMBER = struct.Struct("<Q")


class Requests:
    """The owner's end of a pipe to a helper process that answers one request after another.

    An exchange that is cut short, by Ctrl-C as by the helper's end, may leave an answer or half of
    one behind: the pipe is closed then, and the helper is of no more use.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._count = connection, 0

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def ask(self, request: bytes) -> bytes:
        """The helper's answer. Raises EOFError or OSError where it ended or answers something
        else."""
        self._count += 1
        number = _NUMBER.pack(self._count)
        try:
            self._connection.send_bytes(number + request)
            answer = self._connection.recv_bytes()
            if answer[: _NUMBER.size] != number:
                raise OSError(f"request {self._count} got the answer to another")
        except BaseException:
            self.close()
            raise
        return answer[_NUMBER.size :]

    def close(self) -> None:
        """Let go of the pipe, which the helper takes for the end."""
        self._connection.close()


class Answers:
    """The helper's end."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._number = connection, b""

    def poll(self, seconds: float) -> bool:
        """Whether a request, or the end, comes within that time."""
        return self._connection.poll(seconds)

    def next(self) -> bytes:
        """The next request. Raises EOFError where the owner has closed its end, or OSError."""
        message = self._connection.recv_bytes()
        self._number = message[: _NUMBER.size]
        return message[_NUMBER.size :]

    def answer(self, answer: bytes) -> None:
        """Answer the request that came last. Raises OSError where nobody is there."""
        self._connection.send_bytes(self._number + answer)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()
