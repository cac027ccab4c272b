"""Coroutines that read two loaders through asyncio.to_thread, one of them cancelled, get their batches."""

import asyncio

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))


async def read(num_workers):
    iterator = iter(fastload.DataLoader(dataset, batch_size=10, num_workers=num_workers))
    values = []
    while (batch := await asyncio.to_thread(next, iterator, None)) is not None:
        values.append(batch[0][0, 0, 0, 0].item())
    return values


async def main():
    cancelled = asyncio.create_task(read(1))
    results = await asyncio.gather(read(0), read(2))
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    return results


for _ in range(2):
    assert asyncio.run(main()) == [[0, 60, 120, 180]] * 2
