"""How the ranks of a training come together: rank 0 makes a place, starts the others, and counts them in.

A rank is a process of the same interpreter with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK), so one
that torchrun started is as good. The place is a folder that only this user can enter.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from mens_core.peers.link import Link
from mens_core.peers.messages import Joined, decode_from_peer
from mens_core.peers.wire import PeerSetup, Place
from vox_plugin_api.backend import BackendError
from vox_plugin_api.framing import Frame, FrameDecoder, ProtocolError

__all__ = ["CONTROL", "PARENT_VARIABLE", "PLACE_VARIABLE", "gather", "join", "leave", "new_place"]

PLACE_VARIABLE = "VOX_PEERS_PLACE"
PARENT_VARIABLE = "VOX_PEERS_PARENT"
"""Process id of rank 0, whose end is the end of the others; unset under another launcher."""
CONTROL = "control"
_JOIN_S = 120.0
"""Imports, and a look at the device."""
_POLL_S = 0.05


def new_place(ranks: int) -> Place:
    """Make a folder for rank 0's training."""
    return Place(Path(tempfile.mkdtemp(prefix="vox-peers-")), 0, ranks)


def gather(
    place: Place, setup: PeerSetup, environment: Mapping[str, str]
) -> Generator[None, None, list[Link]]:
    """Start the other ranks and wait until each has joined, yielding meanwhile.

    Raises:
        BackendError: `peer-lost`: one ended, or did not join in time; none of them is left.
    """
    listener = socket.socket(socket.AF_UNIX)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    links: dict[int, Link] = {}
    try:
        listener.bind(str(place.folder / CONTROL))
        listener.listen(place.ranks)
        listener.settimeout(_POLL_S)
        if not setup.launched(place):
            for rank in range(1, place.ranks):
                processes[rank] = _start(place, rank, setup, environment)
        until = time.monotonic() + _JOIN_S
        while len(links) < place.ranks - 1:
            _refuse_the_dead(processes, links, until, place.ranks)
            try:
                line, _ = listener.accept()
            except TimeoutError:
                yield
                continue
            joined = _hello(line)
            if joined is not None and 0 < joined.rank < place.ranks and joined.rank not in links:
                links[joined.rank] = Link(joined.rank, line, joined.pid, processes.get(joined.rank))
            else:
                line.close()
        return [links[rank] for rank in sorted(links)]
    except BaseException:
        for link in links.values():
            link.end(0)
        for process in processes.values():
            process.kill()
            process.wait()
        raise
    finally:
        listener.close()


def _start(
    place: Place, rank: int, setup: PeerSetup, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    flags = [*(["-I"] if sys.flags.isolated else []), *(["-B"] if sys.flags.dont_write_bytecode else [])]
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "mens_core.peers.child", setup.entry],
        env={
            **environment,
            **setup.environment(rank),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(place.ranks),
            PLACE_VARIABLE: str(place.folder),
            PARENT_VARIABLE: str(os.getpid()),
        },
        stdin=subprocess.DEVNULL,
        # What it prints goes to the worker's log, as the worker's own.
        stdout=2,
    )


def _hello(line: socket.socket) -> Joined | None:
    """Return the first message, None where it is no rank's."""
    line.settimeout(_JOIN_S)
    decoder, frames = FrameDecoder(), list[Frame]()
    try:
        while not frames:
            data = line.recv(1 << 16)
            if not data:
                return None
            frames = decoder.feed(data)
        message = decode_from_peer(frames[0])
    except (OSError, ProtocolError):
        return None
    return message if isinstance(message, Joined) else None


def _refuse_the_dead(
    processes: Mapping[int, subprocess.Popen[bytes]], links: Mapping[int, Link], until: float, ranks: int
) -> None:
    for rank, process in processes.items():
        # One that has joined says itself why it ended.
        status = None if rank in links else process.poll()
        if status is not None:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise BackendError(
                "peer-lost",
                f"rank {rank} of the training ended with {how} before it had joined; nothing was begun",
                facts={"rank": rank, "status": status},
                remedy="The worker's log has its last lines.",
            )
    if time.monotonic() > until:
        missing = [rank for rank in range(1, ranks) if rank not in links]
        raise BackendError(
            "peer-lost",
            f"of {ranks} ranks of the training, {', '.join(map(str, missing))} did not join within "
            f"{_JOIN_S:g} s; nothing was begun",
            facts={"missing": missing, "limit_s": _JOIN_S},
            remedy="The worker's log has their last lines.",
        )


def join(environment: Mapping[str, str]) -> tuple[Place, socket.socket]:
    """Return the place that this process was started for, and its line to rank 0."""
    place = Place(Path(environment[PLACE_VARIABLE]), int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(place.folder / CONTROL))
    return place, line


def leave(place: Place) -> None:
    """Remove the place."""
    shutil.rmtree(place.folder, ignore_errors=True)
