"""Unpacks Slurm and Open MPI from Debian's packages into a folder, without installing them.

    python tools/unpack_engines.py --out=/tmp/engines       # needs apt-get, dpkg and package lists
    TFACCEL_ENGINES=/tmp/engines uv run pytest -m slow tests/engines

The tests of real engines can then run on a machine where Slurm and Open MPI are not installed.
"""

import argparse
import pathlib
import subprocess
import tempfile

# mpirun looks for ssh, even on one host.
PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge", "openmpi-bin", "openssh-client"]


def main() -> None:
    """Unpacks the packages into --out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder to unpack to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", *needed()], cwd=folder, check=True)
        for package in sorted(pathlib.Path(folder).glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(out)], check=True)
    print(f"TFACCEL_ENGINES={out.absolute()}")


def needed() -> list[str]:
    """Returns the packages, and the packages they depend on that this machine lacks."""
    simulated = subprocess.run(
        ["apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.split() for line in simulated.stdout.splitlines())
    return [words[1] for words in lines if words[:1] == ["Inst"]]


if __name__ == "__main__":
    main()
