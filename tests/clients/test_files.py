"""Scripts whose datasets decode files: the losses of ten epochs, with the files remembered and without.

Each script trains with torch's loader without workers, with forked and with spawned ones. Each hit is decoded
again and compared.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from fastload.cache.decoded_files import count_files, open_files
from tests.clients.harness import IMPORT_OF_FASTLOAD, IMPORT_OF_TORCH, Run, Started, changed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OPTIONS = "**options)"
RUN = ("-m", "fastload", "run", "--cache")
SAMPLE = ', seeding="sample"'  # resumed, the augmentations are those of an epoch that was not stopped


@pytest.fixture(scope="session")
def torchs_losses(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Called with a client: its folder of files, and what torch's loader gives with them."""
    known: dict[type, tuple[Path, list[str]]] = {}

    def losses(client: Losses) -> tuple[Path, list[str]]:
        if type(client) not in known:
            folder = tmp_path_factory.mktemp("torch")
            data = folder / "data"
            known[type(client)] = data, client.run(folder / "torch", data, "torch").ranks[0].got("train")
        return known[type(client)]

    return losses


class Losses:
    """The claims of each client."""

    script: ClassVar[str]  # its loader's last argument is `**options`
    # Where a library makes the loader, no argument of fastload's can be given: "run".
    # Such a loader has no state of fastload's either, so that script does not resume.
    ways: ClassVar[tuple[str, ...]] = ("fastload", "ram", "lmdb", "run")
    replacements: ClassVar[Mapping[str, str]] = {}  # what a user changes beside the import
    seeding: ClassVar[str] = SAMPLE
    filled_after: ClassVar[int] = 1  # epochs; more, if samples read random files
    limit_s: ClassVar[float] = 300.0

    def run(self, folder: Path, data: Path, way: str, more: str = "", **settings: str) -> Run:
        """Run the script to its end; for "lmdb", the store is in the folder above."""
        store, command = f"lmdb:{folder.parent / 'store'}", ("train.py",)
        caches = {"ram": ', cache="ram"', "lmdb": f', cache="{store}"'}
        script = changed(self.script, "torch")
        if way.startswith("run"):
            command = (*RUN, store if way == "run lmdb" else "ram", "train.py")
        elif way != "torch":
            replacements = {IMPORT_OF_TORCH: IMPORT_OF_FASTLOAD, **self.replacements}
            replacements[OPTIONS] = f"**options{caches.get(way, '')}{more})"
            script = changed(self.script, "fastload", replacements)
        variables = {"CLIENT_DATA": str(data), "FASTLOAD_VERIFY": "1", **settings}
        started = Started(script, folder, command=command, settings=variables)
        return started.end(self.limit_s).check(way)

    def test_losses_are_torchs(self, way: str, tmp_path: Path, torchs_losses: Any) -> None:
        """Batches and losses are equal, bit for bit; in the filled store nothing is decoded."""
        data, expected = torchs_losses(self)
        first = self.run(tmp_path / "first", data, way).ranks[0]

        assert first.got("train") == expected
        assert len(expected) > 100
        is_counted = way != "fastload"
        if is_counted:
            decoded = [json.loads(counts) for counts in first.got("decoded")]
            assert decoded[0][0] > 0
            for number, counts in enumerate(decoded):
                filled = counts[self.filled_after - 1 :] if number == 0 else [0, *counts]
                assert filled == filled[:1] * len(filled), decoded
        if "lmdb" in way:
            second = self.run(tmp_path / "second", data, way).ranks[0]
            assert second.got("train") == expected
            decoded = [json.loads(counts) for counts in second.got("decoded")]
            assert not is_counted or not any(map(any, decoded)), decoded
            stored = count_files(open_files(str(tmp_path / "store")))[0]
            assert stored >= len(list(data.rglob("*.[jw]*g")))


class Resumed(Losses):
    """The script's loop is that of `in_rank.fit`, which can save and load the state of a loader."""

    def test_resumes_in_mid_epoch(self, tmp_path: Path, torchs_losses: Any) -> None:
        """Stopped with the files in memory, resumed with those on disk: the losses of one run."""
        data, _ = torchs_losses(self)
        whole, before, after = (
            self.run(tmp_path / part, data, way, self.seeding, CLIENT_PART=part, CLIENT_IS_PLAIN="1")
            for part, way in (("whole", "fastload"), ("stop", "ram"), ("resume", "lmdb"))
        )

        parts = before.ranks[0].got("train"), after.ranks[0].got("train")
        assert all(parts)
        assert parts[0] + parts[1] == whole.ranks[0].got("train")


