"""ImageFolder over a server that speaks S3: listing, reading in all workers, builds, bad requests."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from obstore.fsspec import FsspecStore
from typer.testing import CliRunner

import fastload
from fastload.cache.build import upload
from fastload.cache.lmdb.manifest import remote_files
from fastload.cli.main import app
from tests.files.conftest import png

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow  # each request passes through a server in Python

SIZE = 20


@pytest.fixture(scope="module")
def endpoint(s3: str) -> str:
    """A server with 20 images in two classes; image i is full of i."""
    fs = fsspec.filesystem("s3", endpoint_url=s3, skip_instance_cache=True)
    fs.mkdir("photos", create_parents=True)
    fs.pipe({f"photos/train/class{i // 10}/{i:02}.png": png(i) for i in range(SIZE)})
    len(obstore_folder(s3))  # its runtime keeps descriptors open until the interpreter exits
    return s3


@pytest.fixture
def folder(endpoint: str) -> fastload.ImageFolder:
    """The images."""
    # Not from the environment: a fork server that another test has started has the environment of that time.
    options = {"endpoint_url": endpoint, "key": "test", "secret": "test"}
    return fastload.ImageFolder("s3://photos/train", storage_options=options)


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
    """By default, s3fs asks for the size of an object first; the shards of a cache are moved as it does."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a second request")

    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_info", refuse)
    shards, _ = remote_files("s3://photos/caches").file_system()
    images, _ = folder._remote.file_system()  # type: ignore[union-attr]
    by_default = fsspec.filesystem("s3", skip_instance_cache=True)

    assert folder[3][0][0, 0, 0] == 3
    assert (shards.max_concurrency, images.max_concurrency) == (by_default.max_concurrency, 1)


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
    """Workers make their own of its arguments, and no fork, which it does not survive; ETags are the same."""
    other = obstore_folder(endpoint)

    assert list(other.samples) == list(folder.samples)
    assert other.fingerprint() == folder.fingerprint()
    assert other[3][0][0, 0, 0] == 3
    options: Any = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    assert values(fastload.DataLoader(other, 4, **options)) == list(range(SIZE))
    options["multiprocessing_context"] = "fork"
    with pytest.raises(RuntimeError, match=r"whose threads do not survive a fork.*forkserver"):
        next(iter(fastload.DataLoader(other, 4, **options)))


@pytest.mark.parametrize(
    ("loader_of", "method"),
    [
        (fastload.DataLoader, "fork"),
        (fastload.DataLoader, "forkserver"),
        (torch.utils.data.DataLoader, "fork"),
    ],
)
def test_workers_read_it(folder: fastload.ImageFolder, loader_of: Any, method: str) -> None:
    """The parent has used its connections before."""
    assert folder[3][0][0, 0, 0] == 3

    loader = loader_of(folder, 4, num_workers=1, multiprocessing_context=method)

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


def test_an_object_that_is_gone_is_an_error_with_its_url(endpoint: str) -> None:
    """It was deleted after the listing."""
    fs = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
    fs.pipe({"photos/gone/a/1.png": png(1), "photos/gone/a/2.png": png(2)})
    folder = fastload.ImageFolder("s3://photos/gone", storage_options={"endpoint_url": endpoint})
    fs.rm("photos/gone/a/1.png")

    with pytest.raises(
        fastload.errors.ImageReadError, match=r"s3://photos/gone/a/1.png.*it was there when the"
    ):
        folder[0]
    assert folder[1][0][0, 0, 0] == 2


