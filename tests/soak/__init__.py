"""A soak: random samples, settings, consumers and faults, each batch compared with a formula.

    python -m tests.soak --minutes 30                     random cases until the time is over
    python -m tests.soak --case 123                       one case again
    python -m tests.soak --case 123 --with num_workers=1  the same case with another setting

One integer, the seed, determines a case (`case`). Each sample is a function of its index (`samples`), and the
soak computes the order of the indices with torch's samplers (`order`): it knows each batch before it asks the
loader for it. The mode of a case is the way in which the consumer uses the loader and the batches (`modes`,
`faults`). After each case `run` checks that the library has left nothing behind.

Files from the bottom up: samples, compare, datasets, case; order; subject; modes, faults; run; __main__.
"""
