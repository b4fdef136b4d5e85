"""Processes that form groups of torch.distributed on this host, over gloo, or over NCCL with a GPU
each, and run functions at the same time. A forkserver that has imported torch starts them: none
imports it again."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

Task = Callable[..., Any]


class Ranks:
    """``size`` processes of one group; ``run(function, …, ranks=n)`` calls function(group, …) in
    the first n of them, of which group is one of their own."""

    def __init__(self, size: int, seconds: float = 60, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "kernelseam.distributed"])
        self._folder = tempfile.TemporaryDirectory(prefix="kernelseam-gloo-")
        store = os.path.join(self._folder.name, "store")
        self._seconds, self.size = seconds, size
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, store, seconds, device), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, task: Task, *arguments: Any, ranks: int | None = None, **options: Any
    ) -> list[Any]:
        """What each rank returned; an exception as itself."""
        count = self.size if ranks is None else ranks
        for pipe in self.pipes[:count]:
            pipe.send((task, count, arguments, options))
        return [self.answer(rank) for rank in range(count)]

    def start(self, rank: int, task: Task, count: int, *arguments: Any) -> None:
        self.pipes[rank].send((task, count, arguments, {}))

    def answer(self, rank: int) -> Any:
        if not self.pipes[rank].poll(self._seconds + 30):
            raise TimeoutError(f"rank {rank} did not answer")
        return self.pipes[rank].recv()

    def close(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:  # it has ended
                continue
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextmanager
def ranks_of(size: int, seconds: float = 60, device: str = "cpu") -> Iterator[Ranks]:
    found = Ranks(size, seconds, device)
    try:
        yield found
    finally:
        found.close()


def _serve(pipe: Any, rank: int, size: int, store: str, seconds: float, device: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=seconds)
    own = None
    if device == "cuda":
        own = torch.device(device, rank)
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if own is None else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=own,
    )
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, size)}
    groups[size] = dist.group.WORLD
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            break
        if asked is None:
            break
        task, count, arguments, options = asked
        try:
            made = task(groups[count], *arguments, **options)
        except Exception as error:
            made = error
        pipe.send(made)
    os._exit(0)  # without a last handshake with ranks that may have died


def host(x: Any) -> Any:
    """A tensor as float64, or None."""
    return None if x is None else x.detach().double().cpu().numpy()


def device_of(group: Any) -> Any:
    """Where this rank's tensors belong."""
    import torch
    import torch.distributed as dist

    gpu = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def gathered(shards: Sequence[Any], axis: int, order: str) -> Any:
    """Shards as arrays, in the order of the whole: chunks r and 2n − 1 − r of rank r, or the r-th
    part."""
    if order == "contiguous":
        return np.concatenate(shards, axis)
    halves = [np.split(x, 2, axis) for x in shards]
    return np.concatenate([h[0] for h in halves] + [h[1] for h in halves[::-1]], axis)
