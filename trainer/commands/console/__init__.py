"""trainer console: serves a web page to watch and steer the runs in a folder.

It reads run directories and starts launchers, and keeps no state of its own: runs continue if it dies.
"""
