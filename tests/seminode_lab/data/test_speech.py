"""Speech Commands: which clips, in which order, with which labels, split how; and what is said of what is missing."""

from __future__ import annotations

import hashlib
import os
import tarfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import wav
from file_server import serving
from safetensors.torch import load_file
from sklearn.model_selection import train_test_split

from seminode_lab.data import MFCC, CacheWarning, DataError, IncompleteDataWarning, MissingData, Speech, speech_commands
from seminode_lab.data import speech as speaking
from seminode_lab.data.download import Resource
from seminode_lab.data.releases import V1, V2, WORDS, Release, clips_in, release_in
from seminode_lab.data.speech import PLACES, SpeechCommands, official_split, published_split
from seminode_lab.data.tensors import load_tensors
from seminode_lab.models.paper import speech_commands_cde

CLIPS = 8  # of a word, and one that is too short


def sound(word: str, k: int, length: int = 16_000) -> np.ndarray:
    rng = np.random.default_rng([WORDS.index(word), k])
    return rng.integers(-3000, 3000, length)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few clips in the official layout."""
    monkeypatch.delenv("SEMINODE_DATA", raising=False)
    folder = tmp_path / "data" / "speech_commands"
    lists: tuple[list[str], list[str]] = ([], [])
    # Written in another order than they are to be read.
    for word in reversed((*WORDS, "marvin")):
        (folder / word).mkdir(parents=True)
        for k in reversed(range(CLIPS)):
            if word != "marvin":
                wav(folder / word / f"{k:x}_nohash_0.wav", sound(word, k))
            if k % 4:
                lists[k % 2].append(f"{word}/{k:x}_nohash_0.wav")
        wav(folder / word / "short.wav", np.zeros(15_999))
        (folder / word / "notes.txt").write_text("no sound")
        (folder / word / "._0_nohash_0.wav").write_text("no sound either")
    for name, names in zip(("validation_list.txt", "testing_list.txt"), lists, strict=True):
        (folder / name).write_text("\n".join(names) + "\n")
    return tmp_path / "data"


def quiet(root: Path, **options: Any) -> Speech:
    with pytest.warns(IncompleteDataWarning):
        return speech_commands(root, **options)


def test_labels_are_in_the_published_order() -> None:
    assert WORDS == ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")


def test_releases() -> None:
    assert (V2.total, V2.kept, V1.total, V1.kept) == (38_546, 34_975, 23_682, 21_312)


def test_clips_come_word_by_word_and_then_by_name(root: Path) -> None:
    clips = clips_in(root / "speech_commands")
    assert [clip.word for clip in clips] == [word for word in WORDS for _ in range(CLIPS + 1)]
    assert [clip.path.name for clip in clips[:2]] == ["0_nohash_0.wav", "1_nohash_0.wav"]
    assert [clip.label for clip in clips[:: CLIPS + 1]] == list(range(10))


def test_the_published_split_is_that_of_the_published_sizes() -> None:
    counts = torch.tensor(V2.clips) * V2.kept // V2.total
    counts[0] += V2.kept - int(counts.sum())
    labels = torch.arange(10).repeat_interleave(counts)
    parts = published_split(labels)
    assert [len(part) for part in parts] == [24_482, 5_246, 5_247]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(V2.kept))
    for part, share in zip(parts, (0.7, 0.15, 0.15), strict=True):
        torch.testing.assert_close(labels[part].bincount() / counts, torch.full((10,), share), atol=1e-3, rtol=0.0)


def numbers(keys: Any) -> list[int]:
    return [WORDS.index(word) for word, _ in keys]


def test_series_labels_and_split(root: Path) -> None:
    found = quiet(root, normalise=False)
    features = {
        (word, k): MFCC()(torch.from_numpy(sound(word, k)).double() / 2**15).float()
        for word in WORDS
        for k in range(CLIPS)
    }
    keys = list(features)
    # As it was published: on the series themselves, stratified by the numbers of the words.
    train, rest = train_test_split(keys, train_size=0.7, random_state=0, stratify=numbers(keys))
    validation, test = train_test_split(rest, train_size=0.5, random_state=1, stratify=numbers(rest))
    for part, expected in zip(found, (train, validation, test), strict=True):
        assert part.labels.tolist() == numbers(expected)
        torch.testing.assert_close(part.x, torch.stack([features[word, k] for word, k in expected]))
        assert part.lengths.tolist() == [161] * len(expected)
    assert [len(part) for part in found] == [56, 12, 12]
    assert found.train.x.shape[1:] == (161, 20)


def test_channels_are_normalised_by_the_training_series(root: Path) -> None:
    raw, found = quiet(root, normalise=False), quiet(root)
    values = raw.train.x.double().reshape(-1, 20)
    mean, std = values.mean(0), values.std(0, correction=1)
    for before, after in zip(raw, found, strict=True):
        expected = (before.x.double() - mean) / (std + 1e-5)
        torch.testing.assert_close(after.x.double(), expected, atol=1e-4, rtol=1e-4)


def test_the_published_model_takes_them(root: Path) -> None:
    train, _, _ = quiet(root)
    model = speech_commands_cde()
    control = model.control(train.x[:2])
    assert control.evaluate(torch.tensor(160.0))[:, 0].tolist() == [160.0, 160.0]  # raw time is channel 0
    assert control.evaluate(torch.tensor(0.0)).shape == (2, 21)


def test_the_official_split_follows_the_lists(root: Path) -> None:
    found = quiet(root, split="official")
    assert [len(part) for part in found] == [20, 20, 40]
    with pytest.raises(ValueError, match="split: expected one of 'published', 'official', found 'random'"):
        speech_commands(root, split="random")  # type: ignore[arg-type]
    (root / "speech_commands" / "testing_list.txt").unlink()
    with pytest.warns(IncompleteDataWarning), pytest.raises(DataError, match=r"testing_list\.txt: does not exist"):
        speech_commands(root, split="official")


def test_lists_without_clips_are_refused(root: Path) -> None:
    with pytest.raises(DataError, match="expected clips for training, validation and testing, found 1, 0 and 0"):
        official_split(["yes/new.wav"], root / "speech_commands")


def test_the_warning_says_what_is_missing(root: Path) -> None:
    with pytest.warns(
        IncompleteDataWarning,
        match=r"speech_commands' is incomplete: 90 of 38,546 clips of v0\.02 \(yes 9 of 4,044, no 9 of 3,941.*\), "
        "80 of 34,975 clips with exactly 16,000 samples",
    ) as caught:
        speech_commands(root)
    assert caught[0].filename == __file__


def test_a_complete_set_is_taken_without_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Release("v0.02", (CLIPS + 1,) * 10, 10 * CLIPS, (20, 40))
    monkeypatch.setattr(speaking, "release_in", lambda folder: whole)
    assert len(speech_commands(root).train) == 56
    assert SpeechCommands().status(root).state == "complete"
    assert SpeechCommands().check(root).state == "complete"


def test_the_release_is_told_by_the_lists(root: Path) -> None:
    folder = root / "speech_commands"
    assert release_in(folder) is V2
    assert SpeechCommands().status(root).notes[0] == "taken for v0.02; its lists match no known release"
    for name, count in zip(("validation_list.txt", "testing_list.txt"), V1.listed, strict=True):
        (folder / name).write_text("".join(f"yes/{k}.wav\nbed/{k}.wav\n" for k in range(count)))
    assert release_in(folder) is V1
    assert SpeechCommands().status(root).notes[0] == "release v0.01"


def test_where_it_is_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(quiet(root / "speech_commands").test) == 12
    monkeypatch.setenv("SEMINODE_DATA", str(root))
    with pytest.warns(IncompleteDataWarning):
        assert len(speech_commands().test) == 12
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        MissingData, match=r"speech_commands: expected 'yes' in one of .* seminode data fetch"
    ) as caught:
        speech_commands(tmp_path / "empty")
    assert all(repr(place) in str(caught.value) for place in PLACES)


def test_too_few_clips_to_split(root: Path) -> None:
    for k in range(1, CLIPS):
        (root / "speech_commands" / "go" / f"{k:x}_nohash_0.wav").unlink()
    with (
        pytest.warns(IncompleteDataWarning),
        pytest.raises(DataError, match=r"too few clips of a word to be split.*'go': 1"),
    ):
        speech_commands(root)


def test_a_broken_clip_is_named(root: Path) -> None:
    path = root / "speech_commands" / "up" / "3_nohash_0.wav"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(
        DataError, match=r"up.3_nohash_0\.wav: truncated: expected 16,000 samples from its header, found 15,500"
    ):
        speech_commands(root)
    assert not (root / "features").exists()
    status = SpeechCommands().check(root)
    assert status.state == "broken"
    assert "3_nohash_0.wav: truncated" in status.notes[-1]


def test_it_is_fetched_and_unpacked(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "speech.tar.gz", "w:gz") as tar:
        tar.add(root / "speech_commands", ".")
    content = (tmp_path / "speech.tar.gz").read_bytes()
    checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with serving() as server:
        server.files["speech"] = content
        archive = Resource((server.address("speech"),), "speech_commands_v0.02.tar.gz", checksum, len(content))
        monkeypatch.setattr(speaking, "ARCHIVE", archive)
        # What is there of another release, or of a part of one, stays, and the new one goes first.
        SpeechCommands().fetch(root)
        assert sorted(path.name for path in root.iterdir()) == ["speech_commands", "speech_commands_v0.02"]
        status = SpeechCommands().check(root)
        assert (status.place, status.items) == (root / "speech_commands_v0.02", 90)
        assert status.state == "incomplete"
        assert len(quiet(root).train) == 56
        (root / "speech_commands_v0.02" / "yes" / "notes.txt").write_text("another")
        status = SpeechCommands().check(root)
        assert (status.state, status.notes[-1]) == ("broken", "yes/notes.txt has changed since it was unpacked")
        with pytest.raises(DataError, match=r"speech_commands_v0\.02: is incomplete and is not overwritten"):
            SpeechCommands().fetch(root)
        assert len(server.requests) == 1


# The cache.


def cache(root: Path) -> Path:
    (path,) = (root / "features").iterdir()
    return path


def test_features_are_computed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quiet(root)
    assert set(load_file(cache(root))) == {"x", "labels", "rows"}
    monkeypatch.setattr(speaking, "read_wav", None)
    second = quiet(root)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.labels, other.labels)


def test_features_follow_the_clips(root: Path) -> None:
    before = quiet(root, normalise=False)
    path = root / "speech_commands" / "yes" / "0_nohash_0.wav"
    with wave.open(str(path), "rb") as file:
        content = file.readframes(16_000)
    wav(path, np.frombuffer(content, "<i2")[::-1])
    os.utime(path, ns=(1, 1))
    after = quiet(root, normalise=False)
    changed = [int((one.x != other.x).flatten(1).any(1).sum()) for one, other in zip(before, after, strict=True)]
    assert sum(changed) == 1
    path.unlink()
    assert sum(map(len, quiet(root))) == 79
    assert cache(root).is_file()


def test_features_follow_the_transform(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(root)
    monkeypatch.setattr(speaking, "MFCC", lambda: MFCC(coefficients=13))
    assert quiet(root).train.channels == 13


def test_a_spoilt_cache_is_made_again(root: Path) -> None:
    first = quiet(root)
    path = cache(root)
    content = path.read_bytes()
    for spoilt in (b"", b"x" * 100, content[: len(content) // 2]):
        path.write_bytes(spoilt)
        assert torch.equal(quiet(root).train.x, first.train.x)
        # The order of the entries of the header is not fixed; the digest proves the content.
        assert load_tensors(path).proven
        assert sorted(path.read_bytes()) == sorted(content)


def test_a_cache_that_cannot_be_written_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "features").write_text("in the way")
    with pytest.warns(CacheWarning, match="could not be saved"), pytest.warns(IncompleteDataWarning):
        assert len(speech_commands(root).train) == 56


@pytest.mark.skipif("SEMINODE_DATA" not in os.environ, reason="SEMINODE_DATA names no folder with data")
@pytest.mark.filterwarnings("ignore::seminode_lab.data.IncompleteDataWarning")
def test_real_clips() -> None:
    try:
        found = speech_commands()
    except MissingData as error:
        pytest.skip(str(error))
    assert found.train.x.shape[1:] == (161, 20)
    assert bool(found.train.x.isfinite().all())
    total = sum(map(len, found))
    assert [len(part) / total for part in found] == pytest.approx([0.7, 0.15, 0.15], abs=1e-3)
    assert found.train.x.mean((0, 1)).abs().max() < 1e-4
