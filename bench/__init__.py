"""Measures this trainer beside what its users could use instead; `python -m bench quick=true`, from a checkout.

config.py       the options                               windows.py  two in turn, one of them paused
contestants.py  who, on what, and what is aimed at        ratios.py   what their rates say
running.py      one of them at work; processes.py: Linux  startup.py  from the command to the first step
workloads.py    models that are not shipped               report.py   table and JSON; plot.py
peers/          the others, as their users write them
"""
