"""A GPU where there is none: a CUDA build of torch over a runtime library that works on the CPU.

    make test-emulated                                   # the tests marked gpu
    python -m tests.emulated_cuda examples/train.py ...  # any script
    python -m tests.emulated_cuda -m pytest -m gpu ...   # any module

with a Python that has a CUDA build of torch; make builds one in build/cuda. torch itself is the real one: its
allocators, streams, events, pinned memory, errors and checks all run. What lies below is replaced:

- cudart.c, CUDA's runtime: device memory, streams that run late, pinned and registered memory, errors.
- kernels.py, the values of torch's operators, computed on the CPU in the order of the stream.

What it finds: wrong calls, use without order, memory that comes back too early, waits of the host, leaks.
What it cannot tell: how fast anything is, and what a driver does where CUDA's manual is silent. cuDNN, cuBLAS
and torch.compile do not work; convolutions and matrix products do. Settings: see cudart.c.
"""
