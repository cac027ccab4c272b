"""Links from a page to files of the repository outside docs/, its address, and the version of the site.

In the repository such a link leads to the file. The site does not contain the file. With an address in
address.py the link leads to the file there; without it the link becomes its text and the path of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """The configuration, with the version in the footer of each page, and the address of the repository."""
    text = (Path(__file__).parents[1] / "fastload" / "version.py").read_text()
    version = re.search(r'__version__ = "(.+)"', text)
    assert version is not None
    address = re.search(
        r'^ADDRESS = "([^"]*)"', (Path(__file__).parent / "address.py").read_text(), re.MULTILINE
    )
    assert address is not None
    config.repo_url = address[1] or None
    config.copyright = f"fastload {version[1]}, Apache-2.0"
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with each link that leaves docs/ replaced."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"
        if text == f"`{path}`":
            return text
        is_in_brackets = markdown[match.start() - 1] == "("
        place = f"`{path}` in the repository"
        return f"{text}: {place}" if is_in_brackets else f"{text} ({place})"

    return _LINK.sub(replaced, markdown)
