"""Each field of a config is documented at the field, for `--help` and for Python's `help`."""

import dataclasses
import inspect

import keras
import pytest

import tfaccel
from tfaccel.config import Config, ExportConfig
from tfaccel.config.documented import documented, first_sentence, meanings

KINDS = [*(each.default_factory for each in dataclasses.fields(Config)), ExportConfig]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_text(kind):
    assert list(meanings(kind)) == [each.name for each in dataclasses.fields(kind)]
    for name, text in meanings(kind).items():
        assert len(text) > 10, name
        assert text.endswith((".", ".)")), name


def test_help_of_a_class_shows_the_texts():
    shown = tfaccel.StepConfig.__doc__
    assert shown.startswith("How a step is computed")
    for each in dataclasses.fields(tfaccel.StepConfig):
        assert f"\n  {each.name}: " in shown
    assert "Parts of a step, to save memory." in tfaccel.StepConfig(nonfinite="skip").__doc__


def test_a_class_without_its_source_shows_its_own_text():
    made = documented(type("Made", (), {"__doc__": "Of no file.", "__module__": "nowhere"}))
    assert made.__doc__ == "Of no file."


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_unknown_keyword_is_an_error_with_the_name_that_was_meant(kind):
    field = dataclasses.fields(kind)[-1].name
    with pytest.raises(tfaccel.UserError, match=f"^{kind.__name__} has no field '{field}s'; did"):
        kind(**{f"{field}s": None})
    assert dataclasses.replace(kind()) == kind()


def test_a_near_name_of_reductions_is_understood():
    with pytest.raises(tfaccel.UserError, match="did you mean 'reductions'"):
        tfaccel.StepConfig(reduction="own_replica")
    assert "reductions" in inspect.signature(tfaccel.StepConfig).parameters  # still known to `help`


def test_a_field_of_the_step_that_compile_gets_is_understood(setup):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    wanted = r"reductions is a field of StepConfig; use step=tfaccel.StepConfig\(reductions=...\)"
    with pytest.raises(tfaccel.UserError, match=f"^{wanted}"):
        run.compile(model, "sgd", "mse", reductions="own_replica")
    with pytest.raises(tfaccel.UserError, match=f"^reduction is no argument of compile; {wanted}"):
        run.compile(model, "sgd", "mse", reduction="own_replica")
    with pytest.raises(tfaccel.UserError, match="unexpected keyword argument 'looses'"):
        run.compile(model, "sgd", looses="mse")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Passes over the images.", "Passes over the images"),
        (
            "GPUs, e.g. 0,1; empty for the CPU. Indices among the GPUs.",
            "GPUs, e.g. 0,1; empty for the CPU",
        ),
        ("Format, e.g. mixed_float16. A policy of Keras.", "Format, e.g. mixed_float16"),
        ('Who decodes. "auto" chooses.', "Who decodes"),
        ("At most 4 GiB", "At most 4 GiB"),
    ],
)
def test_a_first_sentence_ends_at_its_full_stop(text, first):
    assert first_sentence(text) == first
