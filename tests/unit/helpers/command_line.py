"""What the fixture ``command`` is, and the JSON of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Answer = tuple[int, str, str]
"""Exit status, standard output, standard error."""
Command = Callable[..., Answer]


def parsed(answer: Answer, status: int = 0) -> Any:
    """The one JSON object of an answer; a command that succeeds says nothing else."""
    assert answer[0] == status and (status or not answer[2]), answer[2]
    return json.loads(answer[1])
