"""A folder for PYTHONPATH: Python imports the file `sitecustomize` in it when an interpreter starts."""
