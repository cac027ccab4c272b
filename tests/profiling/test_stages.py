"""What a stack says: stages by files and by calls, names and lines of the user."""

from __future__ import annotations

import linecache
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fastload.profiling.stages import Work, is_own_code, work_of
from fastload.readers import opencv

PACKAGES, PYTHON = "/lib/site-packages", os.path.dirname(os.__file__)
FETCH = (f"{PACKAGES}/torch/utils/data/_utils/fetch.py", "fetch", "data")
ITEM = ("/home/me/train.py", "__getitem__", "self.step")
PILLOWS_OPEN = (f"{PACKAGES}/PIL/Image.py", "open", "factory")


def seen(*layers: tuple[str, str, str]) -> Work:
    """The work of a stack: of each frame, the outermost first, its file, its function and what it calls."""

    def call(*_: Any) -> Any:
        return work_of(sys._getframe(1))

    for path, name, called in reversed(layers):
        first, *rest = called.split(".")
        value: Any = call
        for part in reversed(rest):
            value = SimpleNamespace(**{part: value})
        *classes, name_alone = name.split(".")
        head = "".join(f"{' ' * depth}class {each}:\n" for depth, each in enumerate(classes))
        indent = " " * len(classes)
        source = f"{head}{indent}def {name_alone}(*_):\n{indent} return {called}(1)\n"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        names: dict[str, Any] = {first: value}
        exec(compile(source, path, "exec"), names)
        owner: Any = names[(classes or [name_alone])[0]]
        for each in (*classes, name_alone)[1:]:
            owner = getattr(owner, each)
        call = owner
    return call()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("inner", "stage", "name"),
    [
        ([("/home/me/train.py", "__getitem__", "cv2.imread")], "decode", "cv2.imread"),
        ([("/home/me/train.py", "__getitem__", "cv2.resize")], "transform", "cv2.resize"),
        ([("/home/me/train.py", "__getitem__", "self.file.read")], "read", "self.file.read"),
        ([("/home/me/train.py", "__getitem__", "self.lock")], "lock", "self.lock"),
        ([("/home/me/train.py", "__getitem__", "image.to")], "code", "image.to"),
        ([("/home/me/train.py", "slow", "time.sleep")], "code", "slow"),
        ([ITEM, (f"{PACKAGES}/PIL/ImageFile.py", "ImageFile.load", "decoder.decode")], "decode", None),
        ([ITEM, (f"{PACKAGES}/PIL/ImageFile.py", "ImageFile.load", "self.fp.read")], "read", "self.fp.read"),
        ([ITEM, (f"{PACKAGES}/PIL/Image.py", "Image.resize", "im.resize")], "resize", "Image.resize"),
        ([ITEM, PILLOWS_OPEN, (f"{PACKAGES}/PIL/JpegImagePlugin.py", "APP", "x")], "open", "Image.open"),
        ([ITEM, PILLOWS_OPEN, (f"{PACKAGES}/PIL/ImageFile.py", "f", "fp.read")], "open", "Image.open"),
        ([ITEM, PILLOWS_OPEN, (opencv.__file__, "init", "facts")], "cache", "init"),
        ([("/home/me/train.py", "__getitem__", "open")], "open", "open"),
        ([ITEM, (f"{PACKAGES}/PIL/JpegImagePlugin.py", "load_end", "x")], "decode", "load_end"),
        ([ITEM, (f"{PACKAGES}/torchvision/io/image.py", "decode_jpeg", "op")], "decode", "decode_jpeg"),
        ([ITEM, (f"{PACKAGES}/timm/data/transforms.py", "ToNumpy.__call__", "x")], "transform", None),
        ([ITEM, (f"{PYTHON}/multiprocessing/synchronize.py", "SemLock.wait", "x")], "lock", None),
        (
            [("/home/me/train.py", "f", "cv2.imread"), (opencv.__file__, "imread", "original")],
            "decode",
            "cv2.imread",
        ),
        ([("/home/me/train.py", "f", "cv2.imread"), (opencv.__file__, "imread", "x")], "cache", "imread"),
        ([(f"{PACKAGES}/torch/utils/data/_utils/collate.py", "collate", "x")], "collate", "collate"),
        ([(f"{PACKAGES}/torch/nn/modules/module.py", "_call_impl", "forward")], "code", ""),
    ],
)
def test_stages(inner: Any, stage: str, name: str | None) -> None:
    """By what a frame calls, else by its file; unknown libraries count for those that call them."""
    found = seen(FETCH, *inner)
    assert (found.stage, found.name) == (stage, found.name if name is None else name)
    assert found.line.startswith("train.py:") == (inner[0][0] == "/home/me/train.py")


def test_a_transform_has_the_name_of_its_class() -> None:
    """Instead of the function that it calls; and the line is the one that calls the pipeline."""
    folder = f"{PACKAGES}/albumentations"
    crop = (f"{folder}/crops.py", "RandomCrop.apply", "functional.crop")
    found = seen(
        FETCH, ITEM, (f"{folder}/core.py", "Compose.run", "t"), crop, (f"{folder}/f.py", "crop", "x")
    )
    assert found == Work("transform", "RandomCrop.apply", "train.py:2 in __getitem__")


def test_a_thread_that_makes_no_batch_is_idle() -> None:
    """Unless it copies to a device."""
    assert seen(("/home/me/train.py", "train", "model.forward")).stage == "idle"
    assert seen(("/home/me/train.py", "train", "images.cuda")).stage == "copy"
    assert work_of(None).stage == "idle"


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/home/me/train.py", True),
        ("<ipython-input-1>", True),
        (linecache.__file__, False),
        (f"{PACKAGES}/torch/x.py", False),
        (sys.modules[work_of.__module__].__file__, False),
        ("<frozen importlib>", False),
        ("<string>", False),
    ],
)
def test_whose_code_it_is(path: str, is_own: bool) -> None:
    """The user's is neither Python's, nor an installed package's, nor ours."""
    assert is_own_code(path) == is_own
