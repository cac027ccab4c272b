"""A build that was stopped by Ctrl-C, or killed, leaves no file at its path, and the same call then completes it."""

import os
import signal

import fastload


class Photos:
    def __init__(self, folder, signal_number):
        self.folder, self.signal_number = folder, signal_number

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 30 and self.signal_number:
            os.kill(os.getpid(), self.signal_number)
        return self.folder[index]


signal.signal(signal.SIGINT, signal.default_int_handler)
photos = fastload.ImageFolder("photos")
for number in (signal.SIGINT, signal.SIGKILL, 0):
    child = os.fork()
    if child == 0:
        try:
            fastload.CachedDataset.build(Photos(photos, number), "photos.lmdb", num_workers=0, progress=False)
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -9, 0: 0}[number]
    assert os.path.exists("photos.lmdb") == (number == 0)
dataset = fastload.CachedDataset.from_cache("photos.lmdb")
assert [int(dataset[index][0][0, 0, 0]) for index in range(40)] == list(range(0, 240, 6))
