"""ImageFolder over a server that speaks S3: listing, reading in all workers, builds, bad requests."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import s3fs
import torch
from obstore.fsspec import FsspecStore
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.cli.main import app
from tests.kit.s3 import CREDENTIALS, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 20


def png(value: int) -> bytes:
    """A small image of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server with 20 images in two classes; image i is full of i."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    with serving() as endpoint:
        fs = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
        fs.mkdir("photos")
        fs.pipe({f"photos/train/class{i // 10}/{i:02}.png": png(i) for i in range(SIZE)})
        len(obstore_folder(endpoint))  # its runtime keeps descriptors open until the interpreter exits
        yield endpoint
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def folder(endpoint: str) -> fastload.ImageFolder:
    """The images."""
    return fastload.ImageFolder("s3://photos/train", storage_options={"endpoint_url": endpoint})


def values(loader: Any) -> list[int]:
    """The images, as the value that fills each of them."""
    return [int(value) for images, _ in loader for value in images[:, 0, 0, 0]]


def test_it_lists_classes_files_and_versions(folder: fastload.ImageFolder) -> None:
    """Every object has an ETag."""
    parts = folder.fingerprint()

    assert folder.classes == ["class0", "class1"]
    assert len(folder) == SIZE
    assert folder.samples[11] == ("s3://photos/train/class1/11.png", 1)
    assert parts is not None
    assert parts["files"].startswith("20 files, digest ")


def test_a_file_takes_one_request(folder: fastload.ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, s3fs asks for the size of an object before it reads the object."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a second request")

    monkeypatch.setattr(s3fs.S3FileSystem, "_info", refuse)

    assert folder[3][0][0, 0, 0] == 3


def obstore_folder(endpoint: str, **options: Any) -> fastload.ImageFolder:
    """The images, through another client."""
    config = {"endpoint": endpoint, "access_key_id": "test", "secret_access_key": "test"}
    store = FsspecStore(
        "s3", config={**config, "region": "us-east-1"}, client_options={"allow_http": True}, **options
    )
    return fastload.ImageFolder("s3://photos/train", filesystem=store)


def test_a_file_system_of_the_users_gives_the_same_samples(
    endpoint: str, folder: fastload.ImageFolder
) -> None:
    """Also the same fingerprint, because both clients state the ETags."""
    other = obstore_folder(endpoint)

    assert list(other.samples) == list(folder.samples)
    assert other.fingerprint() == folder.fingerprint()
    assert other[3][0][0, 0, 0] == 3


def test_workers_make_their_own_file_system(endpoint: str) -> None:
    """From the arguments of the user's, which was used before."""
    folder = obstore_folder(endpoint)
    assert folder[3][0][0, 0, 0] == 3

    loader = fastload.DataLoader(folder, 4, num_workers=1, multiprocessing_context="forkserver")

    assert values(loader) == list(range(SIZE))


def test_a_file_system_that_does_not_survive_a_fork_is_an_error_in_forked_workers(endpoint: str) -> None:
    """Without it, the first read would never end."""
    folder = obstore_folder(endpoint)
    loader = fastload.DataLoader(folder, 4, num_workers=1, multiprocessing_context="fork")

    with pytest.raises(RuntimeError, match=r"whose threads do not survive a fork.*forkserver"):
        next(iter(loader))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_every_start_method_read_it(folder: fastload.ImageFolder, method: str) -> None:
    """The parent has used its connections before."""
    assert folder[3][0][0, 0, 0] == 3

    loader = fastload.DataLoader(folder, 4, num_workers=2, multiprocessing_context=method)

    assert values(loader) == list(range(SIZE))


def test_torchs_loader_reads_it(folder: fastload.ImageFolder) -> None:
    """With forked workers."""
    loader: Any = torch.utils.data.DataLoader(folder, 4, num_workers=2)

    assert values(loader) == list(range(SIZE))


def test_a_cache_in_ram_is_shared_by_the_objects_versions(endpoint: str) -> None:
    """Two datasets of this process, as two ranks would open them."""
    options = {"endpoint_url": endpoint}
    one, other = (
        fastload.CachedDataset(fastload.ImageFolder("s3://photos/train", storage_options=options))
        for _ in range(2)
    )

    assert values(fastload.DataLoader(one, 4)) == list(range(SIZE))
    assert other.cache_info().num_cached == SIZE


def test_the_list_is_saved_in_the_bucket(endpoint: str) -> None:
    """The second ImageFolder sends no request for a listing."""
    options = {"endpoint_url": endpoint}
    fs = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    fs.pipe({f"photos/saved/{name}/1.png": png(1) for name in ("a", "b")})
    first = fastload.ImageFolder("s3://photos/saved", storage_options=options, listing="save")
    fs.pipe_file("photos/saved/c/1.png", png(1))

    second = fastload.ImageFolder("s3://photos/saved", storage_options=options)

    assert second.classes == first.classes == ["a", "b"]
    assert second.fingerprint() == first.fingerprint()


def test_a_missing_bucket_is_an_error(endpoint: str) -> None:
    """It names the URL."""
    with pytest.raises(FileNotFoundError, match=r"there is no folder at s3://nowhere/train"):
        fastload.ImageFolder("s3://nowhere/train", storage_options={"endpoint_url": endpoint})


def test_an_object_that_is_gone_is_an_error_with_its_url(endpoint: str) -> None:
    """It was deleted after the listing."""
    fs = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
    fs.pipe({"photos/gone/a/1.png": png(1), "photos/gone/a/2.png": png(2)})
    folder = fastload.ImageFolder("s3://photos/gone", storage_options={"endpoint_url": endpoint})
    fs.rm("photos/gone/a/1.png")

    with pytest.raises(fastload.ImageReadError, match=r"s3://photos/gone/a/1.png.*FileNotFoundError"):
        folder[0]
    assert folder[1][0][0, 0, 0] == 2


def test_the_command_line_builds_a_cache_from_it(
    endpoint: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint comes from the environment, as for every program that uses S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    path = tmp_path / "train.lmdb"

    result = CliRunner().invoke(app, ["cache", "build", "s3://photos/train", str(path)])

    assert result.exit_code == 0, result.output
    cached = fastload.CachedDataset.from_cache(path)
    assert values(fastload.DataLoader(cached, 4)) == list(range(SIZE))
    assert cached.classes == ["class0", "class1"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://nowhere/train", "there is no folder in s3://nowhere/train"),
        ("gs://bucket/train", "gs://bucket/train needs a package that is not installed"),
        ("s9://bucket/train", "Protocol not known: s9"),
    ],
)
def test_a_wrong_url_on_the_command_line_is_an_error(
    endpoint: str, source: str, message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, without a traceback."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)

    result = CliRunner().invoke(app, ["cache", "build", source, str(tmp_path / "x.lmdb")])

    assert result.exit_code == 2
    assert message in result.output.replace("\n", "")
    assert "Traceback" not in result.output
