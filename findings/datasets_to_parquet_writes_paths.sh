#!/usr/bin/env bash
# Hugging Face datasets: to_parquet writes the paths of images, where save_to_disk writes the images themselves.
#
# Version: datasets 5.2.0 with pyarrow 26.0.1 and Pillow 13.0.0, Python 3.11.
#
# Behaviour: a column of the feature Image holds for each image its bytes or its path. A data set made of image files
# holds paths. save_to_disk reads the files, and writes their bytes. push_to_hub does so, too. to_parquet writes the
# paths alone, also after map. It says nothing. A Parquet file that is copied to another machine therefore has no
# images, and load_dataset("parquet") finds that out when the first image is decoded. A data set that was saved to disk
# and loaded again gives a Parquet file with the bytes.
#
# Output seen (4 PNG files):
#   save_to_disk: 4 with bytes; to_parquet: 0 with bytes; to_parquet after map: 0 with bytes;
#   to_parquet after save_to_disk and load_from_disk: 4 with bytes
#   the Parquet file, when the images have been moved: FileNotFoundError
#
# The script exits with 1 if one of these numbers, or the error, changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1 pillow==13.0.0

HF_HUB_OFFLINE=1 HF_HOME="$work/home" "$work/env/bin/python" - "$work" <<'PY'
import pathlib
import sys

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

datasets.disable_progress_bars()
work = pathlib.Path(sys.argv[1])
images = work / "images"
images.mkdir()
for index in range(4):
    PIL.Image.fromarray(np.full((8, 8, 3), 40 * index, np.uint8)).save(images / f"{index}.png")
files = sorted(map(str, images.iterdir()))
made = datasets.Dataset.from_dict({"image": files}).cast_column("image", datasets.Image())


def with_bytes(column):
    return sum(each["bytes"] is not None for each in column.to_pylist())


def as_parquet(data, name):
    path = work / f"{name}.parquet"
    data.to_parquet(path)
    return with_bytes(pq.read_table(path).column("image"))


made.save_to_disk(work / "saved")
(arrow,) = (work / "saved").glob("*.arrow")
found = {
    "save_to_disk": with_bytes(pa.ipc.open_stream(arrow).read_all().column("image")),
    "to_parquet": as_parquet(made, "plain"),
    "to_parquet after map": as_parquet(made.map(lambda row: row), "mapped"),
    "to_parquet after load_from_disk": as_parquet(datasets.load_from_disk(work / "saved"), "saved"),
}
images.rename(work / "moved")
table = datasets.load_dataset("parquet", data_files=str(work / "plain.parquet"), split="train")
try:
    table[0]["image"]
    error = None
except Exception as raised:
    error = type(raised).__name__
for name, number in found.items():
    print(f"{name}: {number} with bytes")
print("the Parquet file, when the images have been moved:", error)
sys.exit(list(found.values()) != [4, 0, 0, 4] or error != "FileNotFoundError")
PY
