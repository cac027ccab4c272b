"""How caches are filled and files are built by several processes, and how a build is resumed."""
