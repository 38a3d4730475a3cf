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
  litert, litert_bytes  the same of EXPORT/model.tflite

The key "failed" has the indices of files that the export cannot decode. The other answers leave
these files out.
"""

import os
import pathlib
import sys
import warnings

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
    others = (("onnx", "model.onnx", _onnx), ("litert", "model.tflite", _litert))
    for name, file, opened_by in others:
        if (export / file).exists():
            other = opened_by(export / file, served.structured_outputs)
            answers |= _asked(name, other, inputs, dtypes)
            if records.exists():
                pixels = {"image": answers["preprocess/pixels"]}
                answers |= _asked(f"{name}_bytes", other, pixels, dtypes)
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
    own = [_own_name(each, outputs) for each in names]
    return lambda **rows: dict(zip(own, session.run(names, rows), strict=True))


def _litert(path: pathlib.Path, outputs):
    """Returns a function that calls a LiteRT model like the signature with these outputs."""
    try:
        from ai_edge_litert import interpreter as litert
    except ImportError:
        warnings.filterwarnings("ignore", message=".*tf.lite.Interpreter is deprecated")
        litert = tf.lite
    run = litert.Interpreter(model_path=str(path)).get_signature_runner("serving_default")
    return lambda **rows: {_own_name(name, outputs): each for name, each in run(**rows).items()}


def _own_name(name: str, outputs) -> str:
    """Returns the name of an output without the suffix of `saved_model.outputs_apart`."""
    return name if name in outputs else name.removesuffix("_output")


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
    if loaded := {"tfaccel", "nvidia.dali"} & set(sys.modules):
        sys.exit(f"the export needs packages that a server lacks: {', '.join(sorted(loaded))}")