class TestTorchvision(Resumed):
    script = """
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


def make(folder):
    for number in range(24):
        place = folder / "ab"[number % 2]
        place.mkdir(exist_ok=True)
        photograph(number, (120 + number, 90)).save(place / f"{number:02d}.jpg", quality=90)


augment = transforms.Compose([
    transforms.RandomResizedCrop(64),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
    transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
])
if __name__ == "__main__":
    dataset = ImageFolder(files(make), augment)
    for options in WORKERS:
        seed()
        fit(DataLoader(dataset, batch_size=4, shuffle=True, **options), lambda batch: batch[0])
"""
    ways = ("fastload", "ram", "lmdb", "run", "run lmdb")


class TestHuggingFaceFromFiles(Resumed):
    script = """
from datasets import Dataset, Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2


def make(folder):
    for number in range(24):
        kind = ("jpg", "png", "webp")[number % 3]
        photograph(number, (120 + number, 90)).save(folder / f"{number:02d}.{kind}", lossless=True)


crop = v2.CenterCrop(64) if IS_PLAIN else v2.RandomResizedCrop(64)
end = v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)
steps = v2.Compose([crop, *end])


def augment(rows):
    return {"image": [steps(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}


def opened():
    paths = sorted(map(str, files(make).iterdir()))
    rows = Dataset.from_dict({"image": paths, "label": list(range(24))}).cast_column("image", Image())
    rows.set_transform(augment)
    return rows


if __name__ == "__main__":
    dataset = opened()
    for options in WORKERS:
        seed()
        fit(DataLoader(dataset, batch_size=4, shuffle=True, **options), lambda batch: batch["image"])
"""
    seeding = ""  # by sample, it needs samples one by one, and a Dataset gives batches


class TestHuggingFaceFromParquet(Resumed):
    script = (
        TestHuggingFaceFromFiles.script.replace(
            "    paths =", "    table = files(make) / 'rows.parquet'\n    paths ="
        )
        .replace("files(make).iterdir()", "files(make).glob('*.*g')")
        .replace("list(range(24))", "list(range(len(paths)))")
        .replace(
            "    rows.set_transform(augment)\n    return rows",
            "    if not table.exists():\n"
            "        rows.to_parquet(table)\n"
            "    rows = Dataset.from_parquet(str(table), cache_dir=str(FOLDER / 'arrow'))\n"
            "    return rows.with_transform(augment)",
        )
    )
    seeding = ""


class TestHeif(Losses):
    script = (
        TestTorchvision.script.replace(
            "from torchvision.datasets import ImageFolder\n",
            "from torchvision.datasets import ImageFolder\n"
            "import pillow_heif\n\n"
            "pillow_heif.register_heif_opener()\n",
        )
        .replace('.jpg", quality=90)', '.heic")')
        .replace("ImageFolder(files(make), augment)", "ImageFolder(files(make), augment, is_valid_file=bool)")
    )
    limit_s = 400.0


class TestMonai(Resumed):
    script = """
from monai.data import Dataset, list_data_collate
from monai.data.utils import worker_init_fn
from monai.transforms import (
    Compose, EnsureChannelFirstd, LoadImaged, RandFlipd, RandSpatialCropd, ScaleIntensityd,
)
from monai.utils import set_determinism
from torch.utils.data import DataLoader


def make(folder):
    draw = np.random.default_rng(0)
    for number in range(12):
        voxels = draw.integers(-99, 999, (24, 22, 20 + number), dtype=np.int16)
        np.savez_compressed(folder / f"{number:02d}-image.npz", voxels)
        np.savez_compressed(folder / f"{number:02d}-label.npz", (voxels > 0).astype(np.uint8))


keys = ["image", "label"]
steps = Compose([
    LoadImaged(keys),
    EnsureChannelFirstd(keys),
    ScaleIntensityd("image"),
    RandSpatialCropd(keys, (16, 16, 16), random_size=False),
    RandFlipd(keys, prob=0.5),
])
if __name__ == "__main__":
    folder = files(make)
    rows = [{key: str(folder / f"{number:02d}-{key}.npz") for key in keys} for number in range(12)]
    for options in WORKERS:
        if not options["num_workers"]:
            continue  # its transforms draw from generators of their own
        set_determinism(1)
        options |= {"collate_fn": list_data_collate, "worker_init_fn": worker_init_fn}
        loader = DataLoader(Dataset(rows, steps), batch_size=2, shuffle=True, **options)
        fit(loader, lambda batch: batch["image"])
"""
    script = "import numpy as np\n" + script.lstrip()
    limit_s = 400.0


