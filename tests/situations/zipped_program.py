"""A program in one zip file (python -m zipapp), whose dataset class lies in it, trains with workers.

$ mkdir app && cp zipped_program.py app/__main__.py && cp zipped_program.py app/data.py && python -m zipapp app -o app.pyz && python app.pyz
"""

import fastload


class Photos:
    def __init__(self):
        self.folder = fastload.ImageFolder("photos")

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.folder[index][0]


if __name__ == "__main__":
    import data

    loader = fastload.DataLoader(
        fastload.CachedDataset(data.Photos()), 10, num_workers=1, multiprocessing_context="spawn"
    )
    assert [images[0, 0, 0, 0].item() for images in loader] == [0, 60, 120, 180]
