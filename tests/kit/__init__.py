"""What tests of several folders share.

datasets.py     datasets, samples, samplers and collate functions, where started workers can import them
batches.py      whether batches are the same, in value and in kind; an epoch of torch's loader beside ours
faults.py       systems that refuse: system calls, limits, a missing /proc
accelerator.py  an accelerator that is not there, so that batches are pinned
processes.py    programs in processes of their own; gates, and processes that end
leaks.py        processes, threads, descriptors and files that a test leaves behind
decoding.py     a store of decoded files in a dict
torchvision.py  torchvision without its compiled part

Helpers of one folder are in that folder, in modules named `zoo.py` or `..._zoo.py`. A helper of one file
is in that file.
"""
