"""`fastload.profile`: records loaders in a block, and reports."""

from __future__ import annotations

import functools
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader as torch_loader

from fastload.profiling.recorder import Recorder
from fastload.profiling.recording import read_recordings
from fastload.profiling.report import ProfileReport, report_of
from fastload.profiling.timeline import Machine, Timeline, timeline_of
from fastload.system.budget import available_bytes
from fastload.system.cpus import CpuTimes, busy_share, others_share, worthwhile_cpus

if TYPE_CHECKING:
    from typing import Self


class Profile:
    """The recording of loaders from `start()` to `stop()`, or in a with block; see `profile`."""

    def __init__(self, loaders: tuple[Any, ...]) -> None:
        self._loaders = loaders
        self._recorder: Recorder | None = None
        self._before: CpuTimes | None = None
        self._timelines: list[Timeline] = []

    def start(self) -> Self:
        """Begin to record.

        Raises:
            RuntimeError: Another profile is running in this process.
        """
        directory = tempfile.mkdtemp(prefix="fastload-profile-")
        recorder = Recorder(directory, self._loaders or None)
        try:
            recorder.start()
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._recorder = recorder
        self._before = CpuTimes.now()
        return self

    def stop(self) -> None:
        """Stop recording; a second call does nothing. Loaders in use continue, unrecorded."""
        recorder, self._recorder = self._recorder, None
        if recorder is None or self._before is None:
            return
        before, after = self._before, CpuTimes.now()
        machine = Machine(worthwhile_cpus(), busy_share(before, after), others_share(before, after))
        try:
            recorder.stop()
            try:
                self._read(recorder, machine)
            except Exception:  # a signal handler can raise here: torch's does when a worker dies
                self._read(recorder, machine)
                raise
        finally:
            shutil.rmtree(recorder.directory, ignore_errors=True)

    def _read(self, recorder: Recorder, machine: Machine) -> None:
        batches, events = read_recordings(recorder.directory)
        self._timelines = [timeline_of(record, batches, events, machine) for record in recorder.records]

    @functools.cached_property
    def _report(self) -> ProfileReport:
        return report_of(self._timelines, available_bytes())

    def report(self) -> ProfileReport:
        """What was measured.

        Raises:
            RuntimeError: The profile has not ended.
        """
        if self._recorder is not None:
            raise RuntimeError("the profile is still running: ask after its with block")
        return self._report

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def profile(*loaders: Any) -> Profile:
    """Measure how long training loops wait for data, where loading spends its time, and what would help.

    ```python
    with fastload.profile(loader) as profile:
        for images, labels in loader:
            train_step(images, labels)
    print(profile.report())
    ```

    Loaders of torch's class and of fastload's are recorded alike. Batches, their order and errors stay the
    same. Workers started before the block are not recorded; use it around `iter(loader)`.

    Args:
        loaders: The loaders to record; none: all loaders of this process.

    Returns:
        A context manager; `report()` is what was measured.

    Raises:
        TypeError: One of `loaders` is no DataLoader.
    """
    for loader in loaders:
        if not isinstance(loader, torch_loader.DataLoader):
            raise TypeError(f"profile() takes DataLoaders, but got {type(loader).__name__}")
    return Profile(loaders)
