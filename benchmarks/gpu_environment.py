"""Make the environment of `make gpu`: a virtual environment whose torch can use the GPU.

If the torch of the Python that runs this finds a GPU, the environment borrows it from there: a machine with a GPU often
has a build that fits its driver. Else pip installs the pinned version, which on Linux is a CUDA build unless pip's
index or `PIP_FIND_LINKS` has another. Needs the standard library alone.

    python benchmarks/gpu_environment.py FOLDER [options of benchmarks.gpu]
"""

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_PINNED = ("torch", "triton")
"""Packages that come with a borrowed torch."""


def main(arguments: list[str]) -> int:
    """Make the environment; 2 if there is no GPU and no CPU is asked for."""
    folder, options = Path(arguments[0]).resolve(), " ".join(arguments[1:])
    wants_gpu = not re.search(r"--device[ =]cpu\b", options)
    version, site = find_torch()
    if wants_gpu and version is None and not has_driver():
        print(
            "no GPU: this machine has no NVIDIA driver, and the torch of GPU_PYTHON finds no GPU. To run everything on "
            "the CPU, tiny: make gpu GPU_ARGS='--device cpu --quick'",
            file=sys.stderr,
        )
        return 2
    venv.create(folder, with_pip=True, clear=True)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if version is not None and site is not None:
        print(f"== torch {version} of {sys.executable} finds a GPU and is used", flush=True)
        (site_packages(folder) / "borrowed_torch.pth").write_text(f"{site}\n", encoding="utf-8")
        pins = without_torch(pins, version)
    constraints = folder / "constraints.txt"
    constraints.write_text(pins, encoding="utf-8")
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    torch = re.search(r"^torch==(\S+)", pins, flags=re.MULTILINE)
    assert torch is not None, "constraints.txt pins torch"
    for requirement in ([f"torch=={torch[1]}"], ["--editable", f"{ROOT}[dev]"]):
        if code := subprocess.run([*pip, *requirement]).returncode:
            return code
    if subprocess.run([*pip, "--editable", f"{ROOT}[bench]"]).returncode:
        print("== the peers of benchmarks.whole_model cannot be installed and are left out", flush=True)
    return 0


def find_torch() -> tuple[str | None, Path | None]:
    """Return version and folder of the torch of this Python, if it finds a GPU."""
    try:
        import torch
    except ImportError:
        return None, None
    if not torch.cuda.is_available():
        return None, None
    return torch.__version__, Path(torch.__file__).resolve().parents[1]


def has_driver() -> bool:
    """Return whether this machine shows a GPU of NVIDIA."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def site_packages(folder: Path) -> Path:
    """Return the folder of packages of a virtual environment of this Python."""
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # Python 3.10 has not the former
    return Path(sysconfig.get_path("purelib", scheme, {"base": str(folder), "platbase": str(folder)}))


def without_torch(pins: str, version: str) -> str:
    """Return the pins with torch at a version, and without what belongs to another."""
    lines = [line for line in pins.splitlines() if not line.startswith(tuple(f"{name}==" for name in NOT_PINNED))]
    return "\n".join([*lines, f"torch=={version}"]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
