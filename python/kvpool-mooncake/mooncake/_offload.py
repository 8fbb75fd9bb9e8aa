"""The directory and the size of an SSD for blocks that leave memory, from the original's settings."""

from __future__ import annotations

import os
from typing import Final

from mooncake._settings import PAGE, BadSetting, parse_size

# The default directory, used if neither a setting nor a variable names one.
PATH_VARIABLE: Final = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"
DEFAULT_PATH: Final = "/data/file_storage"
# The limits of the bytes on the disk. The smaller limit counts.
SIZE_VARIABLE: Final = "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"
BUCKETS_VARIABLE: Final = "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE"
# A smaller file keeps too few blocks to be useful.
LEAST: Final = 64 << 20


def offload_medium(path: str = "") -> tuple[str, ...]:
    """Returns the medium for blocks that leave memory, as items of kvstore-node's `--ssd`.

    Raises `BadSetting` for a directory or a size that cannot be used.
    """
    directory = f"dir={_directory(path)}"
    limit = _limit()
    return (directory,) if limit is None else (directory, f"size={limit}")


def _directory(path: str) -> str:
    variable = os.environ.get(PATH_VARIABLE, "")
    said, directory = (
        ("ssd_offload_path", path)
        if path
        else (PATH_VARIABLE, variable)
        if variable
        else (f"neither ssd_offload_path nor {PATH_VARIABLE} is set, and the default", DEFAULT_PATH)
    )
    if not os.path.isabs(directory):
        raise BadSetting(f"{said}: {directory!r} is not an absolute path")
    if not os.path.exists(directory):
        raise BadSetting(f"{said}: {directory} does not exist: make the directory, or mount its disk")
    if not os.path.isdir(directory):
        raise BadSetting(f"{said}: {directory} is not a directory")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise BadSetting(f"{said}: this user may not read and write in {directory}")
    return directory


def _limit() -> int | None:
    limits = []
    if total := os.environ.get(SIZE_VARIABLE, ""):
        limits.append((parse_size(total, SIZE_VARIABLE), SIZE_VARIABLE))
    # In the original 0 means no limit here.
    if (buckets := os.environ.get(BUCKETS_VARIABLE, "")) and parse_size(buckets, BUCKETS_VARIABLE):
        limits.append((parse_size(buckets, BUCKETS_VARIABLE), BUCKETS_VARIABLE))
    if not limits:
        return None
    limit, said = min(limits)
    if limit < LEAST:
        raise BadSetting(f"{said}: {limit} bytes are too few for blocks on SSD: give at least {LEAST}")
    return limit // PAGE * PAGE