JOINT = """
from pathlib import Path
from torch.utils.data import DataLoader
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

steps = v2.Compose([
    v2.ToImage(),
    v2.RandomPhotometricDistort(p=0.5),
    v2.RandomZoomOut(fill={tv_tensors.Image: (123, 117, 104), "others": 0}),
    v2.RandomIoUCrop(),
    v2.RandomHorizontalFlip(),
    v2.SanitizeBoundingBoxes(),
    v2.ToDtype(torch.float32, scale=True),
    v2.ToPureTensor(),
])


def collate(batch):
    return tuple(zip(*batch))
"""


class TestCocoDetection(Resumed):
    script = f"""import json
{JOINT}

def make(folder):
    images, annotations = [], []
    for number in range(24):
        name, size = f"{{number:02d}}.jpg", (120 + number, 90)
        photograph(number, size).save(folder / name)
        images.append({{"id": number, "file_name": name, "width": size[0], "height": 90}})
        for which in range(1 + number % 3):
            box = [5 + 9 * which, 7, 30 + which, 40]
            x, y, width, height = box
            outline = [[x, y, x + width, y, x + width, y + height]]
            annotations.append({{
                "id": len(annotations), "image_id": number, "category_id": 1 + which, "bbox": box,
                "area": width * height, "iscrowd": 0, "segmentation": outline,
            }})
    categories = [{{"id": 1 + which, "name": str(which)}} for which in range(3)]
    labels = {{"images": images, "annotations": annotations, "categories": categories}}
    (folder / "labels.json").write_text(json.dumps(labels))


if __name__ == "__main__":
    folder = files(make)
    dataset = datasets.CocoDetection(folder, folder / "labels.json", transforms=steps)
    dataset = datasets.wrap_dataset_for_transforms_v2(dataset, target_keys=("boxes", "labels", "masks"))
    for options in WORKERS:
        seed()
        loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate, **options)
        fit(loader, lambda batch: batch[0])
"""


class TestVocSegmentation(Resumed):
    filled_after = 2  # resizes come first, and the first epoch shows that they do not repeat
    script = f"""
{JOINT}

def make(folder):
    from PIL import Image

    base = folder / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (base / name).mkdir(parents=True)
    for number in range(24):
        size = 120 + number, 90
        photograph(number, size).save(base / "JPEGImages" / f"{{number:02d}}.jpg")
        mask = photograph(99 + number, size).convert("P", palette=Image.Palette.ADAPTIVE, colors=21)
        mask.save(base / "SegmentationClass" / f"{{number:02d}}.png")
    names = "\\n".join(f"{{number:02d}}" for number in range(24))
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text(names)


steps = v2.Compose([
    v2.RandomResize(60, 120),
    v2.RandomHorizontalFlip(),
    v2.RandomCrop((64, 64), pad_if_needed=True, fill={{tv_tensors.Mask: 255, "others": 0}}),
    v2.ToImage(),
    v2.ToDtype({{tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}}, scale=True),
    v2.Normalize([0.5] * 3, [0.2] * 3),
])
if __name__ == "__main__":
    dataset = datasets.VOCSegmentation(files(make), "2012", "train", transforms=steps)
    dataset = datasets.wrap_dataset_for_transforms_v2(dataset)
    for options in WORKERS:
        seed()
        fit(DataLoader(dataset, batch_size=4, shuffle=True, **options), lambda batch: batch[0])
"""


class TestTimm(Losses):
    script = (
        """
from timm.data import create_dataset, create_loader

"""
        + TestTorchvision.script[
            TestTorchvision.script.index("def make") : TestTorchvision.script.index("augment =")
        ]
        + """
if __name__ == "__main__":
    for options in WORKERS:
        seed()
        start_workers_by(options)
        dataset = create_dataset("", root=str(files(make)), is_training=True)
        loader = create_loader(
            dataset,
            (3, 64, 64),
            4,
            is_training=True,
            num_workers=options["num_workers"],
            persistent_workers=options["num_workers"] > 0,
            use_prefetcher=False,
            device=torch.device("cpu"),
        )
        fit(loader, lambda batch: batch[0])
"""
    )
    ways = ("run", "run lmdb")


