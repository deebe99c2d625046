"""Names of the files that a training and its watcher share. Imports nothing: the trainer reads it beside itself."""

LAST, FINAL, TRACE = "last", "final.json", "parameters.bin"
