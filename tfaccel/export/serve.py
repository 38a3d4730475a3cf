"""Serves an export over HTTP with LitServe, which answers several requests in one batch.

Takes the folder of an export; gives a server. The program needs TensorFlow and LitServe (the extra
`serve`), but not tfaccel, so you can copy this file to the machine that serves.

    python -m tfaccel.export.serve runs/digits/export/1 --port=8000

    curl http://127.0.0.1:8000/predict -H "Content-Type: application/json" \
        -d '{"image_bytes": {"b64": "'$(base64 -w0 7.png)'"}}'

The request is one JPEG or PNG file in base64, the answer an object with what `predict_bytes`
answers: `class_name` and `probabilities`, for example. An image that cannot be decoded is an error
400 of its own request: the other requests of its batch are answered.
"""

import argparse
import base64
import errno
import json
import os
import pathlib
import re
import signal
import socket
import sys

# TensorFlow is imported in the worker alone. So a mistake is seen at once and not after 15 s.
try:
    import litserve
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(
        f"{error.name} is not installed; add the extra: uv run --extra serve python -m "
        "tfaccel.export.serve ..., or pip install litserve"
    )

SIGNATURE = "predict_bytes"
EXPECTED = (
    'expected {"image_bytes": {"b64": "..."}} with a JPEG or PNG file in base64, as '
    "application/json"
)


class Service(litserve.LitAPI):
    """The model in a worker of the server. LitServe makes the batches."""

    def __init__(self, folder: str, **settings):
        """Takes the folder of an export, and LitServe's settings."""
        super().__init__(api_path="/predict", **settings)
        self._folder = folder

    def setup(self, device: str) -> None:
        """Loads the export, in the worker's own process."""
        import tensorflow as tf

        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        self._loaded = tf.saved_model.load(self._folder)
        self._answer = self._loaded.signatures[SIGNATURE]

    def decode_request(self, request: dict) -> dict:
        """Returns the request as it is: an error here would be one of the whole batch."""
        return request

    def batch(self, inputs: list[dict]) -> list[dict]:
        """Returns the batch, also of one request."""
        return inputs

    def unbatch(self, output: list) -> list:
        """Returns one response for each request."""
        return output

    def predict(self, inputs):
        """Returns a response for each request of a batch; or for one alone, if batches are off."""
        if isinstance(inputs, list):
            return responses(self._answer, inputs)
        return responses(self._answer, [inputs])[0]

    def encode_response(self, output):
        """Returns the response as it is."""
        return output


def responses(answer, requests: list[dict]) -> list[dict | JSONResponse]:
    """Returns the answer to each request, or an error 400 for a request that is at fault.

    Args:
      answer: the signature: it takes `image_bytes`, [rows] string, and answers tensors of [rows,
        ...] by name. One bad image is an error of the whole call.
      requests: JSON objects.
    """
    files = [_file_of(each) for each in requests]
    good = [place for place, each in enumerate(files) if isinstance(each, bytes)]
    answers = dict(zip(good, _answers(answer, [files[each] for each in good]), strict=True))
    return [
        answers[place] if place in answers else _refusal(each) for place, each in enumerate(files)
    ]


def _file_of(request: dict) -> bytes | str:
    """Returns the image file of a request, or why there is none."""
    try:
        return base64.b64decode(request["image_bytes"]["b64"], validate=True)
    except (KeyError, TypeError, ValueError):
        return EXPECTED


def _answers(answer, files: list[bytes]) -> list[dict | JSONResponse]:
    if not files:
        return []
    import tensorflow as tf

    try:
        found = {
            name: each.numpy() for name, each in answer(image_bytes=tf.constant(files)).items()
        }
    except tf.errors.InvalidArgumentError as error:
        if len(files) == 1:
            return [_refusal(_cause(error))]
        # One of the files cannot be decoded. Each alone says which.
        return [each for file in files for each in _answers(answer, [file])]
    return [
        {name: _plain(values[row]) for name, values in found.items()} for row in range(len(files))
    ]


