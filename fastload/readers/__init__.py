"""Readers: libraries that decode files, met at their entry points, so that no file is decoded twice.

The user's code runs in full on every access. What a library made of a file is remembered under the identity
of the file and the arguments of the decoder, while a dataset is read.

Read in this order: `identity` (what identifies a file), `results` (what decoders return, as bytes),
`decode_cache` (what is remembered, and for whom), `reasons` (why something was not found), `patch` and
`patches` (how and when a library is met), and `request` (what a user asks for). Then a file for each library:
`opencv`, `npz`, `tifffile`, `torchvision_io`, and `pillow` after `pixels` (what is stored),
`resizes` (which resizes repeat), `original` (what is stored of a file) and `lazy_image` (images without
pixels until something needs them). Users register functions of their own by `remember`.
"""
