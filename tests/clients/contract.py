"""The claims that hold for every client; a test class of a client inherits those that it supports.

A client's script trains with `in_rank.Model`, or notes its batches with `in_rank.record`.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, ClassVar

from tests.clients.harness import OURS, Run, Started, changed, run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Client:
    """What a client's class gives."""

    script: ClassVar[str]  # a program for torch's loader
    environment: ClassVar[str] = "shared"
    replacements: ClassVar[Mapping[str, str] | None] = None  # by a user of fastload; by default, the import
    ways: ClassVar[tuple[str, ...]] = OURS
    worker_numbers: ClassVar[tuple[int, ...]] = (0, 2)  # 0 in the first way alone
    num_ranks: ClassVar[tuple[int, ...]] = (1, 2)  # with which the script resumes

    def run(self, folder: Path, way: str, **options: Any) -> Run:
        """Run the script to its end."""
        options |= {"replacements": self.replacements, "environment": self.environment}
        return run(self.script, folder, way, **options)


class Batches(Client):
    def test_batches_are_torchs(self, way: str, num_workers: int, tmp_path: Path, torchs: Any) -> None:
        """One rank gets the same batches and lengths, in order, with the same random numbers in samples."""
        ours = self.run(tmp_path, way, num_workers=num_workers).check(way)

        assert ours.named() == torchs(self, num_workers=num_workers)
        assert ours.named() != [[]]


class Ranks(Client):
    def test_two_ranks_get_torchs_batches(self, way: str, tmp_path: Path, torchs: Any) -> None:
        """Each of two ranks gets the batches that it gets from torch's loader, and they differ."""
        ours = self.run(tmp_path, way, num_workers=2, ranks=2).check(way)

        assert ours.named() == torchs(self, num_workers=2, ranks=2)
        first, second = ours.named()
        assert first != second

    def test_a_broken_sample_ends_both_ranks(self, way: str, num_workers: int, tmp_path: Path) -> None:
        """One rank raises the sample's error; the other one ends as well, and nothing is left behind."""
        broken = {"CLIENT_BROKEN_SAMPLE": "13"}
        ended = self.run(tmp_path, way, num_workers=num_workers, ranks=2, settings=broken, limit_s=120)

        assert ended.left_behind == []
        assert all(rank.returncode != 0 for rank in ended.ranks)
        assert any("sample 13 is broken" in rank.output for rank in ended.ranks), ended.ranks

    def test_sigterm_ends_both_ranks(self, way: str, tmp_path: Path) -> None:
        """A signal to all ranks in mid-epoch ends them and their workers."""
        program, settings = changed(self.script, way, self.replacements), {"CLIENT_IS_ENDLESS": "1"}
        options: dict[str, Any] = {"environment": self.environment, "settings": settings}
        started = Started(program, tmp_path, ranks=2, num_workers=2, **options)
        started.signal_when_ready(signal.SIGTERM)
        ended = started.end(120)

        assert ended.left_behind == []
        assert all((tmp_path / f"ready-{number}").exists() for number in range(2)), ended.ranks


class Resume(Client):
    """The script stops in mid-epoch and saves its state if it is called with `stop`; `resume` goes on."""

    def test_resumes_in_mid_epoch(self, way: str, ranks: int, tmp_path: Path) -> None:
        """The batches before the stop and after it are those of a run that was not stopped."""
        options: dict[str, Any] = {"num_workers": 2, "ranks": ranks, "settings": {"CLIENT_IS_PLAIN": "1"}}
        whole, stopped, resumed = (
            self.run(tmp_path / what, way, arguments=(what, str(tmp_path / "state")), **options).check(way)
            for what in ("train", "stop", "resume")
        )

        for expected, before, after in zip(whole.ranks, stopped.ranks, resumed.ranks, strict=True):
            assert before.got("train")
            assert after.got("train")
            assert before.got("train") + after.got("train") == expected.got("train")
