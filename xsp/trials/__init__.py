"""Changes to a program that is being measured, made from outside its code, in a process of their own.

`trial` names them, `settings`, `calls`, `folding` and `training` make them, and `child` has them made while a program
runs under xsp. `xsp.advise.experiment` runs a program without and with one in turns.
"""
