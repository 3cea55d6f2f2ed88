"""Files that are there complete or not at all."""

import errno
import os
import pathlib


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write aside and move over the file.

    Raises:
        OSError: it cannot be written; an old file stays as it was.
    """
    path = pathlib.Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
