"""tools/gpu_program.py: the table of a program that XLA compiled for a GPU."""

import sys

import pytest
from loaded_tool import loaded

HLO = """HloModule step

%fused_add (p.0: f32[4,8]) -> f32[4,8] {
  %p.0 = f32[4,8]{1,0} parameter(0)
  ROOT %add.1 = f32[4,8]{1,0} add(%p.0, %p.0)
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = bf16[8,8]{1,0} constant(0)
  %add.fusion = f32[4,8]{1,0} fusion(%x), kind=kLoop, metadata={op_name="layer_1/Add"}
  %gemm_fusion.1 = f32[4,8]{1,0} fusion(%add.fusion, %w), kind=kCustom
  %call.1 = (f32[4,8]{1,0}, u8[16]{0}) custom-call(%gemm_fusion.1), custom_call_target="c"
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%call.1), index=0
}
"""


@pytest.fixture
def gpu_program():
    with loaded("gpu_program") as module:
        yield module


def test_bytes_of_kernels(gpu_program):
    found = {name: (shape, operands) for name, shape, _, _, operands in gpu_program.kernels(HLO)}
    assert found.keys() == {"add.fusion", "gemm_fusion.1", "call.1"}
    assert found["gemm_fusion.1"] == ("f32[4,8]{1,0}", ["f32[4,8]{1,0}", "bf16[8,8]{1,0}"])
    assert gpu_program.size_of("(f32[4,8]{1,0}, u8[16]{0})") == 4 * 8 * 4 + 16
    assert gpu_program.size_of("bf16[]") == 2


def test_a_kernel_reads_only_what_it_gathers(gpu_program):
    program = """HloModule step

%fused_gather (p.0: bf16[512,8], p.1: s32[4,1], p.2: f32[16]) -> f32[4,8] {
  %p.1 = s32[4,1]{1,0} parameter(1)
  %p.0 = bf16[512,8]{1,0} parameter(0)
  %convert.1 = f32[512,8]{1,0} convert(%p.0)
  %p.2 = f32[16]{0} parameter(2)
  %gather.2 = f32[4]{0} gather(%p.2, %p.1), slice_sizes={1}
  %sum.1 = f32[] reduce(%p.2, %gather.2), dimensions={0}
  ROOT %gather.1 = f32[4,8]{1,0} gather(%convert.1, %p.1), offset_dims={1}, slice_sizes={1,8}
}

ENTRY %main (x: bf16[512,8], i: s32[4,1], y: f32[16]) -> f32[4,8] {
  %x = bf16[512,8]{1,0} parameter(0)
  %i = s32[4,1]{1,0} parameter(1)
  %y = f32[16]{0} parameter(2)
  ROOT %gather_fusion = f32[4,8]{1,0} fusion(%x, %i, %y), kind=kLoop, calls=%fused_gather
}
"""
    ((*_, operands),) = gpu_program.kernels(program)
    sizes = [gpu_program.size_of(each) for each in operands]
    assert sizes == [2 * 4 * 8, 4 * 4, 4 * 16]


def test_the_table_has_each_kind(gpu_program):
    lines = list(gpu_program.table(HLO, 2))
    assert [line.split()[-1] for line in lines[:2]] == ["kernels", "products"]
    assert "calls" in lines[2]
    assert len(lines) == 3 + 1 + 2
    assert any("layer_#/Add" in line for line in gpu_program.table(HLO, 9))


def test_an_unknown_network_is_a_mistake(gpu_program, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_program.main(["vit", f"--jax-python={sys.executable}"])
    assert ended.value.code == 2
    assert "vit_b16" in capsys.readouterr().err
