"""One script for machines with and without a GPU: batches that are on the device when the loop asks for them.

    python examples/prefetch.py [PHOTOS]

Claim: a loader with device=, and a prefetcher around any other, give the batches of the plain loader, in its
order, on the device.
"""

import albumentations as A
import torch
from pictures import SIZE, photo_folder

import fastload


def make_loader(dataset: fastload.CachedDataset, device: str | None = None) -> fastload.DataLoader:
    """A loader that draws the same order and the same crops as any other one made here."""
    return fastload.DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(0),
        memory_format=torch.channels_last,
        device=device,  # with device_transform=fastload.Normalize(...) the pixels become floats over there
    )


def main() -> None:
    with photo_folder() as folder:
        transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])
        photos = fastload.ImageFolder(folder, size=SIZE)
        dataset = fastload.CachedDataset(photos, transform=transform, cache="ram")

        # "auto" takes CUDA if there is any, else the CPU. Two batches are copied ahead on a side stream, from
        # the memory that the workers wrote them to: no pin_memory=True, no .to() in the loop.
        loader = make_loader(dataset, device="auto")
        # The same around any iterable of batches, torch's own loader too, and for another depth.
        prefetcher = fastload.CUDAPrefetcher(make_loader(dataset), device="auto", depth=3)

        batches = 0
        for plain, delivered, fetched in zip(make_loader(dataset), loader, prefetcher, strict=True):
            for images, labels in (delivered, fetched):
                if images.device != prefetcher.device or labels.device != prefetcher.device:
                    raise SystemExit(f"batch {batches} is on {images.device}, not on {prefetcher.device}")
                if not images.is_contiguous(memory_format=torch.channels_last):
                    raise SystemExit(f"batch {batches} lost its channels-last strides: {images.stride()}")
                # Only this check brings batches back; in your loop, .cpu() and .item() make the host wait.
                if not torch.equal(images.cpu(), plain[0]) or not torch.equal(labels.cpu(), plain[1]):
                    raise SystemExit(f"batch {batches} is not the plain loader's")
            batches += 1

        name = torch.cuda.get_device_name(prefetcher.device) if prefetcher.device.type == "cuda" else "no GPU"
        print(f"{batches} batches on {prefetcher.device} ({name}) are those of the plain loader")


if __name__ == "__main__":
    main()
