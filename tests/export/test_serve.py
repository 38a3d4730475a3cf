"""tfaccel/export/serve.py: an export behind LitServe, which clients ask over HTTP."""

import base64
import http.client
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

pytest.importorskip("litserve", reason="needs the extra serve")

from tfaccel.export import serve

ROOT = pathlib.Path(__file__).parents[2]
GOOD = {"image_bytes": {"b64": base64.b64encode(b"good").decode()}}
BAD = {"image_bytes": {"b64": base64.b64encode(b"bad").decode()}}


def answer(*, image_bytes):
    """As a signature of an export: one bad image is an error of all."""
    if b"bad" in image_bytes.numpy().tolist():
        said = "not a JPEG or PNG file: image] [0]\n\t [[{{node assert}}]] [Op:f]"
        raise tf.errors.InvalidArgumentError(None, None, said)
    rows = len(image_bytes.numpy())
    return {"probabilities": tf.fill((rows, 2), 0.5), "class_name": tf.fill((rows,), "cat")}


def test_a_bad_image_is_an_error_of_its_own_request():
    asked = [GOOD, BAD, {}, {"image_bytes": {"b64": "%"}}, {"image_bytes": 3}, GOOD]
    first, *refused, last = serve.responses(answer, asked)
    assert first == last == {"probabilities": [0.5, 0.5], "class_name": "cat"}
    assert {each.status_code for each in refused} == {400}
    said = [json.loads(each.body)["error"] for each in refused]
    assert said[0] == "not a JPEG or PNG file"
    assert all(each.startswith('expected {"image_bytes"') for each in said[1:])
    assert [each.status_code for each in serve.responses(answer, [BAD])] == [400]


def test_a_folder_without_an_export_is_one_sentence(tmp_path, capsys):
    assert serve.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path} is no export; give the folder")
    (tmp_path / "saved_model.pb").touch()
    for images in (None, {"formats": []}):
        (tmp_path / "tfaccel.json").write_text(json.dumps({"preprocessing": images}))
        assert serve.main([str(tmp_path)]) == 2
        assert "takes no image files; export the model with" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_sentence(tmp_path, capsys):
    (tmp_path / "saved_model.pb").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([str(tmp_path), f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"--port={port}: another program listens on this port of 127.0.0.1; ")
    assert f"--port={port + 1}" in said
    assert serve.main([str(tmp_path), "--port=70000"]) == 2
    assert "expected a number from 1 to 65535" in capsys.readouterr().err


def test_mistakes_are_found_before_tensorflow_is_imported(tmp_path):
    program = "import sys; from tfaccel.export import serve; serve.main([sys.argv[1]]); "
    program += "print('tensorflow' in sys.modules)"
    command = [sys.executable, "-c", program, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, "is no export" in done.stderr) == ("False\n", True)


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_serving", ROOT / "tools/bench_serving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def export(setup, folder, tmp_path):
    run = setup()
    settings = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8, "loader": "memory"}
    loader = run.image_folder(folder, **settings)
    with run.scope():
        flat = [keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((12, 10, 1)), *flat])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, optimizer="sgd", loss=loss)
    return run.export(model, tmp_path / "1", loader=loader, samples=4)


@pytest.mark.slow
def test_clients_get_the_models_answers_and_sigterm_ends_all_processes(
    export, folder, bench, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    files = [each.read_bytes() for each in sorted(folder.rglob("*.png"))]
    expected = tf.saved_model.load(export).signatures["predict_bytes"](
        image_bytes=tf.constant(files[:3])
    )
    with bench.server(export) as port:
        ours = psutil.Process()
        begun = [each.pid for each in ours.children(recursive=True)]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for place, file in enumerate(files[:3]):
            status, found = bench.ask(connection, file)
            assert status == 200
            for name in ("probabilities", "logits"):
                np.testing.assert_allclose(found[name], expected[name][place], atol=1e-5)
            assert found["class_name"].encode() == expected["class_name"][place].numpy()
        form = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\xfe\r\n--x--\r\n'
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        connection.request("POST", "/predict", form, kind)
        refused = connection.getresponse()
        assert (refused.status, serve.EXPECTED in json.load(refused)["error"]) == (400, True)
        monkeypatch.setattr(bench, "BAD_EVERY", 5)
        asked = bench.asked(port, files, seconds=3.0)
        assert asked["unexpected"] == 0, asked
        assert asked["requests"] > 20
        assert asked["damaged images, each an error 400"] > 2
    ends = time.monotonic() + 30
    while left := [each for each in begun if psutil.pid_exists(each)]:
        assert time.monotonic() < ends, left
        time.sleep(0.1)
    assert len(begun) > 2  # the server, and its workers


@pytest.mark.slow
def test_the_tool_writes_rates_beside_the_models_own_call(export, folder, tmp_path):
    command = [sys.executable, ROOT / "tools/bench_serving.py", f"--export={export}"]
    command += [f"--images={folder}", "--seconds=1", f"--output={tmp_path / 'a'}"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    results = json.loads((tmp_path / "a.json").read_text())
    assert results["over HTTP, LitServe"]["requests/s"] > 0
    assert [each["rows"] for each in results["the SavedModel itself"]] == [1, 8]
