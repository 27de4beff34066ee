"""Run folders: never half-written, never by two, and read without running anything."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from seminode_lab import store
from seminode_lab.store import Checkpoint, Finished, OldCheckpoint, Run, StoreError, runs

CONFIG = {"settings": {"experiment": "ncde", "rtol": 1e-3}, "seed": 0}


def checkpoint(epoch: int) -> Checkpoint:
    return Checkpoint(epoch, {"w": torch.full((3,), float(epoch))}, {"best": [1.0, epoch]})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        assert run.checkpoint() is None
        run.evaluated([{"epoch": 0, "loss": 2.5}], {"accepted": np.array([0.5, 1.0])})
        run.save(checkpoint(0))
        run.finish({"accuracy": 0.5})
        found = run.checkpoint()
    assert found is not None
    assert (found.epoch, found.rest) == (0, {"best": [1.0, 0]})
    torch.testing.assert_close(found.tensors["w"], torch.zeros(3))
    loaded = Finished.load(tmp_path / "a")
    assert loaded.settings == CONFIG["settings"]
    assert loaded.metrics == [{"epoch": 0, "loss": 2.5}]
    assert loaded.result == {"accuracy": 0.5}
    assert loaded.times(0)["accepted"].tolist() == [0.5, 1.0]
    assert loaded.times(10) == {}


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        run.save(checkpoint(10))
        for epochs in ((0,), (0, 10), (0, 10, 20)):
            run.evaluated([{"epoch": epoch} for epoch in epochs], {"accepted": np.zeros(1)})
    with Run(tmp_path / "a", CONFIG) as run:
        assert [each["epoch"] for each in run.rewind(10)] == [0, 10]
    found = Finished.load(tmp_path / "a")
    assert [each["epoch"] for each in found.metrics] == [0, 10]
    assert found.times(20) == {}
    assert found.times(10)


@contextmanager
def child(code: str) -> Iterator[Any]:
    """A Python process with pipes."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_another_run_does_not_get_the_folder(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG):
        pass
    other = {**CONFIG, "settings": {"experiment": "ncde", "rtol": 1e-4}}
    with pytest.raises(StoreError, match="holds another run: rtol differ"), Run(tmp_path / "a", other):
        pass
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == CONFIG


