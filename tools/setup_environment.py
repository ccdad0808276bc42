"""Sets up `.venv`: the locked packages, and attnc itself in editable form. Standard library only, Python 3.11 or newer.

    python3 tools/setup_environment.py [--environment .venv] [--groups all|core|torch] [--on-top FILE]

It does nothing when the lock and pyproject.toml are those of the last run. Where Debian's `ensurepip` is missing, its
package python3-venv is installed first (as root, or by sudo without a password). `--on-top` adds the packages of another
lock to an environment that is set up.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {"core": ("to run",), "torch": ("to run", "the torch extra"), "all": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv")
    parser.add_argument("--groups", choices=sorted(SECTIONS), default="all", help="which sections of the lock to install")
    parser.add_argument("--on-top", type=Path, help="a further lock file, to install into the environment as it is")
    options = parser.parse_args()
    environment: Path = options.environment
    if options.on_top is not None:
        command = [*_create(environment), "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        return subprocess.run([*command, "--requirement", str(options.on_top)], check=False).returncode
    stamp = environment / ".attnc-setup"
    fingerprint = _fingerprint(options.groups)
    if stamp.exists() and stamp.read_text() == fingerprint and (environment / "bin" / "python").exists():
        return 0
    pip = _create(environment)
    requirements = environment / "requirements.txt"
    requirements.write_text("\n".join(_locked(options.groups)) + "\n")
    print(f"setting up {environment} (python {sys.version.split()[0]}); the first time takes a few minutes", flush=True)
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *quiet, "--requirement", str(requirements)], check=True)
    build = ["--no-deps", "--no-build-isolation"] if options.groups == "all" else ["--no-deps"]
    subprocess.run([*pip, "install", *quiet, *build, "--editable", str(ROOT)], check=True)
    stamp.write_text(fingerprint)
    return 0


def _locked(groups: str) -> list[str]:
    """The pins of the lock's sections that `groups` names; a section is a comment line that begins with its title."""
    wanted = SECTIONS[groups]
    pins, active = [], True
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line.startswith("# "):
            active = wanted is None or line[2:] in wanted
        elif line.strip() and active:
            pins.append(line.strip())
    return pins


def _fingerprint(groups: str) -> str:
    digest = hashlib.sha256(f"{groups} {sys.version} {ROOT}".encode())
    for name in ("requirements.lock", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _create(environment: Path) -> list[str]:
    """Makes the virtual environment where there is none, and returns the command that runs its pip."""
    python = environment / "bin" / "python"
    works = python.exists() and subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0
    if environment.exists() and not works:
        shutil.rmtree(environment)
    if not works:
        if importlib.util.find_spec("ensurepip") is None:
            _install_ensurepip()
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    return [str(python), "-m", "pip"]


def _install_ensurepip() -> None:
    """Debian keeps `ensurepip`, which puts pip into a new environment, in a package of its own."""
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    commands = (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package])
    try:
        for command in commands:
            subprocess.run([*root, *command], check=True)
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"this Python cannot make virtual environments with pip; install {package} (apt-get install {package})")


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
