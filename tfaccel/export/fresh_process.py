"""A program that runs an export without tfaccel and DALI, and writes its answers.

    python -P fresh_process.py EXPORT FOLDER

FOLDER has inputs.npz, the inputs of `serving_default` by name. It may have encoded.tfrecord, with
one record for each image file. The program writes answers.npz, with the key "SIGNATURE/NAME" for
each numeric answer:

  serving_default  from the inputs
  predict_bytes    from the files
  preprocess       from the files; only the first rows of "inputs", which are large
  onnx             of EXPORT/model.onnx, from the inputs
  onnx_bytes       of EXPORT/model.onnx, from the pixels of "preprocess"

The key "failed" has the indices of files that the export cannot decode. The other answers leave
these files out.
"""

import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

ROWS = 32  # in one call


def main(export: pathlib.Path, folder: pathlib.Path) -> None:
    """Runs the export and writes its answers."""
    # It opens the folder first, because TensorFlow takes a `[` in the export's path for a pattern.
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
    """Returns a signature's answers to inputs with any number of rows, cast to its dtypes."""
    parts = {}
    num_rows = len(next(iter(inputs.values())))
    for start in range(0, num_rows, ROWS):
        rows = {key: each[start : start + ROWS] for key, each in inputs.items()}
        if dtypes:
            rows = {key: each.astype(dtypes[key].as_numpy_dtype) for key, each in rows.items()}
        for key, answer in signature(**rows).items():
            parts.setdefault(f"{name}/{key}", []).append(np.asarray(answer))
    joined = {key: np.concatenate(each) for key, each in parts.items()}
    return {key: each for key, each in joined.items() if each.dtype != object}  # leave out text


def _of_files(signatures, encoded: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the answers to the image files that can be decoded."""
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
    """Returns a function that calls an ONNX model like the signature with these outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    # An output with the name of an input has a suffix: see tfaccel/export/onnx.py.
    own = [each if each in outputs else each.removesuffix("_output") for each in names]
    return lambda **rows: dict(zip(own, session.run(names, rows), strict=True))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
    if loaded := {"tfaccel", "nvidia.dali"} & set(sys.modules):
        sys.exit(f"the export needs packages that a server lacks: {', '.join(sorted(loaded))}")
