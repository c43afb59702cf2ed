"""The process of a rank other than 0: `python -m mens_core.peers.child MODULE:FUNCTION`.

It ends with rank 0, whatever ends that: the line between them is watched by a thread of its own, and on
Linux the kernel does it too. Standard output goes where rank 0's goes; no message is ever on it.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import socket
import sys
import threading
from typing import NoReturn

from mens_core.peers.meeting import PARENT_VARIABLE, PLACE_VARIABLE, join
from mens_core.peers.member import Member
from mens_core.peers.messages import Broke, End, Joined, ToPeer, decode_to_peer
from vox_plugin_api.backend import BackendError
from vox_plugin_api.child import die_with_parent
from vox_plugin_api.framing import FrameChannel, ProtocolError
from vox_plugin_api.request_loop import EXIT_HOST_GONE, EXIT_PROTOCOL_BREACH, internal_error

__all__ = ["main", "serve"]

_EXIT_USAGE = 2
_EXIT_FAILED = 1


def main(arguments: list[str]) -> int:
    """Be the rank that the environment names, with the backend that `arguments[0]` names."""
    if len(arguments) != 1 or PLACE_VARIABLE not in os.environ:
        print(  # noqa: T201  a person typed this command
            "a plugin's worker starts this process itself, one for each device but the first: "
            "`vox-host train --devices N`",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        die_with_parent(int(parent))
    faulthandler.enable(file=sys.stderr)
    return serve(arguments[0])


def serve(entry: str) -> int:
    """Take part until rank 0 says that it is the end; return the exit status."""
    place, line = join(os.environ)
    channel = FrameChannel(line.fileno())
    channel.send(Joined(rank=place.rank, pid=os.getpid()))
    asked: queue.SimpleQueue[ToPeer] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, line, asked), name="vox-rank-reader", daemon=True).start()
    try:
        module, _, function = entry.partition(":")
        backend = getattr(importlib.import_module(module), function)()
        Member(backend, place, asked, channel.send).run()
    except BackendError as error:
        channel.send(Broke(number=None, error=error.error))
        return _EXIT_FAILED
    except OSError:
        return EXIT_HOST_GONE
    except Exception as error:  # noqa: BLE001  a lane may fail in any way; rank 0 is told before the end
        channel.send(Broke(number=None, error=internal_error(error)))
        return _EXIT_FAILED
    return 0


def _read(channel: FrameChannel, line: socket.socket, asked: queue.SimpleQueue[ToPeer]) -> None:
    try:
        while (frame := channel.read()) is not None:
            message = decode_to_peer(frame)
            asked.put(message)
            if isinstance(message, End):
                return
    except ProtocolError as breach:
        internal_error(breach)
        os._exit(EXIT_PROTOCOL_BREACH)
    # Rank 0 is gone, or has let go; whatever this process is in the middle of is for nobody.
    line.close()
    os._exit(EXIT_HOST_GONE)


def _run() -> NoReturn:
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads may wait for ranks that have gone already.
    os._exit(status)


if __name__ == "__main__":
    _run()
