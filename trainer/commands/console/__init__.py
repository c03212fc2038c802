"""trainer console: a web page of all runs in a folder, from which they are watched and steered.

It reads run directories and starts launchers, and keeps no state of its own: runs continue if it dies.
"""
