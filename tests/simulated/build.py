"""Builds the simulated device, once for each version of its source and of torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

NAME = "simulated_device"
SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = "g++"
LIMIT_S = 600.0


def why_not() -> str | None:
    """Why it cannot be built here; None if it can."""
    if torch.__version__ < "2.10":
        return f"torch {torch.__version__} has other interfaces for devices than the simulated device is written for"
    if shutil.which(COMPILER) is None:
        return f"there is no {COMPILER} to build the simulated device with"
    return None


def built(cache: Path) -> Path:
    """The library, from a folder or built into it, which may take a minute."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    library = cache / f"{NAME}-{key}.so"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one test run build it once
        if not library.exists():
            made = library.with_suffix(".partial")
            _compile(made)
            made.rename(library)
    return library


def load(library: Path) -> Any:
    """The module."""
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    of_torch = Path(torch.__file__).parent
    includes = [of_torch / "include", of_torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [
        COMPILER, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}",
        *(f"-I{folder}" for folder in includes), str(SOURCE), "-o", str(target), f"-L{of_torch / 'lib'}",
        *(f"-l{library}" for library in ("torch", "torch_cpu", "torch_python", "c10")),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"the simulated device cannot be built: {done.stderr[-3000:]}"
