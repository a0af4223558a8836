"""What is put on a script's PYTHONPATH: Python imports `sitecustomize` from here before the script starts."""
