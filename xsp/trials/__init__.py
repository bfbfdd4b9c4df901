"""Trials: changes to a measured program from outside its code, in a separate process.

`trial` lists them, `settings`, `calls`, `capture`, `folding` and `training` implement them, and `child` applies them
while a program runs under xsp. `xsp.advise.experiment` runs a program without and with a trial in turns.
"""
