"""All data sets by name."""

from __future__ import annotations

import difflib

from .base import DataSet
from .cifar import CIFAR10
from .digits import Digits
from .mnist import MNIST
from .pendulum import Pendulum
from .speech import SpeechCommands
from .vowels import JapaneseVowels

CATALOGUE: dict[str, DataSet] = {
    each.name: each for each in (SpeechCommands(), MNIST(), CIFAR10(), Pendulum(), Digits(), JapaneseVowels())
}


def by_name(name: str) -> DataSet:
    """The data set with a name, in upper or lower case and with - or _.

    >>> by_name("Speech-Commands").licence
    'CC BY 4.0'
    """
    found = CATALOGUE.get(name.lower().replace("-", "_"))
    if found is None:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), CATALOGUE, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"no data set is called {name!r}; expected some of {', '.join(CATALOGUE)}{hint}")
    return found
