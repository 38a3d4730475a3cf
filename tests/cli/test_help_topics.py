import pathlib

import pytest

from tfaccel.cli import main, pages
from tfaccel.common.errors import UserError


@pytest.mark.parametrize("topic", pages.PAGES)
def test_help_shows_the_page_of_a_topic(topic, capsys):
    assert main.main(["help", topic]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# ")
    written = (pages.ROOT / pages.PAGES[topic]).read_text()
    assert text.splitlines()[0] == written.splitlines()[0]
    assert text.count("\n") == written.count("\n")
    assert text.split("```")[1::2] == written.split("```")[1::2]  # code is as it is written


def test_links_name_topics_on_a_terminal():
    said = pages.page("own-images")
    assert "Transfer learning (`tfaccel help transfer`) needs fewer images" in said
    assert "See the table below" in said


def test_help_lists_the_topics_and_a_wrong_one_is_named(capsys):
    main.main(["help"])
    said = capsys.readouterr().out
    assert all(f"tfaccel help {topic} " in said for topic in pages.PAGES)
    assert "Your own images" in said
    with pytest.raises(UserError, match="no page 'exprot'; did you mean 'export'"):
        main.main(["help", "exprot"])


def test_each_page_is_linked_from_the_readme_with_its_topic():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    for topic, file in pages.PAGES.items():
        heading = pages.page(topic).splitlines()[0].removeprefix("# ")
        assert f"| `{topic}` | [{heading}](tfaccel/{file}) |" in readme
