"""Asks the server of tfaccel/export/serve.py over HTTP, and the model itself beside it.

    uv run --extra serve python tools/bench_serving.py --export=runs/digits/export/1 \
        --images=~/.cache/tfaccel/digits/testing --output=tools/results/serving-2-cores

Eight clients ask for a minute, each as soon as it has its answer. Some requests have a damaged
image; each of them must be an error 400, and no other request may be. Before and after that, this
process calls the SavedModel itself with the same files, one and eight in a call. The rate and the
times of requests are written as JSON.
"""

import argparse
import base64
import contextlib
import http.client
import json
import os
import pathlib
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

CLIENTS = 8
BAD_EVERY = 50  # requests of a client
CALLS_S = 10.0  # of the model itself, for each number of rows
START_S = 300.0


@contextlib.contextmanager
def server(export: pathlib.Path) -> Iterator[int]:
    """Within the context the export is served. Yields the port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "tfaccel.export.serve", str(export), f"--port={port}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(port, process, output)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(port: int, process: subprocess.Popen, output) -> None:
    """Waits until the server answers."""
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    output.seek(0)
    raise RuntimeError(f"the server does not answer: {output.read()[-2000:]}")


class Client(threading.Thread):
    """Asks again and again over one connection.

    Attributes:
      times: seconds of each good request.
      wrong: what was unexpected, in words.
      num_refused: the damaged images that were an error 400.
    """

    def __init__(self, port: int, files: Sequence[bytes], *, seconds: float, first: int):
        """Takes the port and good files, the time, and the first file's place."""
        super().__init__(daemon=True)
        self._port, self._files, self._seconds, self._first = port, files, seconds, first
        self.times, self.wrong, self.num_refused = [], [], 0

    def run(self) -> None:
        """Asks until the time is over."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        ends, number = time.monotonic() + self._seconds, 0
        while time.monotonic() < ends:
            number += 1
            is_bad = number % BAD_EVERY == 0
            file = self._files[(self._first + number) % len(self._files)]
            begins = time.perf_counter()
            try:
                status, answer = ask(connection, file[: len(file) // 2] if is_bad else file)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            taken = time.perf_counter() - begins
            if status != (400 if is_bad else 200):
                self.wrong.append(f"status {status}, {str(answer)[:200]}")
            elif is_bad:
                self.num_refused += 1
            else:
                self.times.append(taken)


def ask(connection: http.client.HTTPConnection, file: bytes) -> tuple[int, dict]:
    """Returns the status and the answer for one image file."""
    body = json.dumps({"image_bytes": {"b64": base64.b64encode(file).decode()}})
    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def asked(port: int, files: Sequence[bytes], *, seconds: float, clients: int = CLIENTS) -> dict:
    """Returns the figures of some clients that ask at the same time."""
    threads = [Client(port, files, seconds=seconds, first=7 * each) for each in range(clients)]
    begins = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    taken = time.perf_counter() - begins
    wrong = [each for client in threads for each in client.wrong]
    return {
        "clients": clients,
        "seconds": round(taken, 1),
        **figures([each for client in threads for each in client.times], taken),
        "damaged images, each an error 400": sum(each.num_refused for each in threads),
        "unexpected": len(wrong),
        "first unexpected": wrong[:3],
    }


def called(export: pathlib.Path, files: Sequence[bytes], *, rows: int, seconds: float) -> dict:
    """Returns the figures of calls of the SavedModel itself, `rows` files in a call."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(export))
    answer, times, number = loaded.signatures["predict_bytes"], [], 0
    answer(image_bytes=tf.constant(files[:rows]))["probabilities"].numpy()  # builds what it needs
    begins = time.perf_counter()
    while time.perf_counter() - begins < seconds:
        some = [files[(number + each) % len(files)] for each in range(rows)]
        before = time.perf_counter()
        answer(image_bytes=tf.constant(some))["probabilities"].numpy()
        times.append(time.perf_counter() - before)
        number += rows
    found = figures(times, time.perf_counter() - begins)
    return {"rows": rows, **found, "images/s": round(found["requests/s"] * rows, 1)}


def figures(times: Sequence[float], seconds: float) -> dict:
    """Returns the rate, and the times of requests in milliseconds."""
    found = np.array(times) * 1e3
    quantiles = {name: round(float(np.quantile(found, each)), 2) for name, each in QUANTILES}
    return {"requests": len(times), "requests/s": round(len(times) / seconds, 1), **quantiles}


QUANTILES = (("p50 ms", 0.5), ("p99 ms", 0.99), ("slowest ms", 1.0))


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes. Returns 1 if an answer was unexpected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--export", type=pathlib.Path, required=True, help="the folder with saved_model.pb")
    add("--images", type=pathlib.Path, required=True, help="a folder of JPEG and PNG files")
    add("--seconds", type=float, default=60.0, help="how long the clients ask")
    add("--output", type=pathlib.Path, help="the results, without .json; none to print them only")
    options = parser.parse_args(arguments)
    found = sorted(options.images.expanduser().rglob("*"))
    files = [each.read_bytes() for each in found if each.suffix in (".png", ".jpg", ".jpeg")]
    if not files:
        parser.error(f"--images: {options.images} has no .png and no .jpg file")
    own = min(CALLS_S, options.seconds)
    with server(options.export) as port:
        asked(port, files, seconds=min(3.0, options.seconds))  # warms up
        served = asked(port, files, seconds=options.seconds)
    calls = [called(options.export, files, rows=each, seconds=own) for each in (1, CLIENTS)]
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load average of 15 minutes": round(os.getloadavg()[2], 2),
        "over HTTP, LitServe": served,
        "the SavedModel itself": calls,
    }
    text = json.dumps(results, indent=2)
    print(text)
    if options.output:
        options.output.with_suffix(".json").write_text(f"{text}\n")
    return 1 if served["unexpected"] else 0


if __name__ == "__main__":
    sys.exit(main())
