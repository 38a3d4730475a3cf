"""What an export answers where there is neither tfaccel nor DALI: a program of its own.

    python -P fresh_process.py EXPORT FOLDER

FOLDER holds inputs.npz, those of `serving_default` by name, and may hold encoded.tfrecord, a record
for each image file. Into it goes answers.npz: "SIGNATURE/NAME" for every answer that is numbers, of
"serving_default", "predict_bytes" and "preprocess" (of its inputs, which are large, the first rows
alone); of EXPORT/model.onnx, "onnx" from the inputs and "onnx_bytes" from the pixels of
"preprocess". "failed" are the indices of files that it does not decode, left out of the others.
"""

import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

ROWS = 32  # at a time


def main(export: pathlib.Path, folder: pathlib.Path) -> None:
    """Asks the export and writes what it answers."""
    # By an open folder: TensorFlow would take a `[` in the export's own path for a pattern.
    opened = os.open(export, os.O_PATH | os.O_DIRECTORY)
    signatures = tf.saved_model.load(f"/proc/self/fd/{opened}").signatures
    with np.load(folder / "inputs.npz") as stored:
        inputs = dict(stored)
    served = signatures["serving_default"]
    dtypes = {key: each.dtype for key, each in served.structured_input_signature[1].items()}
    answers = _asked("serving_default", served, inputs, dtypes)
    records = folder / "encoded.tfrecord"
    if records.exists():
        encoded = [each.numpy() for each in tf.data.TFRecordDataset(str(records))]
        answers |= _of_files(signatures, np.array(encoded, dtype=object))
    if (export / "model.onnx").exists():
        onnx = _onnx(export / "model.onnx", served.structured_outputs)
        answers |= _asked("onnx", onnx, inputs, dtypes)
        if records.exists():
            pixels = {"image": answers["preprocess/pixels"]}
            answers |= _asked("onnx_bytes", onnx, pixels, dtypes)
    np.savez(folder / "answers.npz", **answers)


def _asked(name: str, signature, inputs, dtypes=None) -> dict[str, np.ndarray]:
    """Returns a signature's answers to inputs of any number of rows, cast to its dtypes."""
    parts = {}
    num_rows = len(next(iter(inputs.values())))
    for start in range(0, num_rows, ROWS):
        rows = {key: each[start : start + ROWS] for key, each in inputs.items()}
        if dtypes:
            rows = {key: each.astype(dtypes[key].as_numpy_dtype) for key, each in rows.items()}
        for key, answer in signature(**rows).items():
            parts.setdefault(f"{name}/{key}", []).append(np.asarray(answer))
    joined = {key: np.concatenate(each) for key, each in parts.items()}
    return {key: each for key, each in joined.items() if each.dtype != object}  # not text


def _of_files(signatures, encoded: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the answers to image files, of those that can be decoded."""
    failed = []
    try:
        seen = _asked("preprocess", signatures["preprocess"], {"image_bytes": encoded})
    except tf.errors.InvalidArgumentError:
        failed = [i for i, each in enumerate(encoded) if not _decodes(signatures, each)]
        if len(failed) == len(encoded):
            raise
        encoded = np.delete(encoded, failed)
        seen = _asked("preprocess", signatures["preprocess"], {"image_bytes": encoded})
    seen["preprocess/inputs"] = seen["preprocess/inputs"][:ROWS]
    answers = _asked("predict_bytes", signatures["predict_bytes"], {"image_bytes": encoded})
    return answers | seen | {"failed": np.array(failed, np.int64)}


def _decodes(signatures, encoded: bytes) -> bool:
    try:
        signatures["preprocess"](image_bytes=tf.constant([encoded]))
    except tf.errors.InvalidArgumentError:
        return False
    return True


def _onnx(path: pathlib.Path, outputs):
    """Returns what calls an ONNX model as the signature is called that has these outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    # An output that is called as an input is has a suffix there: see tfaccel/export/onnx.py.
    own = [each if each in outputs else each.removesuffix("_output") for each in names]
    return lambda **rows: dict(zip(own, session.run(names, rows), strict=True))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
    if loaded := {"tfaccel", "nvidia.dali"} & set(sys.modules):
        sys.exit(f"the export needs what a server has not: {', '.join(sorted(loaded))}")
