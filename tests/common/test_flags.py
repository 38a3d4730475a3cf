"""A flag is stated once: absl's flag, its check and its line of help are made from that."""

import pytest

from tfaccel.common.errors import UserError
from tfaccel.common.flags import Flag, define, described, parsed

FLAGS = (
    Flag("top", 3, "how many classes for each file", more="At least one", at_least=1),
    Flag("xla", "both", "steps with XLA or without", choices=("both", "on", "off")),
    Flag("precision", ("float32", "float16"), "dtype policies"),
    Flag("seconds", 5.0, "that each rate is measured for", at_least=0.5, at_most=60, is_rare=True),
    Flag("minutes", None, "for the search", shown="10", kind=float),
    Flag("json", False, "print JSON"),
    Flag("out", None, "a new file", shown="FILE"),
)


def test_flags_have_their_defaults_and_take_values_of_their_types():
    values = define(FLAGS)
    assert parsed("predict", values, ["cat.jpg"], fields=()) == ["cat.jpg"]
    assert [values[each.name].value for each in FLAGS] == [
        3, "both", ["float32", "float16"], 5.0, None, False, None,
    ]  # fmt: skip
    values = define(FLAGS)
    given = ["--top=5", "--xla=on", "--precision=a,b", "--seconds=1", "--minutes=2", "--json"]
    parsed("predict", values, given, fields=())
    assert [values[each.name].value for each in FLAGS] == [
        5, "on", ["a", "b"], 1.0, 2.0, True, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--top=0", "--top=0"),
        ("--top=a", "--top=a: expected a whole number"),
        ("--seconds=a", "--seconds=a: expected a number"),
        ("--seconds=0.1", "--seconds=0.1"),
        ("--seconds=61", "--seconds=61"),
        ("--json=perhaps", "--json=perhaps: expected true or false"),
        ("--xla=perhaps", "both|on|off"),
        ("--secnds=3", "no flag --secnds of `tfaccel predict`; did you mean --seconds?"),
    ],
)
def test_a_flag_checks_its_value(given, said):
    with pytest.raises(UserError) as raised:
        parsed("predict", define(FLAGS), [given], fields=())
    assert said in str(raised.value)


def test_help_shows_each_flag_with_its_default():
    assert described(FLAGS[:3], whole=True).splitlines() == [
        "  --top=3     how many classes for each file. At least one",
        "  --xla=both  steps with XLA or without",
        "  --precision=float32,float16",
        "              dtype policies",
    ]
    assert described(FLAGS[3:]).splitlines() == [
        "  --seconds=5   that each rate is measured for",
        "  --minutes=10  for the search",
        "  --json        print JSON",
        "  --out=FILE    a new file",
    ]
    short = described(FLAGS, whole=False)
    assert "--seconds" not in short
    assert "At least one" not in short
