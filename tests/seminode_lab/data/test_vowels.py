"""The shipped series are those of the archive."""

from __future__ import annotations

import torch

from seminode_lab.data import japanese_vowels


def test_sizes_lengths_and_speakers() -> None:
    train, test = japanese_vowels()
    assert (len(train), len(test), train.channels, train.classes) == (270, 370, 12, 9)
    assert (int(train.lengths.min()), int(train.lengths.max())) == (7, 26)
    assert (int(test.lengths.min()), int(test.lengths.max())) == (7, 29)
    assert (int(train.lengths.sum()), int(test.lengths.sum())) == (4274, 5687)
    assert train.labels.bincount().tolist() == [30] * 9
    assert test.labels.bincount().tolist() == [31, 35, 88, 44, 29, 24, 40, 50, 29]


def test_values_are_those_of_the_archive() -> None:
    train, test = japanese_vowels(torch.float64)
    assert train.x[0, :3, 0].tolist() == [1.860936, 1.891651, 1.939205]
    assert train.x[0, :3, 1].tolist() == [-0.207383, -0.193249, -0.239664]
    both = torch.cat([train.x.flatten(), test.x.flatten()])
    assert float(both.nan_to_num().min()) == -1.852765
    assert float(both.nan_to_num().max()) == 2.203141


def test_padding_is_missing_and_statistics_are_of_the_rest() -> None:
    train, _ = japanese_vowels(torch.float64)
    inside = torch.arange(train.x.shape[1]) < train.lengths[:, None]
    assert torch.equal(train.x.isnan().any(-1), ~inside)
    x = train.normalised(*train.statistics()).x[inside]
    torch.testing.assert_close(x.mean(0), torch.zeros(12, dtype=torch.float64), atol=1e-12, rtol=0.0)
    torch.testing.assert_close(x.std(0), torch.ones(12, dtype=torch.float64), atol=1e-3, rtol=0.0)
