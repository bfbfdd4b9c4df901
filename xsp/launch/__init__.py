"""Run somebody's program, or a model by name, inside a profile.

`program` reads what was typed, `script` executes it as Python would, `run` does so inside a profile, `ranks` by a
launcher of several, `models` runs models by name. `rerun` runs it in further processes, `children` waits for these.
"""
