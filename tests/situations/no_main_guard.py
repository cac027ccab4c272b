"""A script without the main guard ends under spawn, with an error whose last line names the guard.

$ python no_main_guard.py 2> told.txt; test $? = 1
$ tail -n 1 told.txt | grep -q "__name__ == '__main__'"
"""

import fastload

loader = fastload.DataLoader(fastload.ImageFolder("photos"), num_workers=1, multiprocessing_context="spawn")
for images, labels in loader:
    pass
