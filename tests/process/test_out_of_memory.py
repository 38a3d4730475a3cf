"""Which texts say that memory is full, and how much was asked for: real ones, of each library."""

import pytest
import tensorflow as tf

from tfaccel.process.out_of_memory import asked_bytes, is_out_of_memory

TEXTS = [
    # (text, bytes asked for)
    ("OOM when allocating tensor with shape[512,64,112,112] and type half on /job:", 822083584),
    ("OOM when allocating tensor with shape[8] and type float on /job:", 32),
    ("Out of memory while trying to allocate 64.00TiB. [Op:__inference_step_70]", 64 << 40),
    ("Out of memory while trying to allocate 6727663616 bytes.", 6727663616),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes.", 1024),
    ("failed to allocate memory [Op:AddV2]", None),
    ("Critical error in pipeline: Can't allocate 1048576 bytes on device 0.", 1048576),
    ("Error when executing Mixed operator ImageDecoder: CUDA allocation failed", None),
    ("nvImageCodec failure: '#5'", None),
    ("failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED", None),
    ("[gpu_0] Cuda failure 2 'out of memory'", None),
]


@pytest.mark.parametrize(("text", "asked"), TEXTS)
def test_full_memory_is_known_by_its_text(text, asked):
    assert is_out_of_memory(text)
    assert asked_bytes(text) == asked


@pytest.mark.parametrize(
    "text",
    [
        "/data/x.ckpt; No space left on device [Op:WriteFile]",
        "/data/x.tfrecord; Too many open files",
        "nvImageCodec failure: '#4'",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDNN_STATUS_EXECUTION_FAILED",
    ],
)
def test_other_faults_are_not_taken_for_it(text):
    assert not is_out_of_memory(text)
    assert asked_bytes(text) is None


@pytest.mark.parametrize(
    ("error", "full", "other"),
    [
        (
            "INTERNAL: cuDNN launch failure : input shape ([64,128,128,64])",
            "dnn.cc:933] OOM when allocating tensor with shape[3382940] and type uint8 on /job:",
            "dnn.cc:933] CUDNN_STATUS_EXECUTION_FAILED",
        ),
        (
            "Collective ops is aborted by: NCCL: unhandled cuda error (run with NCCL_DEBUG=INFO)",
            "[0] transport/nvls.cc:170 NCCL WARN Cuda failure 2 'out of memory'",
            "[0] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be",
        ),
    ],
)
def test_what_a_library_had_no_room_for_is_told_by_the_log(error, full, other):
    assert is_out_of_memory(error, log=full)
    assert not is_out_of_memory(error, log=other)
    assert not is_out_of_memory("INVALID_ARGUMENT: of another cause", log=full)


@pytest.mark.slow
def test_tensorflows_own_errors_are_known():
    # Each takes 10 s: so long does TensorFlow wait for others to give memory back.
    with pytest.raises(tf.errors.ResourceExhaustedError) as of_kernel:
        tf.random.uniform((2**42,))
    assert is_out_of_memory(str(of_kernel.value))
    assert asked_bytes(str(of_kernel.value)) == 2**44

    @tf.function(jit_compile=True)
    def tiled(row):
        return tf.tile(row[None], [2**34, 1])

    with pytest.raises(tf.errors.ResourceExhaustedError) as of_xla:
        tiled(tf.ones(1024))
    assert is_out_of_memory(str(of_xla.value))
    assert asked_bytes(str(of_xla.value)) == 2**46

    with pytest.raises(tf.errors.ResourceExhaustedError) as of_disk:
        tf.io.write_file("/dev/full", tf.constant("full" * 10**5))
    assert not is_out_of_memory(str(of_disk.value))
