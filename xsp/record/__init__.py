"""Record a program: which levels are on in which step, what that costs, and the way of a step to the disk.

`session` is the block, `steps` what happens in it, `blocks` what the program names inside, `description` what
`run.json` says of it all; `schedule` is whose turn it is, `budget` what it may cost and `overhead` what it does;
`collecting` switches the collectors. `storing` has a step on its way to disk; `writer` is the measured program's end
of the process that stores steps, `xsp.store.write` the other one. `autostep` finds steps. `progress` says how far a run
is while it goes on, `terminal` draws it.
"""
