"""The folder of a callback, on any file system to which Lightning saves checkpoints."""

from __future__ import annotations

import os

from lightning_avgpipe.utils.lightning import get_filesystem


class Folder:
    """A folder for a callback's files; it is made with the first of them.

    Args:
        path: path of the folder, or a URL such as ``s3://bucket/run``.

    Attributes:
        path: as given.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._files = get_filesystem(self.path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.path.rstrip('/')}/{name}")

    @property
    def exists(self) -> bool:
        """Whether the folder is there already."""
        return bool(self._files.exists(self.path))

    def write(self, name: str, content: str | bytes) -> str:
        """Write a file, which may be there already, and return its path."""
        path = f"{self.path.rstrip('/')}/{name}"
        self._files.makedirs(self.path, exist_ok=True)
        with self._files.open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        return path
