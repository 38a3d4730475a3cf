#!/usr/bin/env bash
# TensorFlow and DALI: decoding a colour PNG with a gAMA or sRGB chunk to grey gives levels that are wrong by about 60.
#
# Versions: tensorflow-cpu 2.21.0, nvidia-dali-cuda120 2.4.0 (its CPU decoder), Pillow 12.1.0; Python 3.11 to 3.13.
#
# Behaviour: `tf.io.decode_png(data, channels=1)` and DALI's `fn.decoders.image(output_type=GRAY)` convert pixels to
# grey by one of two formulas. A chunk that most viewers ignore decides which one. Without gAMA and sRGB, both use
# the luma of the stored values, within 1 level of Pillow's convert("L"). With gAMA or sRGB, both convert in linear
# light. If the file is decoded as RGB, the pixels are always the stored ones. So a data set of grey images that
# several programs saved can contain two kinds of grey, although all decoders agree on the colours.
#
# Output seen, the largest difference from Pillow's grey, in levels of 0 to 255:
#   no chunk: TensorFlow 1, DALI 1
#   gAMA:     TensorFlow 58, DALI 58
#   sRGB:     TensorFlow 58, DALI 58
#   as RGB:   0 in all cases
#
# The script exits with 1 if this behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet tensorflow-cpu==2.21.0 nvidia-dali-cuda120==2.4.0 pillow==12.1.0

CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3 "$work/env/bin/python" - <<'PY'
import io
import struct
import sys
import zlib

import numpy as np
import PIL.Image
import tensorflow as tf
from nvidia.dali import fn, pipeline_def, types

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
GREY = np.array(PIL.Image.fromarray(PIXELS).convert("L"))


def png(chunk=None):
    """Returns the pixels as a PNG file, with a chunk (name, data) directly after the header."""
    file = io.BytesIO()
    PIL.Image.fromarray(PIXELS).save(file, "png")
    data = file.getvalue()
    if chunk is None:
        return data
    body = b"".join(chunk)
    length, checksum = struct.pack(">I", len(chunk[1])), struct.pack(">I", zlib.crc32(body))
    return data[:33] + length + body + checksum + data[33:]


def by_dali(data, kind):
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline():
        encoded = fn.external_source(lambda: [np.frombuffer(data, np.uint8)])
        return fn.decoders.image(encoded, device="cpu", output_type=kind)

    built = pipeline()
    built.build()
    return np.array(built.run()[0][0])


def difference(found, true):
    return int(np.abs(found.squeeze().astype(int) - true.astype(int)).max())


good = True
for name, data in {
    "no chunk": png(),
    "gAMA": png((b"gAMA", struct.pack(">I", 45455))),
    "sRGB": png((b"sRGB", b"\0")),
}.items():
    grey = [
        difference(tf.io.decode_png(data, channels=1).numpy(), GREY),
        difference(by_dali(data, types.GRAY), GREY),
    ]
    colour = [
        difference(tf.io.decode_png(data, channels=3).numpy(), PIXELS),
        difference(by_dali(data, types.RGB), PIXELS),
    ]
    print(f"{name}: TensorFlow {grey[0]}, DALI {grey[1]}; as RGB {colour[0]}, {colour[1]}")
    good &= colour == [0, 0] and (max(grey) <= 1 if name == "no chunk" else min(grey) > 40)
sys.exit(0 if good else 1)
PY
