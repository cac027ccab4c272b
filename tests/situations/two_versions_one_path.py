"""Two versions of a script that share one path: the second one's size is refused, with the name of what differs."""

import fastload

first = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="lmdb:photos.lmdb")
for other in (
    fastload.ImageFolder("photos", size=(24, 32)),
    torch_subset := __import__("torch").utils.data.Subset(fastload.ImageFolder("photos"), range(20)),
    fastload.ImageFolder("photos/.."),
):
    try:
        fastload.CachedDataset(other, cache="lmdb:photos.lmdb")
    except fastload.errors.CacheMismatchError as error:
        assert "size" in str(error) or "samples" in str(error) or "class" in str(error), error
    else:
        raise AssertionError("no error")
second = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="lmdb:photos.lmdb")
assert second[39][0].max() == first[39][0].max() == 234