def test_without_credentials_the_error_says_how_to_read_a_public_bucket(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """There is one attempt, and what the error says works."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options: dict[str, Any] = {"endpoint_url": endpoint}

    with pytest.raises(fastload.errors.RemoteFolderError, match=r"storage_options={'anon': True}"):
        fastload.ImageFolder("s3://photos/train", storage_options=options)
    assert pauses == []
    assert len(fastload.ImageFolder("s3://photos/train", storage_options={**options, "anon": True})) == SIZE


# --- caches at a URL -------------------------------------------------------------------------------------


@pytest.fixture
def host(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test's own for builds and copies."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("FASTLOAD_CACHE_DIR", str(tmp_path / "host"))
    return tmp_path / "host"


def run(*words: str) -> Any:
    """The JSON that a command prints."""
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_the_command_line_builds_a_cache_there_and_workers_read_it(host: Path) -> None:
    """Both ways by S3; building again finds the cache."""
    url = "s3://photos/caches/built"
    command = ("cache", "build", "s3://photos/train", url, "--shards", "3", "--workers", "2")

    assert run(*command)["was_built"]
    assert not run(*command)["was_built"]

    cached = fastload.CachedDataset.from_cache(url)
    loader = fastload.DataLoader(cached, 4, num_workers=1, multiprocessing_context="fork")
    assert values(loader) == list(range(SIZE))
    assert cached.classes == ["class0", "class1"]
    assert os.listdir(host / f"builds-{os.getuid()}") == []


def test_a_cache_is_downloaded_with_storage_options(
    host: Path, folder: fastload.ImageFolder, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment has no endpoint; workers read the local copy."""
    url = "s3://photos/caches/options"
    run("cache", "build", "s3://photos/train", url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    options = {"endpoint_url": endpoint, "key": "test", "secret": "test"}

    cached = fastload.CachedDataset.from_cache(url, storage_options=options)
    beside = fastload.CachedDataset(folder, cache=fastload.cache.LMDBCache(url, storage_options=options))

    assert values(fastload.DataLoader(cached, 4, num_workers=1)) == list(range(SIZE))
    assert values(fastload.DataLoader(beside, 4)) == list(range(SIZE))


def test_a_cached_dataset_finds_the_cache_by_its_fingerprint(
    host: Path, folder: fastload.ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image is read."""
    run("cache", "build", "s3://photos/train", "s3://photos/caches/known")

    def refuse(*_: Any) -> None:
        raise AssertionError("an image is read")

    monkeypatch.setattr(fastload.ImageFolder, "__getitem__", refuse)
    cached = fastload.CachedDataset(folder, cache="lmdb:s3://photos/caches/known")

    assert "its fingerprint matches" in cached.explain()
    assert values(fastload.DataLoader(cached, 4)) == list(range(SIZE))


def test_commands_about_a_cache_at_a_url(host: Path) -> None:
    """`info` downloads nothing, `verify` makes a copy, `ls` lists it, and `rm` removes it."""
    url = "s3://photos/caches/commands"
    built = run("cache", "build", "s3://photos/train", url, "--shards", "2")

    found = run("cache", "info", url)
    assert found == {name: built[name] for name in found}
    assert found["num_cached"] == SIZE
    assert not (host / f"copies-{os.getuid()}").exists()

    verified = run("cache", "verify", url)
    assert verified["num_damaged"] == 0
    listed = run("cache", "ls", str(host / f"copies-{os.getuid()}"))["disk"]
    assert [(one["path"], one["state"]) for one in listed] == [(verified["path"], "finished")]
    assert run("cache", "ls")["copies"]["number"] == 1
    assert f"{host}/copies-{os.getuid()}' lists them" in CliRunner().invoke(app, ["cache", "ls"]).output

    run("cache", "rm", verified["path"], "--yes")
    assert os.listdir(host / f"copies-{os.getuid()}") == []


def test_a_local_cache_is_uploaded_too(host: Path, tmp_path: Path) -> None:
    """The command line answers about the cache at the URL; the local one has the samples and classes."""
    local, url = str(tmp_path / "x.lmdb"), "s3://photos/caches/both"

    found = run("cache", "build", "s3://photos/train", local, "--out", url)
    cached = fastload.CachedDataset.from_cache(local)

    assert found["path"] == url
    assert run("cache", "info", local)["nbytes"] == found["nbytes"]
    assert values(fastload.DataLoader(cached, 4)) == list(range(SIZE))
    assert cached.classes == ["class0", "class1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("build-shard", "S", "s3://b/c", "1/2"), "shards are built in a directory that all machines see"),
        (("build", "S", "s3://b/c", "--ray", "local"), "--ray builds in a directory that all machines see"),
        (("build", "S", "s3://b/c", "--out", "s3://b/d"), "pass one of them"),
        (("build", "S", "x", "--out", "y"), "--out should be a URL"),
        (("build", "S"), "DEST"),
        (("join", "s3://b/c"), "joined by the build that uploads them"),
        (("rm", "s3://b/c"), "your store's own tool"),
        (("ls", "s3://b/c"), "fastload cache info s3://b/c"),
        (("info", "s3://photos/nothing"), "fastload cache build SOURCE s3://photos/nothing"),
        (("verify", "s9://b/c"), "Protocol not known: s9"),
        (("build", "s3://photos/train", "s9://b/c"), "Protocol not known: s9"),
        (("build", "s3://nowhere/train", "x.lmdb"), "there is no folder at s3://nowhere/train"),
        (("build", "gs://bucket/train", "x.lmdb"), "gs://bucket/train needs a package that is not installed"),
        (("build", "s9://bucket/train", "x.lmdb"), "Protocol not known: s9"),
    ],
)
def test_wrong_usage_of_a_url_says_what_to_do(host: Path, words: tuple[str, ...], message: str) -> None:
    """Exit code 2, and one line."""
    result = CliRunner().invoke(app, ["cache", *words])

    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", "")
    assert "Traceback" not in result.output


def test_ctrl_c_says_that_uploaded_shards_are_kept(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on."""
    command = ("cache", "build", "s3://photos/train", "s3://photos/caches/stopped", "--shards", "2")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(upload.Build, "write", interrupted)
        result = CliRunner().invoke(app, command)

    assert result.exit_code == 130
    assert "Finished shards are kept at s3://photos/caches/stopped" in result.output
    assert run(*command)["was_built"]


def test_a_build_into_a_missing_bucket_is_an_error(host: Path) -> None:
    """No bucket is made."""
    result = CliRunner().invoke(app, ["cache", "build", "s3://photos/train", "s3://nowhere/cache"])

    assert result.exit_code == 1
    assert "cannot write s3://nowhere/cache/plan.json" in result.output
    assert not fsspec.filesystem("s3", skip_instance_cache=True).exists("nowhere")
