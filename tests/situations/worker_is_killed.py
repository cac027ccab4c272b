"""A worker that the kernel kills is an error that names the batch, or is replaced without a lost sample."""

import logging
import os
import signal

import fastload


class Deadly:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 13 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


logging.disable()
loader = fastload.DataLoader(Deadly(), batch_size=4, num_workers=2)
try:
    list(loader)
except fastload.errors.WorkerDiedError as error:
    assert "SIGKILL" in str(error)
    assert "13" in str(error)
assert len(list(loader)) == 10
os.unlink("killed")
loader = fastload.DataLoader(Deadly(), batch_size=4, num_workers=2, max_worker_restarts=1)
assert [index for batch in loader for index in batch.tolist()] == list(range(40))
