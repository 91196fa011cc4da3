"""Stripes of checkpoints that are gone, kept to be written over: faster than new files, and their space is ours."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

from lightning_hetckpt.checkpoint.direct_io import fsync_folder
from lightning_hetckpt.checkpoint.layout import spare_folder

# Of one name. While one is written over, the next checkpoint may go and the save behind that begin: with one spare
# it would often come a moment too late. A new file is made only where there is no spare, so spares, live checkpoints
# and the one being written never take more room than `keep_last` + 2 checkpoints.
_KEPT = 2

# The life of a spare
#   The commit thread of rank 0 removed the last manifest that names it, durably, and calls `keep`.
#   The thread of its drive, on any rank, calls `take` when it opens a stripe of that name. A rename is the claim.
#   Until a later manifest names it no one counts on its bytes: `Spares.clear`, or the sweep at the next start, may
#   remove it at any moment.


class Spares:
    """What this process has put aside, until its end at most. For the commit thread alone."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        # Who saves without a Trainer may never close anything, and should find no files of ours afterwards.
        weakref.finalize(self, _remove, self._folders, os.getpid())

    def keep(self, stripe: Path) -> bool:
        """Put the file aside; False where it stays, because there are enough or somebody else has to do with it.

        Assumes that no committed manifest names it, whatever happens from here on.
        """
        place = next((place for place in _places(stripe) if not os.path.lexists(place)), None)
        if place is None or not is_free(stripe):
            return False
        place.parent.mkdir(exist_ok=True)
        self._folders.add(place.parent)
        os.replace(stripe, place)
        return True

    def clear(self) -> None:
        """Remove all that nobody has taken."""
        _remove(self._folders, os.getpid())


def _remove(folders: set[Path], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has a copy of the list; the files are its parent's
    while folders:
        shutil.rmtree(folders.pop(), ignore_errors=True)


def take(path: Path) -> bool:
    """Let a spare of the same name be `path`, durably; False where there is none that may be written over."""
    for place in _places(path):
        try:
            os.replace(place, path)
        except OSError:  # mostly there is none; one that cannot be had is no reason to fail
            continue
        if is_free(path):
            # Before the first byte: else the new bytes could be on the drive under the old name only.
            fsync_folder(path.parent)
            return True
        path.unlink()
    return False


def is_free(path: Path) -> bool:
    """Whether `path` is a plain file of this one name that nobody else has open or mapped.

    False also where the file system cannot tell.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and _is_unread(fd)
    finally:
        os.close(fd)


def _is_unread(fd: int) -> bool:
    # The kernel grants a write lease only on a file that nobody else has open. Somebody may load the old checkpoint,
    # or have mapped it into memory: a removal leaves him his bytes, writing over them would not.
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        # Who opens the file right now makes the kernel signal us. By default that is SIGIO, which kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    except OSError:
        return False


def _places(stripe: Path) -> Iterator[Path]:
    for number in range(_KEPT):
        yield spare_folder(stripe.parent) / f"{stripe.name}.{number}"
