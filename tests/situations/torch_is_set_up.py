"""Scripts that set torch's sharing strategy, start method, default dtype, threads or anomaly mode read as before."""

import resource

import torch
import torch.multiprocessing

import fastload

if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.multiprocessing.set_start_method("fork", force=True)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), lambda sample: (sample[0] / 2, 0.5))
    loader = fastload.DataLoader(dataset, batch_size=1, num_workers=2)
    kept = []
    with torch.no_grad():
        for images, halves in loader:
            kept.append(images)
            assert images.dtype == halves.dtype == torch.float64
    assert torch.cat(kept)[:, 0, 0, 0].tolist() == list(range(0, 120, 3))
    model = torch.nn.Linear(3, 1)
    model(kept[39][0]).sum().backward()
