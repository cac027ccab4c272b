"""A photo that was edited after the build is noticed, and the error names what differs.

$ python edited_photo.py build
$ touch -r photos/cat/00.png mark; cp photos/dog/39.png photos/cat/00.png; touch -r mark photos/cat/00.png
$ python edited_photo.py content
$ touch photos/dog/20.png
$ python edited_photo.py time
"""

import sys

import fastload

photos = fastload.ImageFolder("photos")
if sys.argv[1] == "build":
    fastload.CachedDataset.build(photos, "photos.lmdb", num_workers=0, progress=False)
try:
    dataset = fastload.CachedDataset(photos, cache="lmdb:photos.lmdb")
except fastload.errors.CacheMismatchError as error:
    assert sys.argv[1] != "build"
    assert "photos.lmdb" in str(error)
else:
    assert sys.argv[1] == "build"