def test_two_processes_never_write_one_run(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from seminode_lab.store import Run, StoreError
        for _ in sys.stdin:
            try:
                with Run(Path({str(tmp_path / "a")!r}), {CONFIG!r}):
                    print("mine", flush=True)
            except StoreError as error:
                print(error, flush=True)
    """
    with child(code) as other:

        def attempt() -> str:
            other.stdin.write("once more\n")
            other.stdin.flush()
            return other.stdout.readline()

        with Run(tmp_path / "a", CONFIG):
            assert "another process works on this run" in attempt()
        assert attempt() == "mine\n"


def test_a_killed_process_leaves_a_whole_checkpoint_and_no_lock(tmp_path: Path) -> None:
    """One process imports PyTorch, and forks one that saves until it is killed for every line that it reads."""
    code = f"""
        import os, sys, torch
        from pathlib import Path
        from seminode_lab.store import Checkpoint, Run
        torch.set_num_threads(1)
        parent = os.getpid()
        def save():
            with Run(Path({str(tmp_path / "a")!r}), {CONFIG!r}) as run:
                epoch = 0
                while os.getppid() == parent:
                    run.save(Checkpoint(epoch, {{"w": torch.full((200_000,), float(epoch))}}, {{}}))
                    if epoch == 0:
                        print(os.getpid(), flush=True)
                    epoch += 1
        for _ in sys.stdin:
            pid = os.fork()
            if pid == 0:
                save()
                os._exit(1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    """
    with child(code) as parent:
        for pause in (0.0, 0.01, 0.05):
            parent.stdin.write("start\n")
            parent.stdin.flush()
            pid = int(parent.stdout.readline())
            time.sleep(pause)
            os.kill(pid, signal.SIGKILL)
            assert int(parent.stdout.readline()) == -signal.SIGKILL
            with Run(tmp_path / "a", CONFIG) as run:
                found = run.checkpoint()
            assert found is not None
            assert bool((found.tensors["w"] == found.epoch).all())


@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        run.save(checkpoint(0))
        run.evaluated([{"epoch": 0}])

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left on device; the old file is kept"):
            run.save(checkpoint(1)) if what == "checkpoint" else run.evaluated([{"epoch": 0}, {"epoch": 1}])
        monkeypatch.undo()
        found = run.checkpoint()
        assert found is not None
        assert found.epoch == 0
        assert len(Finished.load(run.path).metrics) == 1
        assert not list(run.path.glob(".*"))  # nothing half-written


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


@pytest.mark.parametrize("damage", [b"", b"no checkpoint at all", pickle.dumps(Malicious())])
def test_a_damaged_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    with Run(tmp_path / "a", CONFIG) as run:
        (run.path / store.CHECKPOINT).write_bytes(damage)
        with pytest.raises(StoreError, match=r"checkpoint.safetensors: the checkpoint is damaged"):
            run.checkpoint()
    assert not (tmp_path / "was-run").exists()


def test_a_cut_checkpoint_says_so(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        run.save(checkpoint(0))
        path = run.path / store.CHECKPOINT
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(StoreError, match="damaged"):
            run.checkpoint()


def test_a_flipped_bit_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        run.save(checkpoint(0))
        path = run.path / store.CHECKPOINT
        whole = bytearray(path.read_bytes())
        whole[-2] ^= 1
        path.write_bytes(whole)
        with pytest.raises(StoreError, match=r"damaged \(.*its content differs from its digest.*\)\. Delete it"):
            run.checkpoint()
        path.write_bytes(whole.replace(b"best", b"rest", 1))
        with pytest.raises(StoreError, match="its content differs from its digest"):
            run.checkpoint()


def test_an_old_checkpoint_without_a_digest_is_read_with_a_note(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        about = {"epoch": "3", "rest": json.dumps({"best": [1.0, 3]})}
        save_file({"w": torch.ones(2)}, run.path / store.CHECKPOINT, metadata=about)
        with pytest.warns(OldCheckpoint, match=r"checkpoint\.safetensors: an old checkpoint without a digest"):
            found = run.checkpoint()
    assert found is not None
    assert (found.epoch, found.rest, found.tensors["w"].tolist()) == (3, {"best": [1.0, 3]}, [1.0, 1.0])


def test_other_runs_are_not_touched_by_a_damaged_one(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with Run(tmp_path / name, CONFIG) as run:
            run.finish({"accuracy": 1.0})
    (tmp_path / "b" / "config.json").write_text("{")
    (tmp_path / "c" / "result.json").write_text("[]")
    told: list[str] = []
    assert [run.path.name for run in runs(tmp_path, lambda error: told.append(str(error)))] == ["a"]
    assert len(told) == 2
    assert "expected JSON" in told[0]
    assert "expected a dict, found a list" in told[1]


def test_who_would_wait_comes_after_the_one_who_is_at_it(tmp_path: Path) -> None:
    """As runs do that begin with what another makes."""
    order = []

    def second() -> None:
        with Run(tmp_path / "a", CONFIG, wait=True):
            order.append("second")

    other = threading.Thread(target=second)
    with Run(tmp_path / "a", CONFIG):
        other.start()
        time.sleep(0.3)
        order.append("first")
    other.join(10.0)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    "text", ["[{}]", "[1]", "[null]", '[{"epoch": "1"}]', '[{"epoch": NaN}]', '[{"epoch": 0}, []]']
)
def test_damaged_evaluations_say_so(tmp_path: Path, text: str) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        (run.path / store.METRICS).write_text(text)
        with pytest.raises(StoreError, match=r"metrics.json: \[[01]\]: expected an evaluation with its epoch; restore"):
            run.rewind(1)
    with pytest.raises(StoreError, match=r"metrics.json: \["):
        Finished.load(tmp_path / "a")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        run.evaluated([{"epoch": 0}, {"epoch": 2}], {"x": np.zeros(1)})
        (run.path / "times-mine.npz").touch()
        assert run.rewind(1) == [{"epoch": 0}]
        assert [path.name for path in run.path.glob("times-*.npz")] == ["times-mine.npz"]


def test_damaged_circumstances_say_so(tmp_path: Path) -> None:
    with Run(tmp_path / "a", CONFIG) as run:
        store.write_json(run.path / "config.json", {**CONFIG, "circumstances": []})
    with pytest.raises(StoreError, match=r"config.json: circumstances: expected a dict"):
        Finished.load(tmp_path / "a")
