"""Puts choices of kernels that a machine kept into the package, for all users of such GPUs.

    uv run --extra gpu python tools/bench.py --rows=V,L --caches=/tmp/caches --output=/tmp/bench
    uv run python tools/ship_autotuning.py /tmp/caches

The program looks in each folder `tfaccel/autotuning` below the given one. It takes the choices that
were made with the default settings. tfaccel/runtime/autotuned gets two files for each kind of
GPU: the choices, as XLA wrote them, compressed; and the versions of the libraries for which they
hold. Choices that the package has already for the same versions stay. Those for float16 that a run
had from the package's for bfloat16 are left out. The last line of standard output
is JSON. Exit codes: 0 done; 1 nothing was found; 2 a mistake in the call.
"""

import argparse
import gzip
import hashlib
import json
import pathlib
import re
import sys

from tfaccel.runtime import autotuning


def main(arguments: list[str] | None = None) -> int:
    """Reads the choices, writes the package's files, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("caches", type=pathlib.Path, help="a folder with caches in it")
    parser.add_argument("--output", type=pathlib.Path, default=autotuning.SHIPPED)
    options = parser.parse_args(arguments)
    if not options.caches.is_dir():
        parser.error(f"{options.caches} is not a folder; name the one that bench.py --caches got")
    made = {}
    for settings in sorted(options.caches.rglob("tfaccel/autotuning/*/settings.json")):
        decides = json.loads(settings.read_text())
        if decides["xla_flags"] or not decides["tf32"] or len(decides["gpus"]) != 1:
            print(f"left out {settings.parent}: its settings are not the default ones")
            continue
        gpu = re.sub(r"\W+", "-", json.loads(decides["gpus"][0])["name"].lower())
        versions = json.dumps(decides["packages"], sort_keys=True)
        digest = hashlib.blake2b(versions.encode(), digest_size=4).hexdigest()
        key = f"{gpu}-tensorflow-{decides['packages']['tensorflow']}-{digest}", versions
        made.setdefault(key, []).append(settings.parent)
    shipped = {
        name: _ship(options.output / f"{name}.json", packages, folders)
        for (name, packages), folders in made.items()
    }
    print(json.dumps(shipped))
    return 0 if any(shipped.values()) else 1


def _ship(path: pathlib.Path, packages: str, folders: list[pathlib.Path]) -> int:
    """Writes a file of choices and that of its versions; returns the number of choices."""
    versions = json.loads(packages)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [autotuning.read_shipped(path)] if path.exists() else []
    read = [autotuning.read(each) for folder in folders for each in sorted(folder.glob("*.pb"))]
    choices = autotuning.join([*kept, *read])
    derived = {_key(each) for each in autotuning.in_float16(autotuning.join(kept)).results}
    own = [each for each in choices.results if _key(each) not in derived]
    del choices.results[:]
    choices.results.extend(own)
    if choices.results:
        data = gzip.compress(choices.SerializeToString(), mtime=0)
        path.with_suffix(".pb.gz").write_bytes(data)
        path.write_text(json.dumps({"packages": versions}, indent=2) + "\n")
    return len(choices.results)


def _key(choice) -> tuple:
    return choice.device, choice.hlo, choice.result


if __name__ == "__main__":
    sys.exit(main())
