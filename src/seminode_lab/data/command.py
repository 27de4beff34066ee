"""The command `seminode data status|fetch|check`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .base import DataSet, DataStatus, count_text
from .catalogue import CATALOGUE, by_name
from .errors import DataError
from .files import size_text
from .folders import VARIABLE, data_dir

DESCRIPTION = f"""\
List, download and check the data sets.

  status   show what exists, from file names and sizes
  fetch    download with checksums, resuming interrupted downloads; 'all' fetches every data set
  check    read all files and verify checksums, formats and counts

The data are in --data-dir, in the folder of the environment variable {VARIABLE}, or in the user's cache.

The data sets are {", ".join(CATALOGUE)}."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=tuple(ACTIONS), help="what to do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets (default: all; required for fetch)")
    parser.add_argument("--data-dir", metavar="DIR", help="the folder with data")


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0; 1 if a data set cannot be fetched or is broken; 2 if the arguments are invalid; 130 after an
        interrupt, as is the custom.
    """
    try:
        root = data_dir(options.data_dir)
        chosen = _chosen(options.action, options.names)
    except (ValueError, NotADirectoryError) as error:
        print(f"seminode data: {str(error).replace('data_dir:', '--data-dir:')}", file=sys.stderr)
        return 2
    print(f"data in {root}")
    try:
        return ACTIONS[options.action](chosen, root, bool(options.names))
    except KeyboardInterrupt:
        print("seminode data: interrupted; the same fetch resumes the download", file=sys.stderr)
        return 130


def _chosen(action: str, names: Sequence[str]) -> list[DataSet]:
    if action == "fetch" and not names:
        sizes = (f"{each.name} ({size_text(each.download_size)})" for each in CATALOGUE.values() if each.download_size)
        raise ValueError(f"fetch: expected names of data sets or all; the downloads are {', '.join(sizes)}")
    if not names or list(names) == ["all"]:
        return list(CATALOGUE.values())
    return list(dict.fromkeys(by_name(name) for name in names))


def _status(chosen: Sequence[DataSet], root: Path, named: bool) -> int:
    for each in chosen:
        _attempt(each, lambda each=each: _show(each, each.status(root)))
    return 0


def _fetch(chosen: Sequence[DataSet], root: Path, named: bool) -> int:
    """Fetch all data sets, even if some fail."""
    done = [_attempt(each, lambda each=each: _fetched(each, root)) for each in chosen]
    return 0 if all(done) else 1


def _fetched(each: DataSet, root: Path) -> None:
    each.fetch(root)
    _show(each, each.status(root))


def _check(chosen: Sequence[DataSet], root: Path, named: bool) -> int:
    """Check data sets. An absent one is an error only if it was named."""
    accepted = ("complete",) if named else ("complete", "absent")
    good = []

    def look(each: DataSet) -> None:
        status = each.check(root)
        _show(each, status)
        good.append(status.state in accepted)

    done = [_attempt(each, lambda each=each: look(each)) for each in chosen]
    return 0 if all(done) and all(good) else 1


ACTIONS = {"status": _status, "fetch": _fetch, "check": _check}


def _attempt(each: DataSet, action: Callable[[], None]) -> bool:
    try:
        action()
    except (DataError, ImportError, OSError) as error:
        print(f"seminode data: {each.name}: {str(error).removeprefix(f'{each.name}: ')}", file=sys.stderr)
        return False
    return True


def _show(each: DataSet, status: DataStatus) -> None:
    amount = f"{count_text(status.items, status.expected)} {each.unit}"
    size = f", {size_text(status.size)}" if status.size else ""
    print(f"\n{each.name:<16} {status.state}: {amount}{size}")
    origin = status.origin or each.origin
    rows = [("what", each.title), ("where", status.place), ("origin", origin), ("licence", each.licence)]
    if status.state == "absent" and each.download_size:
        rows.append(("fetch", f"seminode data fetch {each.name} ({size_text(each.download_size)})"))
    rows.extend(("note", note) for note in status.notes)
    for name, value in rows:
        if value is not None:
            print(f"    {name:<8} {value}")
