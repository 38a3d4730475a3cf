"""`tfaccel help TOPIC`: the pages about one task each, which lie in the rooms that do it."""

import pathlib

from tfaccel.common.errors import UserError, did_you_mean

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    "data": "data/README.md",
    "surviving": "training/README.md",
    "several-gpus": "step/README.md",
    "several-hosts": "launch/README.md",
    "export": "export/README.md",
    "diagnostics": "diagnostics/README.md",
    "security": "common/SECURITY.md",
}
TOPICS = f"\nPages, by `tfaccel help TOPIC`:\n  {' '.join(PAGES)}\n"


def page(topic: str) -> str:
    """Returns the page about a topic, as Markdown.

    Raises:
      UserError: there is no such page.
    """
    if topic not in PAGES:
        cure = did_you_mean(topic, list(PAGES)) or f"; there are {', '.join(PAGES)}"
        raise UserError(f"there is no page '{topic}'{cure}")
    return (ROOT / PAGES[topic]).read_text(encoding="utf-8")
