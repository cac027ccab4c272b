"""Readers: libraries that decode files, met at their entry points, so that no file is decoded twice.

The user's code runs in full on every access. What a library made of a file is remembered under the identity
of the file and the arguments of the decoder, while a dataset is read.

Read in this order: `patches` (how and when a library is met), `reasons` (why something is not found),
`identity` (what identifies a file), `results` (what decoders return, as bytes), `decode_cache` (what is
remembered, and for whom), and `request` (what a user asks for). Then a file for each library: `opencv`,
`npz`, `tifffile`, `torchvision_io`, and `pillow` after `lessons` (which resizes repeat), `original` (what is
stored of a file) and `lazy_image` (images without pixels until something needs them). Users register
functions of their own by `remember`.
"""
