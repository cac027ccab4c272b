"""A soak: random samples, settings, consumers and faults, each batch compared with a formula.

    python -m tests.soak --minutes 30                     random cases until the time is over
    python -m tests.soak --case 123                       one case again, as often as you like
    python -m tests.soak --case 123 --with num_workers=1  the same case with another setting

One integer, the seed, determines a case (`case`). Each sample is a function of its index (`samples`), and the
soak computes the order of the indices with torch's samplers (`order`): it knows each batch before it asks the
loader for it. The mode of a case is the way in which the consumer uses the loader and the batches (`modes`,
`together`, `faults`, `neighbours`). After each case `run` checks that the library has left nothing behind.
`known` lists the defects that are known; the soak does not run the cases that meet one of them.

Files from the bottom up: samples, datasets, case, known; order, compare; subject; modes, together, faults,
neighbours; run; __main__.
"""
