"""Virtual environments for peers: made once under ``.peers/``, kept as long as their requirements stay the same."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TRL = ("trl==1.16.*", "torch==2.13.0", "transformers>=5.16.1,<5.20", "datasets", "accelerate")

MEGATRON = ("megatron-core==0.16.*", "torch==2.13.0", "numpy")

# Builds of these for another torch make every transformers model import fail, and no peer here needs them.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def peer_python(name: str, requirements: Sequence[str], root: Path = ROOT / ".peers") -> Path:
    """The Python of the peer's environment, which is made first if it is not there yet.

    It is made again when ``requirements`` or the Python version differ from those it was made with. The stamp is
    written last, so that an interrupted install is never taken for a whole one.

    Args:
        name: the environment's folder under ``root``.
        requirements: pip requirements.
        root: folder of all environments.

    Raises:
        RuntimeError: pip failed; the message ends with pip's own.
    """
    wanted = "\n".join((sys.version, *requirements))
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    folder = root / name
    stamp, python = folder / "requirements.sha256", folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == digest and python.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {folder} with {', '.join(requirements)} (minutes, once)", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True)
    _pip(python, "install", *requirements)
    _pip(python, "uninstall", "--yes", *_UNWANTED)
    stamp.write_text(digest)
    return python


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} exited with {done.returncode}:\n{done.stdout[-2000:]}")


if __name__ == "__main__":
    print(peer_python("trl", TRL))
