"""Files of datasets, runs and uploads are read in a process of their own: the API loads no torch, OpenCV or Pillow.

client.Reader      the API's side: call a function by name, wait for its JSON
main               the process: holds the libraries ready and forks once per call
functions          what can be called; untrusted files are parsed only there
"""
