"""Run a user's program, or a model by name, inside a profile.

`program` parses the command line, `script` executes the program as Python would, `run` does so inside a profile, and
`ranks` by a launcher on several ranks. `models` runs models by name. `rerun` starts further processes, and `children`
waits for them.
"""
