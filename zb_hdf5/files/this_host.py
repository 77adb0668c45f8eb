"""This host, by the facts that tell it apart from others: its boot, and the mounts that a process sees."""

from __future__ import annotations

import hashlib
import os
import secrets
from functools import cache
from pathlib import Path


@cache
def boot() -> str:
    """Return the identity of the boot of this host; "": it is not Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@cache
def mounts() -> str:
    """Return a text that all processes have which see the same mounts of the same boot, and no others.

    A container has mounts of its own: there another file may have the same device and inode, or the same file others.
    """
    try:
        text = f"{boot()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:  # without /proc: of this process and its children alone
        text = secrets.token_hex()
    return hashlib.sha256(text.encode()).hexdigest()[:12]  # pickled corpora have it
