"""`tfaccel help TOPIC`: the pages, one about each task, which lie in the rooms that do it."""

import pathlib
import re

from tfaccel.common.errors import UserError, did_you_mean

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    "own-images": "data/README.md",
    "data": "data/LOADERS.md",
    "script": "training/SCRIPT.md",
    "transfer": "experiment/models/README.md",
    "segmentation": "experiment/README.md",
    "evaluate": "experiment/evaluate/README.md",
    "text": "data/TEXT.md",
    "attention": "step/attention/README.md",
    "several-gpus": "step/README.md",
    "several-hosts": "launch/README.md",
    "network": "launch/NETWORK.md",
    "surviving": "training/README.md",
    "search": "diagnostics/search/README.md",
    "trackers": "training/TRACKERS.md",
    "export": "export/README.md",
    "serving": "export/SERVING.md",
    "diagnostics": "diagnostics/README.md",
    "notebook": "process/README.md",
    "security": "common/SECURITY.md",
    "where-it-fits": "common/FITS.md",
    "install": "common/INSTALL.md",
}


def topics() -> str:
    """Returns the list of pages, for `tfaccel --help`: a line for each, with its heading."""
    lines = (f"  tfaccel help {topic:<14} {_heading(page(topic))}\n" for topic in PAGES)
    return "\nPages, one about each task:\n" + "".join(lines)


def page(topic: str) -> str:
    """Returns the page about a topic, as Markdown in which links to pages name their topics.

    Raises:
      UserError: there is no such page.
    """
    if topic not in PAGES:
        cure = did_you_mean(topic, list(PAGES)) or f"; the pages are {', '.join(PAGES)}"
        raise UserError(f"there is no page '{topic}'{cure}")
    file = ROOT / PAGES[topic]
    topics = {(ROOT / each).resolve(): name for name, each in PAGES.items()}

    def named(link: re.Match) -> str:
        text, target = link.groups()
        other = topics.get((file.parent / target.partition("#")[0]).resolve())
        return text if other is None else f"{text} (`tfaccel help {other}`)"

    pieces = file.read_text(encoding="utf-8").split("```")  # words and code take turns
    pieces[::2] = [re.sub(r"\[([^]\n]+)\]\(([^)\s]+)\)", named, each) for each in pieces[::2]]
    return "```".join(pieces)


def _heading(text: str) -> str:
    return text.split("\n", 1)[0].removeprefix("# ")
