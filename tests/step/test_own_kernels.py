"""Where tfaccel's own kernels run."""

import pytest

from tfaccel.step import own_kernels
from tfaccel.step.depthwise.choose import Depthwises
from tfaccel.step.gelu.choose import Gelus


@pytest.mark.parametrize("kind", [Gelus, Depthwises])
@pytest.mark.parametrize(
    ("capability", "wanted", "are_used"),
    [((8, 0), True, True), ((9, 0), True, True), ((9, 0), False, False), (None, True, False)],
)
def test_kernels_run_with_xla_on_gpus_from_ampere_on(
    monkeypatch, kind, capability, wanted, are_used
):
    monkeypatch.setattr(own_kernels, "capability_for_kernels", lambda _: capability)
    found = own_kernels.kernels_on(kind, ["/gpu:0"], wanted=wanted)
    assert isinstance(found, kind) if are_used else found is None


def test_no_kernels_run_on_a_cpu():
    assert own_kernels.kernels_on(Gelus, ["/cpu:0"], wanted=True) is None
