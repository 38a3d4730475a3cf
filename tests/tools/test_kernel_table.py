"""tools/kernel_table.py on planted traces."""

import re

import pytest
from loaded_tool import loaded
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

MS = 1_000_000_000  # picoseconds


def plane(space, name, lines):
    """Adds a plane of lines by name, each of (event's name, start, end) in milliseconds.

    An event's operation is of the program "step", and has its name with a dot before the number.
    """
    added, numbers = space.planes.add(name=name), {}
    for number, stat in enumerate(("hlo_module", "hlo_op", "step"), start=1):
        added.stat_metadata[number].name = stat
    for line_name, events in lines.items():
        # Lines begin at times of their own.
        line = added.lines.add(name=line_name, timestamp_ns=1_000_000)
        for event, start, end in events:
            number = numbers.setdefault(event, len(numbers) + 1)
            added.event_metadata[number].name = event
            event = line.events.add(
                metadata_id=number,
                offset_ps=int((start - 1) * MS),
                duration_ps=int((end - start) * MS),
            )
            event.stats.add(metadata_id=1, ref_value=3)
            name = added.event_metadata[number].name
            event.stats.add(metadata_id=2, str_value=re.sub(r"_(\d+)$", r".\1", name))


def program(space, operations):
    """Adds the program "step", of operations: name, dtype, shape, and operands by their numbers."""
    module = hlo_pb2.HloModuleProto(name="step")
    computation = module.computations.add()
    for number, (name, dtype, dimensions, operands) in enumerate(operations):
        operation = computation.instructions.add(name=name, id=number, operand_ids=operands)
        operation.shape.element_type = getattr(xla_data_pb2, dtype)
        operation.shape.dimensions.extend(dimensions)
        if "fusion" in name:
            operation.metadata.op_name = f"model/layer_{number}/Sum"
    metadata = space.planes.add(name="/host:metadata")
    metadata.stat_metadata[1].name = "Hlo Proto"
    proto = hlo_pb2.HloProto(hlo_module=module).SerializeToString()
    metadata.event_metadata[1].stats.add(metadata_id=1, bytes_value=proto)


@pytest.fixture
def trace(tmp_path):
    """Two steps of 10 ms: 5 of kernels, of which two streams share one, and 5 of waiting."""
    space = xplane_pb2.XSpace()
    kernels = []
    for step in (0, 10):
        kernels += [
            ("sm90_xmma_fprop", step + 1, step + 3),
            ("input_reduce_fusion_7", step + 3.008, step + 4.008),
            ("loop_convert_fusion", step + 9, step + 11),
        ]
    plane(space, "/device:GPU:0", {"Stream #13(Compute)": kernels, "XLA Ops": kernels})
    second = {"Stream #14(MemcpyH2D)": [("MemcpyH2D", 1.5, 2.5)]}
    plane(space, "/device:GPU:1", second)
    program(
        space,
        [
            ("a", "F16", [500, 10**6], []),
            ("b", "PRED", [1000, 10**6], []),
            ("input_reduce_fusion.7", "F32", [125, 10**6], [0, 1]),  # 2.5 GB in 1 ms
            ("loop_convert_fusion", "F32", [10, 10**9], [0]),  # too much for 2 ms: of a slice
        ],
    )
    python = [("launch", 3.5, 9.5), ("launch", 14, 15), ("tiny", 5, 5.5), ("elsewhere", 1, 2)]
    plane(space, "/host:CPU", {"python": python})
    path = tmp_path / "plugins" / "profile" / "x" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(space.SerializeToString())
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs the tool in this process; returns its exit code, and what it prints."""

    def run(*arguments):
        try:
            with loaded("kernel_table") as tool:
                code = tool.main([*map(str, arguments)])
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr()
        return code, printed.out or printed.err

    return run


def test_says_where_a_steps_time_goes(run, trace):
    code, printed = run(trace, "--steps=2", "--kernels=2", "--bandwidth=4")
    assert code == 0
    first, second = printed.split("\n\n")
    lines = [" ".join(each.split()) for each in first.splitlines()]
    # From 1 to 21 ms, of which 10 are kernels: each on one stream, and counted once.
    assert lines[:5] == [
        "/device:GPU:0",
        "10.00 ms per step, 5.00 of them busy, with 3 kernels",
        "2.00 ms convolution or product",
        "2.00 ms element by element",
        "1.00 ms sum",
    ]
    assert "0.01 ms idle for less than 0.01 ms at a time, 1.0 times" in lines
    assert "4.99 ms idle for more than 0.3 ms at a time, 1.0 times" in lines
    start = lines.index("the longest kernels: ms per step, calls per step, name:") + 1
    assert lines[start : start + 2] == ["2.00 1.0 sm90_xmma_fprop", "2.00 1.0 loop_convert_fusion"]
    # Of 4.008 to 9 and 14.008 to 19 ms the host launched 4.992 and 0.992.
    head = "what the host did while the GPU was idle for more than 0.3 ms: ms per step, name:"
    start = lines.index(head) + 1
    assert lines[start : start + 2] == ["2.99 launch", "0.25 tiny"]
    assert lines[start + 2 :] == [
        "3.00 ms in XLA's kernels, which read and write at most 10.5 GB; this takes 2.62 ms at 4 "
        "TB/s",
        "those that exceed that time most: ms per step, ms beyond it, GB, name:",
        "1.00 0.38 2.50 input_reduce_fusion.7 (input_reduce_fusion_7)",
        "2.00 0.00 8.00 loop_convert_fusion (loop_convert_fusion)",
        "by TensorFlow's operation: ms per step, kernels per step, GB at most, name:",
        "3.00 2.0 43.50 model/layer_#/Sum",
    ]
    assert second.startswith("/device:GPU:1")
    assert "0.50 ms copy" in " ".join(second.split())


def test_a_folder_without_a_trace_is_said_to_be_one(run, tmp_path, trace):
    code, printed = run(tmp_path / "nowhere", "--steps=2")
    assert (code, "expected a profile" in printed) == (2, True)
    assert run(trace, "--steps=0")[0] == 2


def test_a_trace_of_the_cpu_alone_has_no_table(run, tmp_path):
    space = xplane_pb2.XSpace()
    plane(space, "/host:CPU", {"python": [("launch", 1, 2)]})
    (tmp_path / "a.xplane.pb").write_bytes(space.SerializeToString())
    code, printed = run(tmp_path, "--steps=1")
    assert (code, "has no GPU kernels" in printed) == (1, True)