def _plain(value):
    """Returns a value of an answer for JSON."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value.tolist()


def _refusal(why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=400)


async def _not_json(request, error) -> JSONResponse:
    """Answers a request that has no JSON object."""
    return _refusal(EXPECTED)


def _cause(error) -> str:
    """Returns what an OpError of TensorFlow says of the image, without places in the graph."""
    places = r"\{\{.*?\}\}|\[\[.*?\]\]|assertion failed:|: image\] \[0\]$"
    lines = re.sub(places, " ", error.message, flags=re.MULTILINE).splitlines()
    said = [each.strip(" \t[]") for each in lines if re.search("image|JPEG|PNG|decode", each)]
    return said[-1][:300] if said else "the image cannot be decoded"


def _fault_of(folder: pathlib.Path) -> str | None:
    """Returns why a folder cannot be served; None if it can."""
    if not (folder / "saved_model.pb").is_file():
        return "is no export; give the folder with saved_model.pb, such as runs/digits/export/1"
    card = folder / "tfaccel.json"
    images = json.loads(card.read_text())["preprocessing"] if card.is_file() else {"formats": "any"}
    if not (images and images["formats"]):
        return "takes no image files; export the model with a loader of JPEG or PNG files"
    return None


def _fault_of_address(host: str, port: int) -> str | None:
    """Returns why the server cannot listen there; None if it can."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"--port={port}: another program listens on this port of {host}; end it, or give "
                f"another port, such as --port={port + 1}"
            )
        return f"--host={host} --port={port}: the server cannot listen there ({error.strerror})"
    except OverflowError:
        return f"--port={port}: expected a number from 1 to 65535"
    return None


def serve(folder: pathlib.Path, *, host: str, port: int, most_rows: int, wait_s: float) -> None:
    """Serves an export until the process is stopped by a signal.

    Args:
      folder: of the export.
      host: the address to listen on.
      port: likewise.
      most_rows: the most requests in one batch.
      wait_s: how long a request waits for others to join its batch.
    """
    ours = os.getpid()

    def end(*_):
        # LitServe 0.2.19 ends its workers after Ctrl-C, but SIGTERM would leave them, with the
        # port. In a forked process, the traceback of a KeyboardInterrupt would be in the log.
        raise KeyboardInterrupt if os.getpid() == ours else SystemExit

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)
    service = Service(str(folder), max_batch_size=most_rows, batch_timeout=wait_s)
    server = litserve.LitServer(service, accelerator="auto", timeout=60)
    # A form or a file, for example. FastAPI's own answer repeats the request, and fails if that is
    # no text.
    server.app.add_exception_handler(RequestValidationError, _not_json)
    server.run(
        host=host, port=port, num_api_servers=1, generate_client_file=False, log_level="warning"
    )


def main(arguments: list[str] | None = None) -> int:
    """Reads the flags and serves. Returns 2 after a mistake."""
    parser = argparse.ArgumentParser(description="Serves an export over HTTP with LitServe.")
    add = parser.add_argument
    add("export", type=pathlib.Path, help="the folder of an export, such as runs/digits/export/1")
    add("--host", default="127.0.0.1", help="0.0.0.0 serves other machines, too: there is no login")
    add("--port", type=int, default=8000)
    add("--most-rows", type=int, default=32, help="the most requests in one batch")
    add("--wait-s", type=float, default=0.002, help="seconds that a request waits for others")
    options = parser.parse_args(arguments)
    if fault := _fault_of(options.export):
        print(f"{options.export} {fault}", file=sys.stderr)
        return 2
    if fault := _fault_of_address(options.host, options.port):
        print(fault, file=sys.stderr)
        return 2
    serve(
        options.export.absolute(),
        host=options.host,
        port=options.port,
        most_rows=options.most_rows,
        wait_s=options.wait_s,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
