"""Clients that take or build a loader: ignite, MONAI, skorch, fastai, torchmetrics, kornia, timm, PyG."""

from __future__ import annotations

from typing import ClassVar

from tests.clients import contract
from tests.clients.harness import IMPORT_OF_FASTLOAD


class TestIgnite(contract.Batches, contract.Ranks):
    script = """
import ignite.distributed as idist
from ignite.engine import Engine
from ignite.utils import manual_seed


def run(local_rank):
    manual_seed(1)
    loader = idist.auto_dataloader(Photos(), batch_size=2 * RANKS, shuffle=True, num_workers=NUM_WORKERS)
    record("number of batches", len(loader))
    model = idist.auto_model(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(engine, batch):
        images, labels = batch
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    Engine(step).run(loader, max_epochs=num_epochs(2))


with idist.Parallel(backend="gloo" if RANKS > 1 else None) as parallel:
    parallel.run(run)
"""
    replacements: ClassVar[dict[str, str]] = {
        "idist.auto_dataloader(Photos(), batch_size=2 * RANKS, shuffle=True, num_workers=NUM_WORKERS)": (
            "fastload.DataLoader(Photos(), batch_size=2, shuffle=sampler is None, sampler=sampler, "
            "num_workers=math.ceil(NUM_WORKERS / RANKS))"  # as auto_dataloader divides them
        ),
        "    manual_seed(1)\n": (
            "    import math\n"
            "    import fastload\n"
            "    manual_seed(1)\n"
            "    sampler = torch.utils.data.DistributedSampler(Photos()) if RANKS > 1 else None\n"
        ),
    }


class TestMonai(contract.Batches):
    script = """
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, EnsureTyped, RandFlipd, RandGaussianNoised
from monai.utils import set_determinism

set_determinism(1)
files = [{"image": sample(number)[0], "label": number} for number in range(24)]
augment = Compose([EnsureTyped("image"), RandFlipd("image", prob=0.5), RandGaussianNoised("image", prob=0.5)])
loader = DataLoader(Dataset(files, augment), batch_size=2, shuffle=True, num_workers=NUM_WORKERS)
record("number of batches", len(loader))
for epoch in range(2):
    for batch in loader:
        record("train", [batch["image"], batch["label"]])
        record("kind", type(batch["image"]).__name__)
"""
    ways = ("patch_torch",)


class TestMonaiWithALoaderOfFastload(contract.Batches):
    """Without workers, MONAI's loader seeds the transforms in its constructor; fastload's does not."""

    script = TestMonai.script
    ways = ("fastload",)
    worker_numbers = (2,)
    replacements: ClassVar[dict[str, str]] = {
        "from monai.data import DataLoader, Dataset": (
            "from fastload import DataLoader\n"
            "from monai.data import Dataset, list_data_collate\n"
            "from monai.data.utils import worker_init_fn\n"
        ),
        "num_workers=NUM_WORKERS)": (
            "num_workers=NUM_WORKERS, collate_fn=list_data_collate, worker_init_fn=worker_init_fn)"
        ),
    }


class TestSkorch(contract.Batches):
    script = """
from skorch import NeuralNetClassifier
from torch.utils.data import DataLoader

torch.manual_seed(1)
net = NeuralNetClassifier(
    Model,
    criterion=torch.nn.CrossEntropyLoss,
    max_epochs=2,
    batch_size=4,
    train_split=None,
    iterator_train=DataLoader,
    iterator_train__shuffle=True,
    iterator_train__num_workers=NUM_WORKERS,
    iterator_valid=DataLoader,
    verbose=0,
)
net.fit(Photos(), None)
net.predict_proba(Photos(7))
"""


class TestFastai(contract.Batches):
    script = """
from fastai.callback import progress
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch.utils.data import DataLoader

torch.manual_seed(1)
loaders = DataLoaders(
    DataLoader(Photos(), batch_size=4, shuffle=True, num_workers=NUM_WORKERS),
    DataLoader(Photos(7), batch_size=4, num_workers=NUM_WORKERS),
    device=torch.device("cpu"),
)
learner = Learner(loaders, Model(), loss_func=torch.nn.CrossEntropyLoss(), model_dir=".")
with learner.no_bar(), learner.no_logging():
    learner.fit(2, 0.05)
"""


class TestTorchmetricsAndKornia(contract.Batches):
    script = """
import kornia.augmentation as K
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

torch.manual_seed(1)
flip, turn = K.RandomHorizontalFlip(p=0.5), K.RandomAffine(30.0, p=0.5)
augment = K.AugmentationSequential(flip, turn, data_keys=["input"])
model, accuracy, mean = Model(), MulticlassAccuracy(NUM_SAMPLES), MeanMetric()
for images, labels in DataLoader(Photos(), batch_size=4, shuffle=True, num_workers=NUM_WORKERS):
    accuracy.update(model(augment(images)), labels)
    mean.update(images)
    record("metrics", [accuracy.compute(), mean.compute(), labels])
"""


class TestTimm(contract.Batches):
    script = """
import random
import numpy as np
from timm.data import ImageDataset, create_loader

folder = photos(40, 48)
for use_prefetcher, use_multi_epochs_loader in ((False, False), (True, False), (False, True)):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = create_loader(
        ImageDataset(str(folder)),
        (3, 32, 32),
        4,
        is_training=True,
        num_workers=NUM_WORKERS,
        use_prefetcher=use_prefetcher,
        use_multi_epochs_loader=use_multi_epochs_loader,
        persistent_workers=NUM_WORKERS > 0,
        device=torch.device("cpu"),
    )
    record("number of batches", len(loader))
    for epoch in range(2):
        for batch in loader:
            record("train", list(batch))
"""
    ways = ("patch_torch",)


class TestPyG(contract.Batches):
    script = """
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

graphs = []
for number in range(24):
    torch.manual_seed(number)
    nodes = 2 + number % 5
    edges = torch.randint(0, nodes, (2, 3 * nodes))
    graphs.append(Data(x=torch.rand(nodes, 4), edge_index=edges, y=torch.tensor([number])))
torch.manual_seed(1)
loader = DataLoader(graphs, batch_size=4, shuffle=True, num_workers=NUM_WORKERS)
record("number of batches", len(loader))
for epoch in range(2):
    for batch in loader:
        record("train", [batch.x, batch.edge_index, batch.y, batch.batch, batch.ptr])
        record("graphs", [graph.x for graph in batch.to_data_list()])
"""
    replacements: ClassVar[dict[str, str]] = {
        "from torch_geometric.loader import DataLoader\n": IMPORT_OF_FASTLOAD,
        "num_workers=NUM_WORKERS)": "num_workers=NUM_WORKERS, collate_fn=Batch.from_data_list)",
    }
