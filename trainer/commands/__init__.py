"""One file or folder for each `mode=`."""