class TestTrainer(Losses):
    script = (
        TestHuggingFaceFromFiles.script[: TestHuggingFaceFromFiles.script.index("if __name__")].replace(
            '"label"', '"labels"'
        )
        + """
from transformers import Trainer, TrainerCallback, TrainingArguments


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(192, 24)

    def forward(self, image, labels):
        pooled = torch.nn.functional.adaptive_avg_pool1d(image.flatten(1), 192)
        loss = torch.nn.functional.cross_entropy(self.layer(pooled), labels)
        record("train", f"{loss.item().hex()} {digest([image, labels])}")
        return {"loss": loss}


class Counting(TrainerCallback):
    counts = []

    def on_epoch_end(self, *args, train_dataloader, **kwargs):
        self.counts.append(decodes(train_dataloader))


if __name__ == "__main__":
    dataset = opened()
    for options in WORKERS:
        seed()
        start_workers_by(options)
        arguments = TrainingArguments(
            output_dir=str(FOLDER / "state"),
            use_cpu=True,
            per_device_train_batch_size=4,
            num_train_epochs=10,
            dataloader_num_workers=options["num_workers"],
            dataloader_persistent_workers=options["num_workers"] > 0,
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        counting = Counting()
        Trainer(model=Classifier(), args=arguments, train_dataset=dataset, callbacks=[counting]).train()
        record("decoded", json.dumps(counting.counts))
        Counting.counts = []
"""
    )
    script = "import json\n" + script.lstrip()
    ways = ("run", "run lmdb")


LOOP = "        fit(DataLoader(dataset, batch_size=4, shuffle=True, **options), lambda batch: batch[0])\n"


class TestAccelerate(Losses):
    ways = ("ram", "lmdb", "run")
    script = TestTorchvision.script.replace(
        LOOP,
        """
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(dataset, batch_size=4, shuffle=True, **options)
        loader = accelerator.prepare(loader)
        fit(loader, lambda batch: batch[0])
""",
    ).replace("from torchvision import", "from accelerate import Accelerator\nfrom torchvision import")
    replacements: ClassVar[dict[str, str]] = {
        "from accelerate import Accelerator\n": (
            "from accelerate import Accelerator\nimport fastload\nfastload.patch_torch()\n"
        ),
    }


class TestLightning(Losses):
    ways = ("ram", "lmdb", "run")
    script = (
        TestTorchvision.script.replace(
            LOOP,
            """
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=10,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        model = Classifier()
        trainer.fit(model, DataLoader(dataset, batch_size=4, shuffle=True, **options))
        record("decoded", json.dumps(model.counts))
""",
        )
        .replace(
            "augment =",
            """
class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.counts = torch.nn.Linear(192, 2), []

    def training_step(self, batch, batch_idx):
        pooled = torch.nn.functional.adaptive_avg_pool1d(batch[0].flatten(1), 192)
        loss = torch.nn.functional.cross_entropy(self.layer(pooled), batch[1])
        record("train", f"{loss.item().hex()} {digest(batch)}")
        return loss

    def on_train_epoch_end(self):
        self.counts.append(decodes(self.trainer.train_dataloader))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


augment =""",
        )
        .replace("from torch.utils", "import json\nimport lightning as L\nfrom torch.utils", 1)
    )


ULTRALYTICS = """
from torch.utils.data import DataLoader
from ultralytics.cfg import get_cfg
from ultralytics.data.build import build_dataloader, build_yolo_dataset


def make(folder):
    for name in ("images", "labels"):
        (folder / name).mkdir()
    for number in range(24):
        photograph(number, (120 + number, 90)).save(folder / "images" / f"{number:02d}.jpg", quality=90)
        (folder / "labels" / f"{number:02d}.txt").write_text(f"{number % 3} 0.5 0.4 0.3 0.2\\n")


def opened():
    settings = get_cfg(overrides={"imgsz": 64, "mixup": 0.3, "mosaic": 0.0 if IS_PLAIN else 1.0})
    settings.augmentations = []  # those of albumentations draw from a generator that nobody seeds
    data = {"names": {0: "a", 1: "b", 2: "c"}, "nc": 3, "channels": 3}
    return build_yolo_dataset(settings, str(files(make) / "images"), 4, data)


if __name__ == "__main__":
    for options in WORKERS:
        seed()
        dataset = opened()
        loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=dataset.collate_fn, **options)
        fit(loader, lambda batch: batch["img"])
"""


class TestUltralytics(Resumed):
    script = ULTRALYTICS


class TestUltralyticsWithItsOwnLoader(Losses):
    """It iterates once, over batches without an end."""

    script = ULTRALYTICS.replace(
        "        dataset = opened()", "        start_workers_by(options)\n        dataset = opened()"
    ).replace(
        "DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=dataset.collate_fn, **options)",
        'build_dataloader(dataset, 4, options["num_workers"], device="cpu")',
    )
    ways = ("run", "run lmdb")
