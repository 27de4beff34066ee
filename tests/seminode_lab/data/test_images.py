"""Images and pendulums: the official files, read as they are; what is missing or wrong is said."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import Malicious, idx
from file_server import serving

from seminode_lab.data import (
    DataError,
    Images,
    IncompleteDataWarning,
    MissingData,
    cifar,
    cifar10,
    digits,
    mnist,
    pendulum,
)
from seminode_lab.data.cifar import BATCHES, CIFAR10
from seminode_lab.data.download import Resource
from seminode_lab.data.images import ImageSet
from seminode_lab.data.mnist import FILES, MNIST
from seminode_lab.data.pendulum import Pendulum
from seminode_lab.models import pendulum as simulator
from seminode_lab.models.paper import mnist_flow

RNG = np.random.default_rng(0)
needs_data = pytest.mark.skipif("SEMINODE_DATA" not in os.environ, reason="SEMINODE_DATA names no folder with data")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real" not in request.node.name:
        monkeypatch.delenv("SEMINODE_DATA", raising=False)


def module(name: str) -> Any:
    """The module, where the package has a function of the same name."""
    return importlib.import_module(f"seminode_lab.data.{name}")


# MNIST.

DIGITS = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": np.array([5, 0, 4, 1, 9], dtype=np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": np.array([7, 2, 1], dtype=np.uint8),
}


def write_mnist(folder: Path, compress: bool = True, **changes: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in DIGITS.items():
        content = idx(changes.get(name.partition("-idx")[0].replace("-", "_"), array))
        (folder / f"{name}.gz" if compress else folder / name).write_bytes(
            gzip.compress(content) if compress else content
        )


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("compress", [True, False])
def test_mnist_is_read_as_it_is(place: str, compress: bool, tmp_path: Path) -> None:
    write_mnist(tmp_path / place, compress)
    with pytest.warns(IncompleteDataWarning, match=r"mnist: .* is incomplete: \d of .*,000 images"):
        train, test = mnist(tmp_path)
    assert train.x.dtype == torch.uint8
    assert train.shape == (1, 28, 28)
    assert torch.equal(train.x[:, 0], torch.from_numpy(DIGITS["train-images-idx3-ubyte"]))
    assert train.labels.tolist() == [5, 0, 4, 1, 9]
    assert torch.equal(test.x[:, 0], torch.from_numpy(DIGITS["t10k-images-idx3-ubyte"]))
    assert mnist_flow(8).bits_per_dim(test.x[:1]).shape == (1,)


def test_a_missing_file_of_mnist(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"mnist: expected 'train-images-idx3-ubyte.gz' in one of .*fetch mnist"):
        mnist(tmp_path)
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.warns(IncompleteDataWarning), pytest.raises(MissingData, match="expected t10k-labels-idx1-ubyte"):
        mnist(tmp_path)
    status = MNIST().status(tmp_path)
    assert (status.state, status.notes) == ("incomplete", ("missing: t10k-labels-idx1-ubyte.gz",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": np.zeros((5, 28), np.uint8)}, r"expected the shape \(images, 28, 28\), found \(5, 28\)"),
        ({"train_labels": np.zeros(4, np.uint8)}, r"expected the shape \(5,\), found \(4,\)"),
        ({"train_labels": np.full(5, 10, np.uint8)}, "expected labels from 0 to 9, found 10"),
    ],
)
def test_what_is_not_mnist_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        mnist(tmp_path)


def test_sums_of_mnist_are_checked(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert MNIST().status(tmp_path).state == "complete"  # from names alone
    status = MNIST().check(tmp_path)
    assert status.state == "broken"
    assert len(status.notes) == 4
    assert "expected md5 f68b3c2dcbeaaa9fbdd348bbdeb94873, found" in status.notes[0]


def test_mnist_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        resources = []
        for name in FILES:
            content = gzip.compress(idx(DIGITS[name.removesuffix(".gz")]))
            server.files[name] = content
            md5 = hashlib.md5(content).hexdigest()
            resources.append(Resource((server.address(name),), name, f"md5:{md5}", len(content)))
        monkeypatch.setattr(module("mnist"), "RESOURCES", tuple(resources))
        MNIST().fetch(tmp_path)
        assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(FILES)
        MNIST().fetch(tmp_path)
        assert len(server.requests) == 4


@needs_data
def test_real_mnist() -> None:
    try:
        train, test = mnist()
    except MissingData as error:
        pytest.skip(str(error))
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert float(train.x.double().mean()) == pytest.approx(33.318421, abs=1e-6)


# CIFAR-10.


def batch(images: int = 4, **changes: Any) -> dict[Any, Any]:
    data = RNG.integers(0, 256, (images, 3072), dtype=np.uint8)
    return {b"data": data, b"labels": [k % 10 for k in range(images)], b"batch_label": b"one", **changes}


def write_cifar(folder: Path, **batches: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {name: batches.get(name, batch()) for name in BATCHES}
    for name, content in written.items():
        (folder / name).write_bytes(pickle.dumps(content, 2))
    return written


@pytest.mark.parametrize("place", ["cifar-10-batches-py", "."])
def test_cifar_is_read_as_it_is(place: str, tmp_path: Path) -> None:
    written = write_cifar(tmp_path / place)
    message = r"cifar10: .* is incomplete: 24 of 60,000 images \(not the published images: data_batch_1"
    with pytest.warns(IncompleteDataWarning, match=message):
        train, test = cifar10(tmp_path)
    assert (len(train), len(test), train.shape) == (20, 4, (3, 32, 32))
    second = torch.from_numpy(written["data_batch_2"][b"data"]).reshape(4, 3, 32, 32)
    assert torch.equal(train.x[4:8], second)
    assert test.labels.tolist() == [0, 1, 2, 3]


def test_a_missing_batch(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="cifar10: expected 'data_batch_1' in one of"):
        cifar10(tmp_path)
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3").unlink()
    with pytest.warns(
        IncompleteDataWarning, match=r"20 of 60,000 images \(data_batch_3 missing; not the published images"
    ):
        cifar10(tmp_path)
    status = CIFAR10().status(tmp_path)
    assert (status.state, status.items, status.notes) == ("incomplete", 50_000, ("missing: data_batch_3",))
    (tmp_path / "test_batch").unlink()
    with pytest.raises(MissingData, match="expected test_batch in"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a dict with data and labels, found list"),
        ({b"data": RNG.integers(0, 9, (2, 3072), dtype=np.uint8)}, "expected an entry 'labels', found b'data'"),
        (
            batch() | {b"data": np.zeros((4, 30), np.uint8)},
            r"data: expected the shape \(images, 3072\), found \(4, 30\)",
        ),
        (batch() | {b"labels": [0, 1, 2]}, "labels: expected one for each of 4 images, found 3"),
        (batch() | {b"labels": [0, 1, 2, 10]}, "labels: expected a list of numbers from 0 to 9"),
        (batch() | {b"labels": Malicious(os.system, "true")}, "not to be trusted .refused 'posix.system'"),
    ],
)
def test_what_is_not_cifar_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    write_cifar(tmp_path, data_batch_1=content)
    with pytest.raises(DataError, match=f"data_batch_1: .*{message}|data_batch_1: {message}"):
        cifar10(tmp_path)
    status = CIFAR10().check(tmp_path)
    assert status.state == "broken"
    assert "data_batch_1" in status.notes[0]


def test_batches_pickled_otherwise_are_known_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_cifar(tmp_path)
    sums = {
        name: hashlib.sha256(content[b"data"].tobytes() + bytes(content[b"labels"])).hexdigest()
        for name, content in written.items()
    }
    monkeypatch.setattr(cifar, "CONTENTS", sums)
    status = CIFAR10().check(tmp_path)
    assert status.state == "complete"
    assert "the same images and labels: data_batch_1" in status.notes[0]
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch()))
    assert CIFAR10().check(tmp_path).state == "broken"


def test_cifar_is_fetched_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "there" / "cifar-10-batches-py")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "there" / "cifar-10-batches-py", "cifar-10-batches-py")
    content = (tmp_path / "a.tar.gz").read_bytes()
    with serving() as server:
        server.files["cifar"] = content
        md5 = hashlib.md5(content).hexdigest()
        archive = Resource((server.address("cifar"),), "cifar-10-python.tar.gz", f"md5:{md5}", len(content))
        monkeypatch.setattr(cifar, "ARCHIVE", archive)
        root = tmp_path / "here"
        CIFAR10().fetch(root)
        # The archive goes, unless it was complete before.
        assert [path.name for path in root.iterdir()] == ["cifar-10-batches-py"]
        CIFAR10().fetch(root)
        assert len(server.requests) == 1
        other = tmp_path / "other"
        other.mkdir()
        (other / "cifar-10-python.tar.gz").write_bytes(content)
        CIFAR10().fetch(other)
        assert len(server.requests) == 1
        assert (other / "cifar-10-python.tar.gz").exists()
        # What is incomplete is not overwritten.
        (root / "cifar-10-batches-py" / "test_batch").unlink()
        with pytest.raises(DataError, match="exists already and is not overwritten"):
            CIFAR10().fetch(root)


@needs_data
def test_real_cifar() -> None:
    try:
        train, test = cifar10()
    except MissingData as error:
        pytest.skip(str(error))
    assert (len(train), len(test)) == (50_000, 10_000)
    assert train.labels.bincount().tolist() == [5000] * 10
    mean = train.x.double().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


# Digits and the pendulum.


def test_digits() -> None:
    found = digits()
    assert isinstance(found, Images)
    train, test = found
    assert (len(train), len(test), train.shape, train.levels) == (1437, 360, (1, 8, 8), 17)
    assert int(train.x.max()) == 16
    assert train.x.dtype == torch.uint8
    assert int(test.labels.bincount().min()) == 35
    assert torch.equal(digits().test.x, test.x)


def test_images_and_labels_are_of_one_number() -> None:
    with pytest.raises(DataError, match="labels: expected one for each of 2 images, found 3"):
        ImageSet(torch.zeros(2, 1, 8, 8), torch.zeros(3))


def test_the_pendulum_is_simulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = simulator.trajectories(trials=7)
    calls = []

    def trajectories(trials: int = 7) -> torch.Tensor:
        calls.append(trials)
        return few[:, :trials]

    monkeypatch.setattr(simulator, "trajectories", trajectories)
    monkeypatch.setattr(simulator, "TRIALS", 7)
    assert Pendulum().status(tmp_path).state == "absent"
    first, second = pendulum(tmp_path), pendulum(tmp_path, dtype=torch.float64)
    assert calls == [7]
    assert [tuple(part.shape) for part in first] == [(9 * 25 * n, 8, 8) for n in (4, 1, 2)]
    assert second.train.dtype == torch.float64
    expected = torch.tensor([0.26318896, 0.76338982, 0.9647443, -0.64593807, 1.75493334, 0.63661934, 0.0, 0.0])
    torch.testing.assert_close(first.train[0, 0], expected, atol=1e-6, rtol=0.0)
    assert Pendulum().check(tmp_path).state == "complete"
    few[0, 0, 0, 0] += 1
    assert Pendulum().check(tmp_path).state == "broken"
