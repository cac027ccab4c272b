"""What fastload knows of libraries of transforms, behind one interface.

Read `library` (the interface), `albumentations` (the one library that implements all of it), `torchvision`
(functions of one image), then `libraries` (the table, which the layers above ask). Crops in the decoder need
`encoded` and `regions` (images that are decoded later, or in part). `torchvision_end` does the last steps of
torchvision's pipelines at once, where `ends` says.
"""
