"""SIGTERM in the middle of an epoch, as a scheduler sends it, ends the script and its workers.

$ python ended_by_sigterm.py & timeout 20 tail -n +1 -s 0.1 -F ready.txt 2> /dev/null | head -n 1 > /dev/null; kill $!; wait $!; test $? = 143
"""

import fastload

loader = fastload.DataLoader(fastload.ImageFolder("photos"), num_workers=2, persistent_workers=True)
for epoch in range(100_000):
    for images, labels in loader:
        pass
    if epoch == 0:
        open("ready.txt", "w").write("ready\n")
