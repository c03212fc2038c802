"""Keeps TensorFlow's servers from refusing requests whose ids happen to repeat.

A server refuses a request whose id is among the last 100,000 that it has seen, as a message that was sent twice. A
session draws the ids of a step from a generator of the thread, each run of a session has a thread of its own, and its
generator starts from 32 random bits. So ids repeat by chance: after 100,000 requests one in 43,000 is refused, and its
session fails with `The same RunGraph (Worker) request was received twice` (measured: 12 of 600,000).

With this, ids come from the generator of the process, `tsl::random::New64`, which starts once and has a lock. The slot
of the library through which it calls `ThreadLocalNew64` is made to point there: both take nothing and return 64 bits.
Read from TensorFlow 2.21: tsl/platform/default/random.cc, distributed_runtime/request_id.cc and recent_request_ids.cc,
and `SchedClosure` of tsl/platform/default/env.cc.
"""

import ctypes
import logging
import os
import sys
from pathlib import Path

import numpy as np

OF_THREAD = "_ZN3tsl6random16ThreadLocalNew64Ev"
OF_PROCESS = "_ZN3tsl6random5New64Ev"
LIBRARIES = ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2")  # the caller, and what it calls
# Tags of a library's dynamic section (ELF gABI, chapter 5).
PLTRELSZ, STRTAB, SYMTAB, STRSZ, JMPREL = 2, 5, 6, 10, 23
DYNAMIC = np.dtype([("tag", "<i8"), ("value", "<u8")])
RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
SYMBOL = np.dtype({"names": ["name"], "formats": ["<u4"], "itemsize": 24})

_are_unique = False  # of this process, and of one that it was forked from

_log = logging.getLogger(__name__)


class _LinkMap(ctypes.Structure):
    """The loader's record of a library (link.h)."""

    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


def make_unique() -> bool:
    """Makes this process and its forks draw unique ids; TensorFlow must be imported. Returns whether that worked.

    If TensorFlow was built differently, ids are unchanged: a task whose request is refused is restarted.
    """
    global _are_unique
    if _are_unique:
        return True
    try:
        slot, target = slot_and_target()
        slot.value = target
        _are_unique = True
    except (OSError, AttributeError, LookupError, ValueError) as error:
        _log.warning("ids of requests are not unique on this system (%s)", error)
        return False
    return True


def slot_and_target() -> tuple[ctypes.c_uint64, int]:
    """Returns the slot that calls go through, and the address of the function that it is to hold.

    Raises:
        OSError: if a library is not loaded, or its memory cannot be written to.
        LookupError: if it has no such slot.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        raise LookupError(f"no ELF64 library on {sys.platform}")
    import tensorflow as tf

    folder = Path(tf.sysconfig.get_lib())
    caller, called = (ctypes.CDLL(str(folder / name), mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for name in LIBRARIES)
    target = ctypes.cast(getattr(called, OF_PROCESS), ctypes.c_void_p).value
    assert target is not None
    address = _slot_of(OF_THREAD, ctypes.cast(caller._handle, ctypes.POINTER(_LinkMap)).contents)
    _make_writable(address)
    return ctypes.c_uint64.from_address(address), target


def _slot_of(name: str, library: _LinkMap) -> int:
    """Returns the address at which a loaded library keeps the address of a function that it calls."""
    tags = _tags(library.dynamic)
    at = _find(b"\0" + name.encode() + b"\0", tags[STRTAB], tags[STRSZ]) + 1 - tags[STRTAB]
    relocations = np.frombuffer(ctypes.string_at(tags[JMPREL], tags[PLTRELSZ]), RELOCATION)
    symbols = relocations["symbol"].astype(np.int64)
    nbytes = (int(symbols.max()) + 1) * SYMBOL.itemsize
    named = np.frombuffer(ctypes.string_at(tags[SYMTAB], nbytes), SYMBOL)["name"][symbols]
    if not (named == at).any():
        raise LookupError(f"{name} has no slot")
    return library.base + int(relocations["offset"][(named == at).argmax()])


def _find(text: bytes, begin: int, nbytes: int) -> int:
    """Returns the address of a text in memory, which is not copied: the names of a library may take 80 MiB."""
    memmem = ctypes.CDLL(None).memmem
    memmem.restype, size = ctypes.c_void_p, ctypes.c_size_t
    found = memmem(ctypes.c_void_p(begin), size(nbytes), text, size(len(text)))
    if found is None:
        raise LookupError(f"{text!r} is not among its names")
    return int(found)


def _tags(dynamic: int) -> dict[int, int]:
    """Returns a library's dynamic section, up to its last entry, which is zero."""
    found: dict[int, int] = {}
    while True:
        tag, value = np.frombuffer(ctypes.string_at(dynamic, DYNAMIC.itemsize), DYNAMIC)[0].tolist()
        if tag == 0:
            return found
        found[tag] = value
        dynamic += DYNAMIC.itemsize


def _make_writable(address: int) -> None:
    """Makes slots writable, which a library that binds all its functions when loaded keeps read-only."""
    page = address - address % os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(os.sysconf("SC_PAGE_SIZE")), 3) != 0:  # read and write
        raise OSError(ctypes.get_errno(), "mprotect")
