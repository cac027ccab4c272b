"""A soak: random samples, settings, consumers and faults, each batch compared with a formula.

    python -m tests.soak --minutes 30                     random cases until the time is over
    python -m tests.soak --case 123                       one case again, as often as you like
    python -m tests.soak --case 123 --with num_workers=1  the same case with another setting

A case follows from one integer, its seed (`case`). Each sample is a function of its index (`samples`), and
the order of the indices is that which torch's samplers draw (`order`), so that each batch is known before the
loader is asked for it. A mode says what the consumer does with the loader and with the batches (`modes`,
`together`, `faults`, `neighbours`), and `run` checks afterwards that nothing is left behind. `known` lists
the cases that fail today because of a defect that is known.

Files from the bottom up: samples, datasets, case, known; order, compare; subject; modes, together, faults,
neighbours; run; __main__.
"""
