"""A multiprocessing.Pool and subprocesses beside a loader take nothing from it, and wait for nothing of it."""

import multiprocessing
import subprocess

import fastload


def square(number):
    return number * number


if __name__ == "__main__":
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for step, (images, labels) in enumerate(loader):
                assert images[:, 0, 0, 0].tolist() == list(range(24 * step, 24 * step + 24, 6))
                assert pool.map(square, range(step)) == [number * number for number in range(step)]
                if step == 5:
                    done = subprocess.run(
                        ["sh", "-c", "ls /proc/self/fd | wc -l"], capture_output=True, text=True
                    )
                    assert int(done.stdout) <= 5
        pool.join()
    loader.close()
