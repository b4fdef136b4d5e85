"""Requests to a helper process and its answers, matched by number."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_NUMBER = struct.Struct("<Q")


class Requests:
    """The owner's end of a pipe to a helper process that answers one request after another.

    An interrupted exchange (Ctrl-C, or the helper exits) may leave an answer, or part of one, in
    the pipe. The pipe is then closed, and the helper must be replaced.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._count = connection, 0

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def ask(self, request: bytes) -> bytes:
        """Send a request and return its answer. Raises EOFError or OSError where the helper exited
        or answered another request."""
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
        """Close the pipe; the helper exits."""
        self._connection.close()


class Answers:
    """The helper's end."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._number = connection, b""

    def poll(self, seconds: float) -> bool:
        """Whether a request, or the end of the pipe, arrives within that time."""
        return self._connection.poll(seconds)

    def next(self) -> bytes:
        """The next request. Raises EOFError where the owner has closed its end, or OSError."""
        message = self._connection.recv_bytes()
        self._number = message[: _NUMBER.size]
        return message[_NUMBER.size :]

    def answer(self, answer: bytes) -> None:
        """Answer the last request. Raises OSError where the owner has closed its end."""
        self._connection.send_bytes(self._number + answer)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()
