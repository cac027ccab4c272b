"""What fastload knows of libraries of transforms, behind one interface.

Read `library` (the interface), `albumentations` (the one library that implements all of it), `torchvision`
(functions of one image), then `libraries` (the table, which the layers above ask).
"""
