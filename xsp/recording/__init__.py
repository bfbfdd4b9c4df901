"""Profile a program: which levels are on in which step, what that costs, and the way of a step to the disk.

`session` is the block, `steps` what happens in it, `blocks` what the program names inside, `runfile` what `run.json`
says of it all; `schedule` is whose turn it is, `budget` and `account` what it may cost and does; `collecting`
switches the collectors. `writer` is the measured program's end of the process that stores steps, `store` the other one.
`launch`, `torchrun` and `measure` run a script, a distributed script, a model by name inside a block; `script` executes
a script as Python would, `again` runs it in further processes, `autostep` finds steps. `underway` and `watching` say
how far a run is while it goes on, `liveline` draws it.
"""
