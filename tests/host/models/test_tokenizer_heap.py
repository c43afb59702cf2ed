"""Where what is allocated and freed lies, in a process of its own: glibc's settings hold for a whole one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, sys, threading
from vox_host.models.tokenizer_file import keep_heap_small

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "small":
    keep_heap_small()

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
        "keepcost")]

libc.mallinfo2.restype = Info
unjoined = 0
for _ in range(50):  # what else the interpreter frees may join them
    for piece in [libc.malloc(40) for _ in range(1000)]:
        libc.free(piece)
    unjoined = max(unjoined, libc.mallinfo2().smblks)
def is_in_main_heap(address):
    for line in open("/proc/self/maps"):
        if line.rstrip().endswith("[heap]"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            return first <= address < last

found = []
thread = threading.Thread(target=lambda: found.append(is_in_main_heap(libc.malloc(40000))))
thread.start()
thread.join()

print(json.dumps({"thread": found[0], "unjoined": unjoined}))
"""


def look(how: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="these are settings of glibc")
def test_threads_share_one_heap_and_freed_pieces_are_joined():
    before = look("as it is")
    assert before["thread"] is False and before["unjoined"] != 0, "the settings are needed no more"
    found = look("small")
    assert found["thread"] is True
    assert found["unjoined"] == 0
