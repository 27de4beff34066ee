"""Check that every internal link of the built site leads to a file and an anchor that exist; `make docs` runs this.

    python .ci/site_links.py site

Links to other sites are not followed, so that the check works offline. Every page must also be in the search index, in
the script with which search works in a site that is opened from disk.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from urllib.parse import unquote

EXTERNAL = re.compile(r"^([a-z][a-z+.-]*:|//)", re.IGNORECASE)


def targets(page: str) -> list[str]:
    """The internal links of a page, without those of the theme that lead to the top."""
    found = (html.unescape(link) for link in re.findall(r'\b(?:href|src)="([^"]+)"', page))
    return [link for link in found if not EXTERNAL.match(link) and link != "#"]


def broken(site: Path) -> tuple[int, list[str]]:
    """The number of links, and those that lead nowhere. The page for missing files has links from the root."""
    texts = {path.resolve(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    count, lost = 0, []
    for page, text in texts.items():
        for link in targets(text) if page.name != "404.html" else ():
            count += 1
            place, _, anchor = link.partition("#")
            target = (page.parent / unquote(place.partition("?")[0])).resolve() if place else page
            if not target.exists() or (anchor and target in anchors and unquote(anchor) not in anchors[target]):
                lost.append(f"{page.relative_to(site.resolve())}: {link}")
    return count, lost


def unsearchable(site: Path) -> list[str]:
    """The pages that search does not find."""
    script = site / "search" / "search_index.js"
    index = script.read_text(encoding="utf-8").removeprefix("var __index = ") if script.exists() else '{"docs": []}'
    entries, _ = json.JSONDecoder().raw_decode(index)
    known = {unquote(entry["location"].partition("#")[0]) for entry in entries["docs"]}
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html"}
    return sorted(pages - known)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0], "index.html").exists():
        print("usage: site_links.py SITE, the folder of a built site", file=sys.stderr)
        return 2
    count, lost = broken(Path(arguments[0]))
    print(f"{count:,} internal links, {len(lost)} broken", *lost, sep="\n")
    hidden = unsearchable(Path(arguments[0]))
    print(f"{len(hidden)} pages missing in the search index", *hidden, sep="\n")
    return int(bool(lost or hidden))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
